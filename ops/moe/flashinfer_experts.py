"""Experts by FlashInfer's fused kernels: the op `ostinato::flashinfer_experts`, on CUDA.

One call of FlashInfer's `cutlass_fused_moe` sorts the pairs of a token and an expert, multiplies by
gate and up, applies the activation, multiplies by down, and adds a token's experts. It takes the
result of `route`, so every way of routing works. FlashInfer is optional
(`ops/flashinfer_library.py`). On other devices than CUDA the op runs as plain torch.
Tests replace FlashInfer by a stand-in, and compare its results with those of plain torch. The call
of FlashInfer itself is not yet verified on hardware.

FlashInfer's own sum over experts in the second product is switched off: it adds with atomics, so
the bits of a result would change from run to run. Its tuner is not started
(docs/mixture-of-experts.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ostinato.ops.activation import ACTIVATIONS, CLAMPED_GATE, activate
from ostinato.ops.flashinfer_library import Library, load_library, why_unavailable
from ostinato.ops.moe.moe_linear import moe_linear
from ostinato.ops.register import register_op

__all__ = (
    "clamped_gate",
    "flashinfer_experts",
    "launch_experts",
    "why_shape_unsupported",
    "why_unsupported",
)

_CAPABILITIES = ("8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1")
_ALIGNMENT = 8  # elements of 16 bits: rows begin at multiples of 16 bytes
# Our name of an activation -> FlashInfer's name of the gated one.
_GATED = {"silu": "Swiglu", "gelu": "Geglu", "gelu_tanh": "GegluTanh", "swigluoai": "Swiglu"}


def why_unsupported(
    device: torch.device, dtype: torch.dtype, *, is_here: bool = True
) -> str | None:
    """The reason the kernels cannot run on this device with activations of this dtype, or None.

    For the arguments see `why_unavailable`.
    """
    reason = why_unavailable(device, dtype, is_here=is_here)
    if reason is not None or not is_here:
        return reason
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    if capability not in _CAPABILITIES:
        return (
            f"needs compute capability {', '.join(_CAPABILITIES)}, but the device has {capability}"
        )
    return None


def why_shape_unsupported(hidden_size: int, intermediate_size: int, activation: str) -> str | None:
    """The reason the kernels cannot compute the experts of this rank, or None.

    Args:
        hidden_size: D.
        intermediate_size: I, on this rank.
        activation: a name that `activate` takes.
    """
    for name, size in (("hidden", hidden_size), ("intermediate", intermediate_size)):
        if size % _ALIGNMENT:
            return f"needs multiples of {_ALIGNMENT}, and the {name} size on this rank is {size}"
    kind = ACTIVATIONS.get(activation, activation)
    if kind not in _GATED:
        return f"has the gated activations {', '.join(_GATED)}, but the model has {kind}"
    return None


def clamped_gate(num_experts: int, device: torch.device) -> Tensor:
    """The constants of `swigluoai` for each expert: slope, offset of up, limit. [3, E] float32."""
    constants = torch.tensor(CLAMPED_GATE, dtype=torch.float32, device=device)
    return constants[:, None].expand(-1, num_experts).contiguous()


def flashinfer_experts(
    x: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    up_gate: Tensor,
    up_gate_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str,
    gate_constants: Tensor | None = None,
) -> Tensor:
    """The weighted sum over each token's experts of `down(activation(gate(x)) * up(x))`.

    Args:
        x: [T, D] in float16 or bfloat16 on CUDA.
        ids: [T, k] int32, the experts of each token. CUDA does not check them.
        routing_weights: [T, k] float32.
        up_gate: [E, 2 I, D] in x's dtype, contiguous. The rows of up come first.
        up_gate_bias: [E, 2 I] in x's dtype, or None. Both biases are given, or neither.
        down: [E, D, I] in x's dtype, contiguous.
        down_bias: [E, D] in x's dtype, or None.
        activation: a name for which `why_shape_unsupported` gives no reason.
        gate_constants: of `clamped_gate`, which `swigluoai` needs; for others None.

    Returns:
        [T, D] in x's dtype. The results of both products are rounded to it, and the sum too.

    Raises:
        ValueError: a weight is not contiguous, or only one bias is given, or `activation` and
            `gate_constants` do not fit each other.
    """
    return _op(
        x,
        ids,
        routing_weights,
        up_gate,
        up_gate_bias,
        down,
        down_bias,
        gate_constants,
        ACTIVATIONS.get(activation, activation),
    )


def launch_experts(
    library: Library,
    x: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    up_gate: Tensor,
    up_gate_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    gate_constants: Tensor | None,
    activation: str,
) -> Tensor:
    """The op by `library`.

    Args:
        library: FlashInfer, or what a test puts in its place.
        x, ids, routing_weights, up_gate, up_gate_bias, down, down_bias, gate_constants: as for
            `flashinfer_experts`.
        activation: a value of `ACTIVATIONS`, such as `silu`, or `swigluoai`.

    Raises:
        ValueError: as for `flashinfer_experts`.
    """
    _check(up_gate, up_gate_bias, down, down_bias, gate_constants, activation)
    out = x.new_empty((x.shape[0], down.shape[1]))
    if not len(x):
        return out
    slope, offset, limit = (None, None, None) if gate_constants is None else gate_constants
    library.fused_moe(
        x.contiguous(),
        ids.contiguous(),
        routing_weights.contiguous(),
        up_gate,
        down,
        x.dtype,
        quant_scales=[],
        fc1_expert_biases=up_gate_bias,
        fc2_expert_biases=down_bias,
        swiglu_alpha=slope,
        swiglu_beta=offset,
        swiglu_limit=limit,
        output=out,
        # The kernels before and after in the stream do not take part in programmatic launches.
        enable_pdl=False,
        activation_type=library.activations[_GATED[activation]],
        use_fused_finalize=False,
    )
    return out


def _check(
    up_gate: Tensor,
    up_gate_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    gate_constants: Tensor | None,
    activation: str,
) -> None:
    # FlashInfer ignores the strides of weights. If it gets one bias, it reads the other without a
    # check.
    if not (up_gate.is_contiguous() and down.is_contiguous()):
        raise ValueError(
            f"flashinfer_experts: weights with strides {up_gate.stride()} and {down.stride()} must "
            "be contiguous"
        )
    if (up_gate_bias is None) != (down_bias is None):
        raise ValueError("flashinfer_experts: both biases must be given, or neither")
    if (activation == "swigluoai") != (gate_constants is not None):
        given = "without" if gate_constants is None else "with"
        raise ValueError(
            "flashinfer_experts: gate_constants are for swigluoai, which needs them; got "
            f"{activation} {given} them"
        )


def _on_cuda(*arguments: Any) -> Tensor:
    return launch_experts(load_library(), *arguments)


def _plain(
    x: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    up_gate: Tensor,
    up_gate_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    gate_constants: Tensor | None,
    activation: str,
) -> Tensor:
    _check(up_gate, up_gate_bias, down, down_bias, gate_constants, activation)
    up, gate = moe_linear(x, ids, up_gate, up_gate_bias).chunk(2, -1)
    name = next((name for name, kind in ACTIVATIONS.items() if kind == activation), activation)
    inner = activate(torch.cat((gate, up), -1), name, gated=True)
    return moe_linear(inner, ids, down, down_bias, routing_weights=routing_weights)


def _fake(
    x: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    up_gate: Tensor,
    up_gate_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    gate_constants: Tensor | None,
    activation: str,
) -> Tensor:
    return x.new_empty((x.shape[0], down.shape[1]))


_op = register_op(
    "flashinfer_experts",
    {"CompositeExplicitAutograd": _plain, "CUDA": _on_cuda},
    fake=_fake,
)
