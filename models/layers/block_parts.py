"""The parts of decoder blocks, and `PartBlock`, a block that has one part alone.

Shapes: T tokens of a step, R of them in the result, D hidden size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ostinato.models.base import DecoderLayer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mixers.latent_attention import LatentAttention
from ostinato.models.layers.mixers.recurrent_mixers import RecurrentMixer, build_mixer
from ostinato.models.layers.mlp import GatedMLP, PlainMLP, build_mlp
from ostinato.models.layers.moe import MoE
from ostinato.models.layers.norm_layers import build_norm
from ostinato.models.step_tensors import StepInputs

__all__ = ("PartBlock", "build_attention", "build_feed_forward", "rows_of")


def build_attention(
    config: ModelConfig, options: BuildOptions, layer: int
) -> Attention | LatentAttention:
    """The attention of a layer."""
    attention = Attention if config.latent is None else LatentAttention
    return attention(
        config,
        options,
        sliding_window=config.sliding_windows[layer],
        rope_kind=config.rope_kind(layer),
    )


def build_feed_forward(
    config: ModelConfig, options: BuildOptions, layer: int
) -> GatedMLP | PlainMLP | MoE:
    """The MLP of a layer, or its experts."""
    if config.moe is not None and config.moe.layers[layer]:
        return MoE(config, options, config.moe)
    return build_mlp(config, options)


def rows_of(matrix: Tensor, rows: Tensor | None) -> Tensor:
    """The `rows` of [T, D]: [R, D]. Without `rows`, all of it."""
    return matrix if rows is None else F.embedding(rows, matrix)


class PartBlock(DecoderLayer):
    """x + part(norm(x)). The part is attention, a recurrent mixer, an MLP or experts.

    The caches of an MLP or of experts have no elements.

    Args:
        config: the model's configuration, with `mlp_layers`.
        options: dtype, device, attention backend and shard.
        layer: the block's number.
    """

    def __init__(self, config: ModelConfig, options: BuildOptions, layer: int) -> None:
        super().__init__()
        self.norm = build_norm(config, options)
        self.part: Attention | LatentAttention | RecurrentMixer | GatedMLP | PlainMLP | MoE
        if config.mlp_layers[layer]:
            self.part = build_feed_forward(config, options, layer)
        elif config.recurrent is not None and config.recurrent.layers[layer]:
            self.part = build_mixer(config, options)
        else:
            self.part = build_attention(config, options, layer)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        part = self.part
        if isinstance(part, Attention | LatentAttention | RecurrentMixer):
            return part(self.norm(hidden), step, k_cache, v_cache, hidden, rows)
        hidden, slots = rows_of(hidden, rows), step.tensors.adapter_slots
        return part(self.norm(hidden), hidden, None if slots is None else rows_of(slots, rows))

    def static_key(self) -> tuple[object, ...]:
        return ("block of one part", self.norm.static_key, *self.part.static_key())
