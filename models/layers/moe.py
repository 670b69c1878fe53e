"""The mixture of experts that takes the place of a block's MLP (arXiv:1701.06538, 2101.03961)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ostinato.conf.schema import ExpertKernels
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import BuildOptions, RouterLinear
from ostinato.models.layers.mlp import GatedMLP, PlainMLP, build_mlp
from ostinato.models.weight_methods.plain import Plain
from ostinato.ops.activation import activate
from ostinato.ops.moe.flashinfer_experts import (
    clamped_gate,
    flashinfer_experts,
    why_shape_unsupported,
)
from ostinato.ops.moe.routing import RouteSpec, Scoring, route

__all__ = ("Experts", "MoE", "PlainExperts")


class Experts(nn.Module):
    """Gated MLPs, each of two matrices: gate and up stacked, and down.

    FlashInfer's kernels (`BuildOptions.experts`) read the rows of up before those of gate. For
    these kernels the matrix is loaded in that order, so no second copy is needed.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: BuildOptions,
        num_experts: int,
        intermediate_size: int,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        inner = options.shard.span(intermediate_size, "intermediate size of an expert")
        self.activation = config.activation
        self.by_flashinfer = options.experts is ExpertKernels.flashinfer
        self.gate_up_proj = ExpertLinear(
            num_experts,
            size,
            (inner, inner),
            options,
            bias=bias,
            is_reversed=self.by_flashinfer,
        )
        self.gate_constants: Tensor | None
        is_clamped = self.by_flashinfer and self.activation == "swigluoai"
        constants = clamped_gate(num_experts, options.device) if is_clamped else None
        self.register_buffer("gate_constants", constants, persistent=False)
        self.down_proj = ExpertLinear(num_experts, inner, (size,), options, bias=bias)

    def forward(
        self, x: Tensor, ids: Tensor, routing_weights: Tensor, residual: Tensor | None
    ) -> Tensor:
        """[T, D] -> [T, D]: the weighted sum over each token's experts, added to the residual."""
        if self.by_flashinfer:
            return self._by_flashinfer(x, ids, routing_weights, residual)
        inner = activate(self.gate_up_proj(x, ids), self.activation, gated=True)
        return _weighted_sum(self.down_proj, inner, ids, routing_weights, residual)

    @property
    def why_unsupported(self) -> str | None:
        """Why the chosen kernels cannot compute these experts exactly, or None.

        It can be read after `LinearBase.use` has set the weight methods of the matrices.
        """
        if not self.by_flashinfer:
            return None
        for linear in (self.gate_up_proj, self.down_proj):
            if not isinstance(linear.method, Plain):
                return f"needs unquantized weights, but the model's are {linear.method.name}"
        down = self.down_proj
        return why_shape_unsupported(down.out_features, down.in_features, self.activation)

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return (
            self.activation,
            self.by_flashinfer,
            self.gate_up_proj.static_key,
            self.down_proj.static_key,
        )

    def _by_flashinfer(
        self, x: Tensor, ids: Tensor, routing_weights: Tensor, residual: Tensor | None
    ) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        result = flashinfer_experts(
            x,
            ids,
            routing_weights,
            gate_up.weights["weight"],
            gate_up.bias,
            down.weights["weight"],
            down.bias,
            activation=self.activation,
            gate_constants=self.gate_constants,
        )
        if down.is_partial:
            return down.reduce(result, residual)
        return result if residual is None else result + residual


class PlainExperts(nn.Module):
    """MLPs without gates: up and down.

    Raises:
        ValueError: FlashInfer's kernels were chosen. All of their activations are gated.
    """

    def __init__(
        self, config: ModelConfig, options: BuildOptions, num_experts: int, intermediate_size: int
    ) -> None:
        super().__init__()
        if options.experts is not ExpertKernels.auto:
            raise ValueError(
                f"graphs.experts={options.experts} has kernels for gated experts only, and this "
                "model's experts have no gates; leave graphs.experts at auto"
            )
        size = config.hidden_size
        inner = options.shard.span(intermediate_size, "intermediate size of an expert")
        self.activation = config.activation
        self.up_proj = ExpertLinear(num_experts, size, (inner,), options)
        self.down_proj = ExpertLinear(num_experts, inner, (size,), options)

    def forward(
        self, x: Tensor, ids: Tensor, routing_weights: Tensor, residual: Tensor | None
    ) -> Tensor:
        """As `Experts.forward`."""
        return _weighted_sum(
            self.down_proj,
            activate(self.up_proj(x, ids), self.activation),
            ids,
            routing_weights,
            residual,
        )

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return ("plain", self.activation, self.up_proj.static_key, self.down_proj.static_key)


def _weighted_sum(
    down: ExpertLinear,
    inner: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    residual: Tensor | None,
) -> Tensor:
    """The products of down for each token and expert, summed with weights, and the residual."""
    if not down.is_partial:
        return down(inner, ids, routing_weights, residual)
    return down.reduce(down(inner, ids, routing_weights), residual)


class MoE(nn.Module):
    """A router, its experts and, in some models, an MLP for all tokens (a shared expert).

    Raises:
        ValueError: the chosen kernels of experts cannot scale the inputs of experts.
    """

    def __init__(self, config: ModelConfig, options: BuildOptions, spec: MoESpec) -> None:
        super().__init__()
        if spec.scales_input and spec.route.top_k > 1 and options.experts is not ExpertKernels.auto:
            raise ValueError(
                f"graphs.experts={options.experts} takes one input for all experts of a token, but "
                f"this model scales the input for each of {spec.route.top_k} experts; leave "
                "graphs.experts at auto"
            )
        size, num_experts = config.hidden_size, spec.route.num_experts
        self.spec = spec
        self.gate = RouterLinear(size, num_experts, options, bias=spec.has_bias)
        self.score_bias = None
        if spec.has_score_bias:
            values = torch.empty(num_experts, dtype=torch.float32, device=options.device)
            self.score_bias = nn.Parameter(values, requires_grad=False)
        inner = spec.intermediate_size
        self.experts = (
            Experts(config, options, num_experts, inner, bias=spec.has_bias)
            if config.block.is_gated
            else PlainExperts(config, options, num_experts, inner)
        )
        self.shared_expert: GatedMLP | PlainMLP | None = None
        self.gated_expert: Experts | None = None
        self.shared_gate: RouterLinear | None = None
        if spec.shared_gate:
            self.gated_expert = Experts(config, options, 1, spec.shared_size, bias=False)
            self.shared_gate = RouterLinear(size, 1, options)
        elif spec.shared_size:
            self.shared_expert = build_mlp(config, options, spec.shared_size)

    def forward(self, x: Tensor, residual: Tensor | None, slots: Tensor | None = None) -> Tensor:
        """[T, D] -> [T, D], added to the residual if there is one.

        `slots` is as for `GatedMLP`. Only the shared expert can have adapters.
        """
        if self.shared_expert is not None:
            residual = self.shared_expert(x, residual, slots)
        if self.gated_expert is not None and self.shared_gate is not None:
            ids, weights = route(self.shared_gate(x), _ONE_EXPERT)
            residual = self.gated_expert(x, ids, weights, residual)
        logits = self.gate.multiply(x, float32_output=self.spec.float32_router)
        ids, weights = route(logits, self.spec.route, self.score_bias)
        if self.spec.scales_input:
            top_k = self.spec.route.top_k
            rows = x if top_k == 1 else x.repeat_interleave(top_k, 0)
            x, weights = rows * weights.to(x.dtype).view(-1, 1), torch.ones_like(weights)
        return self.experts(x, ids, weights, residual)

    def static_key(self) -> tuple[object, ...]:
        """Everything that the traced program depends on besides tensors."""
        return (
            "mixture of experts",
            self.spec.route,
            self.spec.float32_router,
            self.spec.scales_input,
            self.score_bias is not None,
            self.gate.static_key,
            *self.experts.static_key(),
            *(() if self.shared_expert is None else self.shared_expert.static_key()),
            *(() if self.gated_expert is None else self.gated_expert.static_key()),
            *(() if self.shared_gate is None else (self.shared_gate.static_key,)),
        )


# Routes every token to the shared expert, weighted by the sigmoid of the token's logit.
_ONE_EXPERT = RouteSpec(1, 1, Scoring.sigmoid, renormalize=False)
