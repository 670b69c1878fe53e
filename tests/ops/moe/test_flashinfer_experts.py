"""FlashInfer's fused experts without a GPU: a stand-in against our ops, signatures, refusals."""

from __future__ import annotations

import inspect
import tomllib
from enum import IntEnum
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ostinato
from ostinato.ops.activation import activate
from ostinato.ops.flashinfer_library import LEAST_VERSION, load_library
from ostinato.ops.moe.flashinfer_experts import (
    clamped_gate,
    flashinfer_experts,
    launch_experts,
    why_shape_unsupported,
    why_unsupported,
)
from ostinato.ops.moe.moe_linear import moe_linear
from tests.ops.flashinfer_stand_in import RECORDED, recorded_signature
from tests.ops.flashinfer_stand_in import STAND_IN as ATTENTION

CPU = torch.device("cpu")
NUM_EXPERTS, SIZE, INNER = 5, 40, 24
# The values are FlashInfer's. A test below compares them with the recorded ones.
Activations = IntEnum("Activations", {"Swiglu": 3, "Geglu": 4, "GegluTanh": 8})


def fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    output: Tensor | None = None,
    enable_pdl: bool | None = None,
    activation_type: int = Activations.Swiglu,
    use_fused_finalize: bool = True,
) -> Tensor:
    """`cutlass_fused_moe` of FlashInfer 0.6.18.post1, written after its sources, token by token.

    The first half of the rows of the first product is up ("linear"), the second half is gate.
    Constants of the gate turn Swiglu into the clamped one. Both products and the activation are
    rounded. A token's experts are added in float32 in their order if the sum is not fused.
    """
    x, ids, scales = input, token_selected_experts, token_final_scales
    w1, w2, b1, b2 = fc1_expert_weights, fc2_expert_weights, fc1_expert_biases, fc2_expert_biases
    dtype, inner = x.dtype, w2.shape[2]
    assert dtype in (torch.float16, torch.bfloat16)
    assert {w1.dtype, w2.dtype, output_dtype} == {dtype}
    assert (ids.dtype, scales.dtype) == (torch.int32, torch.float32)
    assert ids.shape == scales.shape
    assert len(ids) == len(x) > 0
    assert w1.shape == (len(w2), 2 * inner, x.shape[1])
    assert inner % 8 == w2.shape[1] % 8 == 0
    assert (b1 is None) == (b2 is None)
    # It reads the memory from the first element on, without strides.
    given = [x, ids, scales, w1, w2, b1, b2, swiglu_alpha, swiglu_beta, swiglu_limit, output]
    assert all(each is None or each.is_contiguous() for each in given)
    assert not quant_scales
    assert enable_pdl is False
    assert not use_fused_finalize, "the fused sum depends on the order of atomics"
    is_clamped = swiglu_alpha is not None or swiglu_beta is not None or swiglu_limit is not None
    assert not is_clamped or activation_type == Activations.Swiglu
    assert output is not None
    for token, row in enumerate(x.float()):
        total = torch.zeros(w2.shape[1])
        for expert, scale in zip(ids[token].tolist(), scales[token], strict=True):
            first = (w1[expert].float() @ row).to(dtype).float()
            if b1 is not None:
                first = first + b1[expert].float()
            linear, gate = first[:inner], first[inner:]
            if is_clamped:
                assert swiglu_alpha is not None
                assert swiglu_beta is not None
                assert swiglu_limit is not None
                limit = float(swiglu_limit[expert])
                gate = gate.clamp(max=limit)
                gate = gate * torch.sigmoid(gate * swiglu_alpha[expert])
                hidden = gate * (linear.clamp(-limit, limit) + swiglu_beta[expert])
            elif activation_type == Activations.Swiglu:
                hidden = F.silu(gate) * linear
            else:
                is_tanh = activation_type == Activations.GegluTanh
                hidden = F.gelu(gate, approximate="tanh" if is_tanh else "none") * linear
            second = (w2[expert].float() @ hidden.to(dtype).float()).to(dtype).float()
            if b2 is not None:
                second = second + b2[expert].float()
            total = total + scale * second
        output[token] = total.to(dtype)
    return output


STAND_IN = ATTENTION._replace(fused_moe=fused_moe, activations=Activations)


def problem(
    tokens: int, slots: int, dtype: torch.dtype, activation: str, *, has_bias: bool = False
) -> SimpleNamespace:
    """Weights in our order, gate before up, and the arguments of the op."""
    generator = torch.Generator().manual_seed(tokens + slots)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    order = torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(1)
    order[: tokens // 3] = order[:1]  # some experts get many rows, others none
    gate, up = (normal(NUM_EXPERTS, INNER, SIZE, scale=0.5) for _ in range(2))
    gate_bias, up_bias = (normal(NUM_EXPERTS, INNER) for _ in range(2))
    down_bias = normal(NUM_EXPERTS, SIZE) if has_bias else None
    p = SimpleNamespace(
        gate_up=torch.cat((gate, up), 1),
        gate_up_bias=torch.cat((gate_bias, up_bias), 1) if has_bias else None,
        down=normal(NUM_EXPERTS, SIZE, INNER, scale=INNER**-0.5),
        down_bias=down_bias,
        x=normal(tokens, SIZE),
        ids=order[:, :slots].to(torch.int32),  # rows lie apart, which is allowed
        weights=torch.rand(tokens, slots, generator=generator),
    )
    p.constants = clamped_gate(NUM_EXPERTS, CPU) if activation == "swigluoai" else None
    up_gate_bias = torch.cat((up_bias, gate_bias), 1) if has_bias else None
    up_gate = torch.cat((up, gate), 1)
    p.arguments = [p.x, p.ids, p.weights, up_gate, up_gate_bias, p.down, p.down_bias, p.constants]
    return p


def by_op(p: SimpleNamespace, activation: str) -> Tensor:
    *arguments, constants = p.arguments
    return flashinfer_experts(*arguments, activation=activation, gate_constants=constants)


def by_our_experts(p: SimpleNamespace, activation: str) -> Tensor:
    """The result of the ops that experts run without FlashInfer."""
    inner = activate(moe_linear(p.x, p.ids, p.gate_up, p.gate_up_bias), activation, gated=True)
    return moe_linear(inner, p.ids, p.down, p.down_bias, routing_weights=p.weights)


CASES = [
    (1, 1, "silu", False),
    (7, 2, "silu", True),
    (90, 3, "silu", False),
    (9, 2, "gelu", False),
    (9, 5, "gelu_tanh", True),
    (30, 2, "swigluoai", True),
    (8, 1, "swigluoai", False),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "slots", "kind", "has_bias"), CASES)
def test_the_call_computes_what_our_experts_compute(
    tokens: int, slots: int, kind: str, has_bias: bool, dtype: torch.dtype
) -> None:
    p = problem(tokens, slots, dtype, kind, has_bias=has_bias)
    result = launch_experts(STAND_IN, *p.arguments, kind)
    name = {"gelu_tanh": "gelu_pytorch_tanh"}.get(kind, kind)
    expected = by_our_experts(p, name)
    assert result.dtype == dtype
    assert result.is_contiguous()
    # FlashInfer also rounds the results of the second product.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, atol=16 * step, rtol=4 * step)
    assert torch.equal(by_op(p, name), expected)


def test_no_tokens() -> None:
    p = problem(0, 2, torch.bfloat16, "silu")
    assert launch_experts(STAND_IN, *p.arguments, "silu").shape == (0, SIZE)
    assert by_op(p, "silu").shape == (0, SIZE)


def test_a_token_whose_routing_is_not_a_number_spoils_no_other() -> None:
    p = problem(9, 2, torch.bfloat16, "silu")
    good = launch_experts(STAND_IN, *p.arguments, "silu")
    p.weights[4] = torch.nan
    for result in (launch_experts(STAND_IN, *p.arguments, "silu"), by_op(p, "silu")):
        assert result.isnan().any(1).nonzero().flatten().tolist() == [4]
    result = launch_experts(STAND_IN, *p.arguments, "silu")
    others = torch.arange(9) != 4
    assert torch.equal(result[others], good[others])


@pytest.mark.parametrize("kind", ["silu", "swigluoai"])
def test_the_registration_passes_opcheck(kind: str) -> None:
    p = problem(6, 2, torch.float32, kind, has_bias=True)
    torch.library.opcheck(torch.ops.ostinato.flashinfer_experts.default, (*p.arguments, kind))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (3, lambda one: one.transpose(1, 2).contiguous().transpose(1, 2), "must be contiguous"),
        (5, lambda one: one.transpose(1, 2).contiguous().transpose(1, 2), "must be contiguous"),
        (4, lambda one: None, "both biases must be given, or neither"),
        (7, lambda one: None, "got swigluoai without them"),
    ],
)
def test_what_flashinfer_would_read_wrongly_is_refused(
    place: int, value: Any, message: str
) -> None:
    p = problem(3, 2, torch.bfloat16, "swigluoai", has_bias=True)
    p.arguments[place] = value(p.arguments[place])
    with pytest.raises(ValueError, match=message):
        launch_experts(STAND_IN, *p.arguments, "swigluoai")
    with pytest.raises(ValueError, match=message):
        by_op(p, "swigluoai")


def install_flashinfer(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """Makes this version of FlashInfer look installed; None = no version is installed."""

    def version(name: str) -> str:
        assert name == "flashinfer-python"
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("ostinato.ops.flashinfer_library.version", version)


def test_why_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert why_unsupported(CPU, torch.bfloat16) == "needs a CUDA device, but the model is on cpu"
    assert why_unsupported(cuda, torch.float32) == (
        "needs float16 or bfloat16, but the model has torch.float32"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_unsupported(cuda, torch.float16) == "needs a CUDA device, none is visible"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_unsupported(cuda, torch.float16, is_here=False) is None
    assert why_unsupported(CPU, torch.float16, is_here=False) is not None
    install_flashinfer(monkeypatch, None)
    assert why_unsupported(cuda, torch.float16) == (
        "needs FlashInfer 0.6.18 or newer, which is not installed; pip install ostinato[flashinfer]"
    )
    install_flashinfer(monkeypatch, "0.6.18")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert why_unsupported(cuda, torch.float16) == (
        "needs compute capability 8.9, 9.0, 10.0, 10.3, 10.7, 11.0, 12.0, 12.1, but the device has 8.6"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_unsupported(cuda, torch.float16) is None


@pytest.mark.parametrize(
    ("found", "is_new_enough"),
    [
        ("0.2.14", False),
        ("0.6.9", False),
        ("0.6.17.post3", False),
        ("0.6", False),
        ("0.6.18.post1", True),
        ("0.6.18rc1+cu130", True),
        ("0.7.2.post1", True),
        ("1.0", True),
    ],
)
def test_an_old_flashinfer_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: str, is_new_enough: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    install_flashinfer(monkeypatch, found)
    reason = (
        f"needs FlashInfer 0.6.18 or newer, {found} is installed; pip install ostinato[flashinfer]"
    )
    assert why_unsupported(torch.device("cuda"), torch.float16) == (
        None if is_new_enough else reason
    )


def test_the_extra_installs_the_least_version() -> None:
    project = tomllib.loads((Path(ostinato.__file__).parents[1] / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["flashinfer"]
    assert extra == [f"flashinfer-python>={LEAST_VERSION}"]


def test_why_a_shape_is_unsupported() -> None:
    for name in ("silu", "swish", "gelu", "gelu_new", "swigluoai"):
        assert why_shape_unsupported(64, 24, name) is None
    assert why_shape_unsupported(60, 24, "silu") == (
        "needs multiples of 8, and the hidden size on this rank is 60"
    )
    assert why_shape_unsupported(64, 12, "silu") == (
        "needs multiples of 8, and the intermediate size on this rank is 12"
    )
    assert why_shape_unsupported(64, 24, "relu") == (
        "has the gated activations silu, gelu, gelu_tanh, swigluoai, but the model has relu"
    )


@pytest.mark.parametrize("version", ["installed", *RECORDED])
def test_every_call_binds_to_flashinfer(version: str) -> None:
    if version == "installed":
        try:
            library = load_library()
        except ImportError as error:
            pytest.skip(f"flashinfer is an optional dependency and cannot be imported: {error}")
        signature = inspect.signature(inspect.unwrap(library.fused_moe))
        values = {each.name: int(each) for each in library.activations}
    else:
        signature = recorded_signature(version, "cutlass_fused_moe")
        names = recorded_signature(version, "ActivationType").parameters
        values = {name: value for value, name in enumerate(names)}
    calls: list[str] = []

    def bound(*arguments: Any, **options: Any) -> Tensor:
        signature.bind(*arguments, **options)
        given = inspect.signature(fused_moe).bind(*arguments, **options).arguments
        known = list(signature.parameters)
        assert known[: len(arguments)] == list(given)[: len(arguments)]  # in the same places
        calls.append(options["activation_type"].name)
        return fused_moe(*arguments, **options)

    for kind in ("silu", "gelu", "gelu_tanh", "swigluoai"):
        p = problem(3, 2, torch.bfloat16, kind, has_bias=True)
        launch_experts(STAND_IN._replace(fused_moe=bound), *p.arguments, kind)
    assert calls == ["Swiglu", "Geglu", "GegluTanh", "Swiglu"]
    assert {one.name: values[one.name] for one in Activations} == {
        one.name: one.value for one in Activations
    }
