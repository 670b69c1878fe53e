"""Recurrent mixers: what some layers have in place of attention.

They have the interface of `Attention`. In place of keys and values, their caches hold the last
inputs of a convolution and a state, for each slot (ops/recurrent/states.py).

Shapes: T tokens of a step, D hidden size, C channels, W width of the convolution.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.recurrent_spec import DeltaSpec, ShortConvSpec, StateSpaceSpec
from ostinato.models.layers.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.sharding import Span
from ostinato.models.step_tensors import StepInputs
from ostinato.models.weight_methods.weight_method import MatrixRole
from ostinato.ops.recurrent.delta_rule import gated_delta_rule
from ostinato.ops.recurrent.short_conv import gated_short_conv
from ostinato.ops.recurrent.state_space import state_space

__all__ = ("RecurrentMixer", "build_mixer")


class RecurrentMixer(nn.Module):
    """A recurrent mixer between its projections.

    Args:
        config: the model's configuration.
        options: dtype, device and shard.
        spec: its sizes.

    Attributes:
        held: for each parameter that is divided among ranks, the rows that this rank holds. Some
            stack the rows of several parts.
    """

    in_proj: MergedLinear
    out_proj: Linear
    held: dict[str, Span | tuple[Span, ...]]

    def forward(
        self,
        x: Tensor,
        step: StepInputs,
        conv_state: Tensor,
        state: Tensor,
        residual: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        """[T, D] -> [T, D], plus the residual if there is one; with `rows` only these rows, [R, D].

        Advances the states of the step's sequences.
        """
        out = self.mix(x, step, conv_state, state)
        if rows is not None:
            out = F.embedding(rows, out)
            residual = None if residual is None else F.embedding(rows, residual)
        return self.out_proj(out, residual)

    def mix(self, x: Tensor, step: StepInputs, conv_state: Tensor, state: Tensor) -> Tensor:
        """[T, D] -> the input [T, E] of the output projection."""
        raise NotImplementedError

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        raise NotImplementedError


def build_mixer(config: ModelConfig, options: BuildOptions) -> RecurrentMixer:
    """The recurrent mixer of a model."""
    match config.recurrent:
        case DeltaSpec() as spec:
            return GatedDeltaNet(config, options, spec)
        case ShortConvSpec() as spec:
            return ShortConv(config, options, spec)
        case StateSpaceSpec() as spec:
            return StateSpace(config, options, spec)
        case None:
            raise ValueError("the model has no recurrent layers")


def _slots(step: StepInputs) -> Tensor:
    slots = step.tensors.state_slots
    assert slots is not None, "the steps of a model with recurrent layers have these"
    return slots


class _Gates(MergedLinear):
    """Maps a hidden state to the gates of a state: few weights with much effect."""

    role = MatrixRole.router
    takes_adapters = False


class GatedDeltaNet(RecurrentMixer):
    """A gated delta net (arXiv:2412.06464), as in Qwen3-Next."""

    def __init__(self, config: ModelConfig, options: BuildOptions, spec: DeltaSpec) -> None:
        super().__init__()
        k_heads = options.shard.span(spec.num_k_heads, "linear_num_key_heads")
        v_heads = options.shard.span(spec.num_v_heads, "linear_num_value_heads")
        keys, values = k_heads.times(spec.k_dim), v_heads.times(spec.v_dim)
        self.num_k_heads, self.norm_eps = k_heads.size, config.norm_eps
        self.in_proj = MergedLinear(config.hidden_size, (keys, keys, values, values), options)
        self.gates = _Gates(config.hidden_size, (v_heads, v_heads), options)
        self.out_proj = Linear(values, config.hidden_size, options)
        self.conv = options.empty(2 * keys.size + values.size, 1, spec.conv_width)
        single = replace(options, dtype=torch.float32)
        self.a_log, self.dt_bias = single.empty(v_heads.size), single.empty(v_heads.size)
        self.norm = options.empty(spec.v_dim)
        self.held = {"conv": (keys, keys, values), "a_log": v_heads, "dt_bias": v_heads}

    def mix(self, x: Tensor, step: StepInputs, conv_state: Tensor, state: Tensor) -> Tensor:
        return gated_delta_rule(
            self.in_proj(x),
            self.gates(x),
            self.conv.view(-1, self.conv.shape[2]),
            self.a_log,
            self.dt_bias,
            self.norm,
            conv_state,
            state,
            step.tensors.query_start_loc,
            _slots(step),
            self.num_k_heads,
            self.norm_eps,
        )

    def static_key(self) -> tuple[object, ...]:
        return (
            "gated delta net",
            self.num_k_heads,
            self.norm_eps,
            tuple(self.conv.shape),
            self.norm.shape[0],
            self.in_proj.static_key,
            self.gates.static_key,
            self.out_proj.static_key,
        )


class ShortConv(RecurrentMixer):
    """A gated short convolution, as in LFM2 (arXiv:2511.23404)."""

    def __init__(self, config: ModelConfig, options: BuildOptions, spec: ShortConvSpec) -> None:
        super().__init__()
        channels = options.shard.span(spec.channels, "hidden_size")
        size, bias = config.hidden_size, spec.has_bias
        self.in_proj = MergedLinear(size, (channels,) * 3, options, bias=bias)
        self.out_proj = Linear(channels, size, options, bias=bias)
        self.conv = options.empty(channels.size, 1, spec.conv_width)
        self.conv_bias = options.empty(channels.size) if bias else None
        self.held = {"conv": channels, "conv_bias": channels}

    def mix(self, x: Tensor, step: StepInputs, conv_state: Tensor, state: Tensor) -> Tensor:
        return gated_short_conv(
            self.in_proj(x),
            self.conv.view(-1, self.conv.shape[2]),
            self.conv_bias,
            conv_state,
            step.tensors.query_start_loc,
            _slots(step),
        )

    def static_key(self) -> tuple[object, ...]:
        return (
            "short convolution",
            tuple(self.conv.shape),
            self.conv_bias is not None,
            self.in_proj.static_key,
            self.out_proj.static_key,
        )


class StateSpace(RecurrentMixer):
    """A Mamba-2 mixer (arXiv:2405.21060)."""

    def __init__(self, config: ModelConfig, options: BuildOptions, spec: StateSpaceSpec) -> None:
        super().__init__()
        heads = options.shard.span(spec.num_heads, "mamba_n_heads")
        groups = options.shard.span(spec.num_groups, "mamba_n_groups")
        inner, states = heads.times(spec.head_dim), groups.times(spec.state_size)
        size, bias = config.hidden_size, spec.has_bias
        self.num_groups, self.norm_eps = groups.size, spec.norm_eps
        self.step_limits = spec.step_limits
        parts = (inner, inner, states, states, heads)
        self.in_proj = MergedLinear(size, parts, options, bias=bias)
        self.out_proj = Linear(inner, size, options, bias=bias)
        channels = inner.size + 2 * states.size
        self.conv = options.empty(channels, 1, spec.conv_width)
        self.conv_bias = options.empty(channels) if spec.has_conv_bias else None
        single = replace(options, dtype=torch.float32)
        self.a_log, self.dt_bias, self.skip = (single.empty(heads.size) for _ in range(3))
        self.norm = options.empty(inner.size)
        parts = (inner, states, states)
        self.held = {"a_log": heads, "dt_bias": heads, "skip": heads, "norm": inner}
        self.held |= {"conv": parts, "conv_bias": parts}

    def mix(self, x: Tensor, step: StepInputs, conv_state: Tensor, state: Tensor) -> Tensor:
        return state_space(
            self.in_proj(x),
            self.conv.view(-1, self.conv.shape[2]),
            self.conv_bias,
            self.a_log,
            self.dt_bias,
            self.skip,
            self.norm,
            conv_state,
            state,
            step.tensors.query_start_loc,
            _slots(step),
            self.num_groups,
            self.norm_eps,
            *self.step_limits,
        )

    def static_key(self) -> tuple[object, ...]:
        return (
            "state space",
            self.num_groups,
            self.norm_eps,
            self.step_limits,
            tuple(self.conv.shape),
            self.conv_bias is not None,
            self.in_proj.static_key,
            self.out_proj.static_key,
        )
