"""FlashInfer's fused experts on a device: against float64 and our kernels, captured, repeated.

FlashInfer builds more than 200 CUDA files unless its package of prebuilt kernels is installed. So
these tests are slow.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.ops.activation import activate
from ostinato.ops.moe.flashinfer_experts import clamped_gate, flashinfer_experts, why_unsupported
from ostinato.ops.moe.moe_linear import moe_linear
from ostinato.ops.moe.routing import RouteSpec, route

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(7200)]

CUDA = torch.device("cuda")
NUM_EXPERTS, TOP_K, SIZE, INNER = 32, 4, 512, 384


@pytest.fixture(autouse=True)
def _needs_flashinfer() -> None:
    reason = why_unsupported(CUDA, torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)


class Problem:
    """Experts in our order of rows, gate before up, and tokens with their routing."""

    def __init__(self, tokens: int, dtype: torch.dtype, *, has_bias: bool = False) -> None:
        self.generator = torch.Generator(CUDA).manual_seed(tokens)
        self.x = self.normal(tokens, SIZE).to(dtype)
        self.ids, self.weights = route(
            self.normal(tokens, NUM_EXPERTS), RouteSpec(NUM_EXPERTS, TOP_K)
        )
        self.gate_up = (self.normal(NUM_EXPERTS, 2 * INNER, SIZE) * SIZE**-0.5).to(dtype)
        self.down = (self.normal(NUM_EXPERTS, SIZE, INNER) * INNER**-0.5).to(dtype)
        self.gate_up_bias = self.normal(NUM_EXPERTS, 2 * INNER).to(dtype) if has_bias else None
        self.down_bias = self.normal(NUM_EXPERTS, SIZE).to(dtype) if has_bias else None
        self.up_gate = swapped(self.gate_up)
        self.up_gate_bias = None if self.gate_up_bias is None else swapped(self.gate_up_bias)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=CUDA)

    def by_flashinfer(self, activation: str) -> Tensor:
        is_clamped = activation == "swigluoai"
        return flashinfer_experts(
            self.x,
            self.ids,
            self.weights,
            self.up_gate,
            self.up_gate_bias,
            self.down,
            self.down_bias,
            activation=activation,
            gate_constants=clamped_gate(NUM_EXPERTS, CUDA) if is_clamped else None,
        )

    def by_our_kernels(self, activation: str) -> Tensor:
        inner = moe_linear(self.x, self.ids, self.gate_up, self.gate_up_bias)
        inner = activate(inner, activation, gated=True)
        return moe_linear(inner, self.ids, self.down, self.down_bias, routing_weights=self.weights)

    def exact(self, activation: str) -> Tensor:
        """[T, SIZE], computed in float64 without rounding to a smaller dtype."""
        out = torch.zeros(len(self.x), SIZE, dtype=torch.float64, device=CUDA)
        for expert in range(NUM_EXPERTS):
            token, slot = (self.ids == expert).nonzero(as_tuple=True)
            inner = self.x[token].double() @ self.gate_up[expert].double().T
            if self.gate_up_bias is not None:
                inner += self.gate_up_bias[expert].double()
            result = activate(inner, activation, gated=True) @ self.down[expert].double().T
            if self.down_bias is not None:
                result += self.down_bias[expert].double()
            out.index_add_(0, token, self.weights[token, slot].double()[:, None] * result)
        return out


def swapped(stacked: Tensor) -> Tensor:
    return torch.cat(stacked.chunk(2, 1)[::-1], 1)


@pytest.mark.parametrize(
    ("dtype", "activation", "has_bias"),
    [
        (torch.bfloat16, "silu", False),
        (torch.float16, "silu", False),
        (torch.bfloat16, "swigluoai", True),
        (torch.bfloat16, "gelu", True),
        (torch.bfloat16, "gelu_pytorch_tanh", False),
    ],
)
@pytest.mark.parametrize("tokens", [1, 8, 300, 3000])
def test_results(tokens: int, dtype: torch.dtype, activation: str, has_bias: bool) -> None:
    p = Problem(tokens, dtype, has_bias=has_bias)
    result, exact = p.by_flashinfer(activation), p.exact(activation)
    assert result.dtype == dtype
    bound = 0.02 if dtype == torch.bfloat16 else 0.004
    assert float((result.double() - exact).norm() / exact.norm()) < bound
    ours = p.by_our_kernels(activation)
    assert float((result - ours).double().norm() / exact.norm()) < bound


def test_the_bits_are_the_same_in_every_run() -> None:
    p = Problem(300, torch.bfloat16)
    first = p.by_flashinfer("silu")
    for _ in range(20):
        assert torch.equal(p.by_flashinfer("silu"), first)


def test_a_captured_call_follows_the_router() -> None:
    """No size depends on the routing, so a replay serves other experts."""
    p = Problem(16, torch.bfloat16)
    p.by_flashinfer("silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = p.by_flashinfer("silu")
    for _ in range(2):
        ids, weights = route(p.normal(16, NUM_EXPERTS), RouteSpec(NUM_EXPERTS, TOP_K))
        p.ids.copy_(ids)
        p.weights.copy_(weights)
        graph.replay()
        assert torch.equal(result, p.by_flashinfer("silu"))


def test_the_host_does_not_wait() -> None:
    p = Problem(64, torch.bfloat16)
    p.by_flashinfer("silu")
    torch.cuda.set_sync_debug_mode("error")
    try:
        p.by_flashinfer("silu")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_token_that_is_not_a_number_spoils_no_other() -> None:
    p = Problem(40, torch.bfloat16)
    good = p.by_flashinfer("silu")
    p.weights[4] = torch.nan
    result = p.by_flashinfer("silu")
    assert result.isnan().any(1).nonzero().flatten().tolist() == [4]
    others = torch.arange(40, device=CUDA) != 4
    assert torch.equal(result[others], good[others])
