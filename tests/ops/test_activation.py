"""Every activation against transformers' function of the same name."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from ostinato.ops.activation import ACTIVATIONS, activate


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_equals_transformers(name: str) -> None:
    x = torch.linspace(-9, 9, 4001).unsqueeze(0)
    # gelu_new and gelu_fast write the same polynomial in another order.
    torch.testing.assert_close(activate(x, name), ACT2FN[name](x), atol=2e-6, rtol=2e-6)


def test_gate_comes_first() -> None:
    x = torch.tensor([[-1.0, 2.0, 5.0, 7.0]])
    assert activate(x, "relu", gated=True).tolist() == [[0.0, 14.0]]
