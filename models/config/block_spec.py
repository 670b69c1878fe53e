"""`BlockSpec`: the parts of a model's decoder blocks as data, for models/decoder.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ("LLAMA_BLOCK", "BlockSpec", "NormKind", "QKNorm", "Residual")


class NormKind(StrEnum):
    """A normalisation of hidden states."""

    rms = "rms"  # root mean square (arXiv:1910.07467)
    rms_plus_one = "rms, 1 + weight"  # the same; checkpoints store the scale minus 1
    layer = "layer"  # mean and variance (arXiv:1607.06450)
    layer_without_bias = "layer without bias"


class Residual(StrEnum):
    """How attention and MLP are joined to the residual stream x."""

    sequential = "sequential"  # x + attention(norm(x)), then x + mlp(norm(x))
    post_norm = "post-norm"  # x + norm(attention(x)), then x + norm(mlp(x))
    sandwich = "sandwich"  # x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))
    parallel = "parallel"  # x + attention(norm_1(x)) + mlp(norm_2(x))
    parallel_one_norm = "parallel, one norm"  # x + attention(norm(x)) + mlp(norm(x))


class QKNorm(StrEnum):
    """An RMS norm of queries and keys before they are rotated (arXiv:2010.04245)."""

    none = "none"
    head = "head"  # each head by itself
    full = "full"  # all heads of a token together
    unit = "unit"  # each head by itself, without weights, in layers that rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The parts of a decoder block in which families differ; the defaults are Llama's."""

    norm: NormKind = NormKind.rms
    residual: Residual = Residual.sequential
    qkv_bias: bool = False
    out_bias: bool = False  # the attention's output projection has a bias
    qk_norm: QKNorm = QKNorm.none
    # the result of each head is multiplied by the sigmoid of gates, which are projected with the
    # queries (arXiv:2505.06708)
    has_output_gate: bool = False
    # each head's softmax has one more logit, which is learned (arXiv:2309.17453)
    has_sinks: bool = False
    is_gated: bool = True  # the MLP is a gated linear unit (arXiv:2002.05202)
    mlp_bias: bool = False


LLAMA_BLOCK = BlockSpec()
