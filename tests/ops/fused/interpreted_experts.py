"""The kernels of `fused_experts` against plain torch in float64, under Triton's interpreter.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from ostinato.ops.fused.fused_experts import EXPERT_COUNTERS, _plain
from ostinato.ops.fused.fused_linear import _plain_norm_linear
from ostinato.ops.fused.triton_fused_experts import experts_constants, launch_experts
from ostinato.ops.fused.triton_fused_linear import launch_norm_linear
from tests.ops.widened_bfloat16 import widen_products_of_bfloat16

SOFTMAX = ("softmax", True, 1.0)


def problem(
    tokens: int,
    experts: int,
    top_k: int,
    size: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    routing: tuple[str, bool, float] = SOFTMAX,
    *,
    has_bias: bool = False,
    activation: str = "silu",
) -> list[Any]:
    """The arguments of the op. The attention's output has 40 elements a token."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    bias = torch.randn(experts, generator=generator) if has_bias else None
    return [
        normal(tokens, 48)[:, :40],  # rows lie apart
        normal(size, 40, scale=40**-0.5),
        normal(size) if has_bias else None,
        normal(tokens, size),
        1.0 + normal(size, scale=0.1),
        1e-6,
        normal(experts, size, scale=size**-0.5),
        bias,
        normal(experts, 2 * inner, size, scale=size**-0.5),
        normal(experts, size, inner, scale=inner**-0.5),
        top_k,
        *routing,
        dtype != torch.float32,
        activation,
    ]


def zeros(count: int = EXPERT_COUNTERS) -> Tensor:
    """The counters of a call."""
    return torch.zeros(count, dtype=torch.int32)


def in_float64(arguments: list[Any]) -> Tensor:
    """The result of `_plain` in float64, the router's choice included."""
    x, weight, bias, residual = arguments[:4]
    hidden = x.double() @ weight.double().T + residual.double()
    if bias is not None:
        hidden = hidden + bias.double()
    norm_weight, eps, router, score_bias, gate_up, down, top_k = arguments[4:11]
    scoring, renormalize, scale, _, activation = arguments[11:16]
    normal = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
    normal = normal * norm_weight.double()
    logits = normal @ router.double().T
    scores = {
        "softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
        "top_softmax": logits,
    }[scoring]
    choice = logits if score_bias is None else scores + score_bias
    ids = choice.topk(top_k).indices
    weights = scores.gather(1, ids)
    if scoring == "top_softmax":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("tk,tsnk->tsn", normal, gate_up.double()[ids]).chunk(2, -1)
    functions = {"silu": torch.nn.functional.silu, "relu": torch.nn.functional.relu}
    slots = torch.einsum("tsk,tsnk->tsn", functions[activation](gate) * up, down.double()[ids])
    return hidden + scale * (weights[:, :, None] * slots).sum(1)


# (tokens, experts, slots, size, inner, more): one token, tiles that are not filled, several row
# tiles, more pairs than a tile.
CASES: list[tuple[int, int, int, int, int, dict[str, Any]]] = [
    (1, 6, 2, 48, 32, {}),
    (3, 20, 8, 64, 16, {"routing": ("softmax", False, 2.5)}),
    (17, 5, 3, 40, 24, {"routing": ("sigmoid", True, 1.0), "has_bias": True}),
    (40, 3, 2, 72, 20, {"routing": ("top_softmax", False, 1.0), "activation": "relu"}),
    (5, 1, 1, 16, 16, {}),
    (16, 9, 2, 600, 16, {"has_bias": True}),  # three groups of column tiles of the projection
    (70, 4, 2, 48, 16, {"has_bias": True}),  # cuBLAS multiplies, the router's kernel adds
]


_MARKED = [
    pytest.param(*each, marks=pytest.mark.slow) if each[0] == 40 or each[3] == 600 else each
    for each in CASES
]


@pytest.mark.parametrize(("tokens", "experts", "top_k", "size", "inner", "more"), _MARKED, ids=str)
def test_experts(
    tokens: int, experts: int, top_k: int, size: int, inner: int, more: dict[str, Any]
) -> None:
    arguments = problem(tokens, experts, top_k, size, inner, **more)
    result = launch_experts(*[*arguments, zeros()])
    expected = in_float64(arguments)
    assert result.shape == (tokens, size)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(
        _plain(*[*arguments, zeros()]).double(), expected, atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_in_bfloat16(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts are chosen, so no rounding changes the choice. Products are widened, because the
    interpreter multiplies the raw bits of bfloat16.
    """
    widen_products_of_bfloat16(monkeypatch)
    arguments = problem(tokens, 2, 2, 48, 32, torch.bfloat16)
    result = launch_experts(*[*arguments, zeros()])
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), in_float64(arguments), atol=4e-2, rtol=2e-2)


def test_no_tokens() -> None:
    arguments = problem(0, 6, 2, 48, 32)
    assert launch_experts(*[*arguments, zeros()]).shape == (0, 48)


@pytest.mark.parametrize("tokens", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_token_that_is_not_a_number_spoils_no_other(tokens: int) -> None:
    arguments = problem(tokens, 6, 2, 48, 32)
    expected = launch_experts(*[*arguments, zeros()])
    arguments[3][4] = torch.nan
    result = launch_experts(*[*arguments, zeros()])
    assert result.isnan().any(1).nonzero().flatten().tolist() == [4]
    others = torch.arange(tokens) != 4
    torch.testing.assert_close(result[others], expected[others], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(20, 48), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 264), (2, 600)))],
)
def test_the_last_program_may_be_any(
    tokens: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that run in the opposite order give the same result."""
    arguments = problem(tokens, 6, 2, size, 32)
    expected = launch_experts(*[*arguments, zeros()])
    builder = interpreter.interpreter_builder
    forward = type(builder).set_grid_idx

    def backward(self: Any, *place: int) -> None:
        size = (*self.grid_dim, 1, 1)
        forward(self, *(size[axis] - 1 - index for axis, index in enumerate(place)))

    monkeypatch.setattr(type(builder), "set_grid_idx", backward)
    torch.testing.assert_close(
        launch_experts(*[*arguments, zeros()]), expected, atol=1e-6, rtol=1e-6
    )


def test_the_tile_grows_with_the_rows_of_an_expert() -> None:
    rows = [
        experts_constants(pairs, 8, 4096, 2, is_gated=False)["BLOCK_M"] for pairs in (2, 128, 129)
    ]
    assert rows == [16, 16, 64]


def test_wrong_tensors_are_named() -> None:
    for index, name in ((6, "the router"), (8, "gate and up"), (9, "down")):
        arguments = problem(2, 4, 2, 16, 16)
        arguments[index] = arguments[index].double()
        with pytest.raises(ValueError, match=f"fused_experts: {name} of torch.float64"):
            launch_experts(*[*arguments, zeros()])


def test_counters_that_are_too_few_are_refused() -> None:
    arguments = problem(20, 6, 2, 48, 32)
    with pytest.raises(ValueError, match="6 experts and 20 rows of 48 need 8 counters, not 7"):
        launch_experts(*[*arguments, zeros(7)])


@pytest.mark.parametrize("rows", [3, 70])
def test_a_norm_and_a_product(rows: int) -> None:
    """Few rows and more rows; the first launch clears counters."""
    generator = torch.Generator().manual_seed(rows)
    x = 30 * torch.randn(rows, 56, generator=generator)[:, :48]
    weight, bias = torch.randn(20, 48, generator=generator), torch.randn(20, generator=generator)
    norm_weight = 1.0 + 0.1 * torch.randn(48, generator=generator)
    for added in (None, bias):
        given = (x, norm_weight, 1e-5, weight, added, 64)
        found, counters = launch_norm_linear(*given)
        assert torch.equal(counters, zeros(64))
        expected = _plain_norm_linear(*given)[0]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
