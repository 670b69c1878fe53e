"""The op `ostinato::encoder_attention`: bidirectional attention over a packed batch.

An encoder needs no KV cache. It computes a sequence in one step, so all keys and values are in the
step itself. The batch is packed, sequence after sequence, and no row sees another sequence.

On a CPU the kernel is ops/native/attention/encoder_attention.cpp. The bits of a sequence's result
depend on that sequence alone. Until the kernel is loaded, and on other devices, torch computes the
op.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops.register import register_op

__all__ = ("encoder_attention", "encoder_attention_reference")


def encoder_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, *, scale: float
) -> Tensor:
    """Attend in both directions within each sequence of a packed batch (arXiv:1810.04805).

    Args:
        q: [T, H, D] float32, bfloat16 or float16, last dimension contiguous, D at most 256.
        k: [T, H, D], last dimension contiguous.
        v: [T, H, D], last dimension contiguous.
        query_start_loc: [S+1] int32, the first row of each sequence, then the row after
            the last one. The host reads it, so on a GPU the host waits for the device in each call.
        scale: factor on the logits, usually D ** -0.5.

    Returns:
        [T, H, D] contiguous, in q's dtype. Rows that belong to no sequence are zero.

    Raises:
        ValueError: the CPU kernel refused a shape, dtype or stride, or a `query_start_loc` whose
            values decrease.
    """
    return _op(q, k, v, query_start_loc, scale)


def _kernel(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, scale: float) -> Tensor:
    # The sequences are computed one by one, so that no padding is computed.
    out = q.new_zeros(q.shape)
    for begin, end in pairwise(query_start_loc.tolist()):
        if begin < end:
            heads = [side[begin:end].transpose(0, 1).unsqueeze(0) for side in (q, k, v)]
            attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], scale=scale)
            out[begin:end] = attended.squeeze(0).transpose(0, 1)
    return out


def encoder_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, scale: float
) -> Tensor:
    """`encoder_attention` as one masked product over the whole batch, in float32."""
    rows = torch.arange(q.shape[0])
    owner = torch.bucketize(rows, query_start_loc[1:].long(), right=True)
    logits = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    logits = logits.masked_fill(owner[:, None] != owner[None, :], -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.float())
    out[rows >= query_start_loc[-1]] = 0.0
    return out.to(q.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape)


_op = register_op("encoder_attention", {"CompositeExplicitAutograd": _kernel}, fake=_fake)
