"""Every activation against transformers' function of the same name."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ostinato.ops.activation import ACTIVATIONS, activate, plain_activation
from ostinato.ops.native.library import load
from tests.ops.kernel_checks import EACH_LEVEL, ops_of


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_equals_transformers(name: str) -> None:
    load("core")
    x = torch.linspace(-9, 9, 4001).unsqueeze(0)
    # gelu_new and gelu_fast write the same polynomial in another order.
    torch.testing.assert_close(activate(x, name), ACT2FN[name](x), atol=2e-6, rtol=2e-6)


def test_gelu_of_large_and_undefined_values() -> None:
    load("core")
    x = torch.tensor([[float("inf"), 1e30, -1e30, -float("inf"), float("nan")]])
    result = activate(x, "gelu")[0].tolist()
    assert result[:4] == [float("inf"), x[0, 1].item(), 0.0, 0.0]
    assert math.isnan(result[4])


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_nan_stays_nan(level: str) -> None:
    """In each lane of a vector, and in the elements after the last whole vector."""
    ops = ops_of("core", level, activation="activation", sigmoid_gate="sigmoid_gate")
    count = 39
    gate, other = torch.linspace(-9, 9, count).repeat(2, count, 1)
    gate.fill_diagonal_(float("nan"))
    for kind in sorted({*ACTIVATIONS.values(), "swigluoai"}):
        for x in (torch.cat((gate, other), 1), torch.cat((other, gate), 1)):
            expected = plain_activation(x, kind, True)
            torch.testing.assert_close(
                ops.activation(x, kind, True), expected, atol=4e-6, rtol=4e-6, equal_nan=True
            )
        if kind != "swigluoai":
            expected = plain_activation(gate, kind, False)
            torch.testing.assert_close(
                ops.activation(gate, kind, False), expected, atol=4e-6, rtol=4e-6, equal_nan=True
            )
    torch.testing.assert_close(
        ops.sigmoid_gate(other, gate), other * gate.sigmoid(), equal_nan=True
    )


def test_gate_comes_first() -> None:
    x = torch.tensor([[-1.0, 2.0, 5.0, 7.0]])
    assert activate(x, "relu", gated=True).tolist() == [[0.0, 14.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_gates_are_those_of_gpt_oss(dtype: torch.dtype) -> None:
    load("core")
    gate, up = torch.meshgrid(
        torch.linspace(-12, 12, 37), torch.linspace(-12, 12, 37), indexing="ij"
    )
    x = torch.cat((gate, up), 1).to(dtype)
    gate, up = x.float().chunk(2, 1)
    in_turns = torch.stack((gate, up), -1).flatten(1)
    experts = SimpleNamespace(limit=7.0, alpha=1.702)
    expected = GptOssExperts._apply_gate(cast(Any, experts), in_turns)
    ours = activate(x, "swigluoai", gated=True).float()
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5 if dtype.itemsize > 2 else 4e-3)
    with pytest.raises(ValueError, match="needs a gate"):
        activate(x, "swigluoai")
