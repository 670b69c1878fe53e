"""The feed-forward part of a block without experts. Shapes: T tokens of a step, D hidden size."""

from __future__ import annotations

from torch import Tensor, nn

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.ops.activation import activate

__all__ = (
    "GatedMLP",
    "PlainMLP",
    "build_mlp",
)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): the gated linear unit of arXiv:2002.05202.

    Args:
        config: the model's configuration.
        options: dtype, device and shard.
        intermediate_size: features between the matrices; None = that of the model's MLPs.
    """

    def __init__(
        self, config: ModelConfig, options: BuildOptions, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        hidden_size, bias = config.hidden_size, config.block.mlp_bias
        size = intermediate_size or config.intermediate_size
        inner = options.shard.span(size, "intermediate_size")
        self.activation = config.activation
        self.gate_up_proj = MergedLinear(hidden_size, (inner, inner), options, bias=bias)
        self.down_proj = Linear(inner, hidden_size, options, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None, slots: Tensor | None = None) -> Tensor:
        """[T, D] -> [T, D], added to the residual if there is one.

        `slots` [T, 1] int32 has the slot of each token's adapter; -1 = none.
        """
        inner = self.gate_up_proj(x, slots, self.activation)
        return self.down_proj(inner, residual, slots)

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return (
            "gated mlp",
            self.activation,
            self.gate_up_proj.static_key,
            self.down_proj.static_key,
        )


class PlainMLP(nn.Module):
    """down(activation(up(x))).

    Args:
        config, options, intermediate_size: as for `GatedMLP`.
    """

    def __init__(
        self, config: ModelConfig, options: BuildOptions, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        hidden_size, bias = config.hidden_size, config.block.mlp_bias
        size = intermediate_size or config.intermediate_size
        inner = options.shard.span(size, "intermediate_size")
        self.activation = config.activation
        self.up_proj = Linear(hidden_size, inner, options, bias=bias)
        self.down_proj = Linear(inner, hidden_size, options, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None, slots: Tensor | None = None) -> Tensor:
        """As `GatedMLP.forward`."""
        inner = activate(self.up_proj(x, slots=slots), self.activation)
        return self.down_proj(inner, residual, slots)

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return ("mlp", self.activation, self.up_proj.static_key, self.down_proj.static_key)


def build_mlp(
    config: ModelConfig, options: BuildOptions, intermediate_size: int | None = None
) -> GatedMLP | PlainMLP:
    """The kind of MLP that the model's blocks use; `intermediate_size` is as for `GatedMLP`."""
    mlp = GatedMLP if config.block.is_gated else PlainMLP
    return mlp(config, options, intermediate_size)
