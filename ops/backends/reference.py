"""The reference attention backend: plain torch, slow; tests compare the other backends with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionMetadata, AttentionSpec, first_seen
from ostinato.ops.rope import rotate_heads

__all__ = ("BACKEND",)


class ReferenceBackend:
    """Gathers each sequence's context and computes in float32."""

    name = "reference"
    is_batch_invariant = False
    warm_up_seqs = (1,)

    def why_unsupported(self, spec: AttentionSpec) -> str | None:
        return None

    def workspace_bytes(
        self, spec: AttentionSpec, *, num_tokens: int, num_seqs: int, max_model_len: int
    ) -> int:
        return 0  # not in the memory plan: this backend is for tests, and it holds whole contexts

    def run_projected(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Do what `rotary_attention` of ops/fused/rotary_attention.py describes."""
        num_kv = k_cache.shape[1]
        heads = qkv.unflatten(1, (num_heads + 2 * num_kv, -1))
        queries_keys, v = heads.split_with_sizes((num_heads + num_kv, num_kv), 1)
        if cos is not None and sin is not None:
            queries_keys = rotate_heads(
                queries_keys, cos, sin, num_heads, q_weight=q_weight, k_weight=k_weight, eps=eps
            )
        q, k = queries_keys.split_with_sizes((num_heads, num_kv), 1)
        more = (scale, sliding_window, soft_cap, alibi_slopes, sinks)
        return self.run(q, k, v, k_cache, v_cache, metadata, *more)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        block_size = k_cache.shape[2]
        block, offset = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
        for cache, tensor in ((k_cache, k), (v_cache, v)):
            # One-byte dtypes are indexed as bytes: torch lacks these operations for them.
            _stored(cache)[block, :, offset] = _stored(_to_cache(tensor, cache.dtype))
        out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        starts = metadata.query_start_loc.tolist()
        group = q.shape[1] // k.shape[1]
        for row, length in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            if begin == end:
                continue
            blocks = metadata.block_table[row, : -(-length // block_size)].long()
            # [num_blocks, Hkv, block_size, D] -> [Hkv, length, D]
            keys, values = (
                _from_cache(_stored(cache)[blocks].view(cache.dtype), size)
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                for cache, size in ((k_cache, k.shape[2]), (v_cache, v.shape[2]))
            )
            first = first_seen(length - (end - begin), sliding_window)
            # Blocks outside of the window can be those of other sequences, and 0 * NaN is NaN.
            values = values.index_fill(1, torch.arange(first, device=q.device), 0.0)
            queries = q[begin:end].float().transpose(0, 1)  # [Hq, rows, D]
            logits = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            position = torch.arange(length - (end - begin), length, device=q.device)[:, None]
            context = torch.arange(length, device=q.device)[None, :]
            last = position
            if metadata.visible_ends is not None:
                last = last.maximum(metadata.visible_ends[begin:end, None].long() - 1)
            hidden = context > last
            if sliding_window > 0:
                hidden |= context <= position - sliding_window
            elif sliding_window < 0:
                hidden |= context < position - position % -sliding_window
            if alibi_slopes is not None:
                logits = logits + alibi_slopes[:, None, None] * (context - position)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                rows = sinks[:, None, None].expand(-1, end - begin, 1)
                logits = torch.cat((logits, rows), dim=-1)
            weights = logits.softmax(-1)[..., :length]
            out[begin:end] = (
                (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).to(q.dtype)
            )
        return out

    def run_cross(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        """Gather the keys and values of each row and compute in float32."""
        block_size, head_dim = k_cache.shape[2], q.shape[2]
        group = q.shape[1] // k_cache.shape[1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for row, length in enumerate(seq_lens.tolist()):
            blocks = block_table[row, : -(-length // block_size)].long()
            keys, values = (
                _from_cache(_stored(cache)[blocks].view(cache.dtype), head_dim)
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .repeat_interleave(group, 0)
                for cache in (k_cache, v_cache)
            )
            logits = (keys @ q[row].float()[:, :, None]).squeeze(2) * scale
            weights = logits.softmax(-1)[:, None]
            out[row] = (weights @ values).squeeze(1).to(q.dtype)
        return out


def _stored(tensor: Tensor) -> Tensor:
    """The tensor, as bytes if it is of a one-byte type."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _to_cache(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, D] as the cache's dtype; values beyond the range of float8 become its largest.

    In int8 the last dimension is D numbers from -127 to 127, then their float32 scale as 4 bytes.
    """
    if dtype is torch.int8:
        tensor = tensor.float()
        scales = tensor.abs().amax(-1, keepdim=True) / 127.0
        rounded = (tensor / scales).clamp(-127.0, 127.0).round()
        whole = torch.where(scales > 0.0, rounded, 0.0).to(torch.int8)
        return torch.cat((whole, scales.view(torch.int8)), -1)
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        tensor = tensor.clamp(-largest, largest)
    return tensor.to(dtype)


def _from_cache(places: Tensor, head_dim: int) -> Tensor:
    """Keys or values of the cache in float32: [..., elements as stored] -> [..., D]."""
    if places.dtype is not torch.int8:
        return places.float()
    scales = places[..., head_dim:].contiguous().view(torch.float32)
    return places[..., :head_dim].float() * scales


BACKEND = ReferenceBackend()
