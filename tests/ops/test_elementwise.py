"""The C++ kernels between a layer's products against float64, on all runnable instruction sets.

The kernels compute in float32 and round the result once. So errors are a few units in the last
place of float32 (the exponential's approximation included), plus half a unit of the result's type.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.ops import activation, norm, rope
from tests.ops.kernel_checks import EACH_LEVEL, name_of, ops_of

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_COUNTS = [1, 7, 16, 64, 129, 1536]  # around the widths of vectors, and more than a chunk of 512
_KINDS = sorted(set(activation.ACTIVATIONS.values()))


@pytest.fixture(params=EACH_LEVEL)
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The ops at one instruction set."""
    assert all(hasattr(module, "__all__") for module in (activation, norm, rope))  # ops are defined
    names = ("rms_norm", "layer_norm", "rotate_heads", "join_heads", "activation", "sigmoid_gate")
    return ops_of("core", request.param, **{name: name for name in names})


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values with a row stride that is larger than a row."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator) * 2
    return wide.to(dtype)[..., : shape[-1]]


def _assert_close(result: Tensor, exact: Tensor, scale: float = 1.0) -> None:
    bound = 1e-6 * (exact.abs() + scale) + torch.finfo(result.dtype).eps / 2 * exact.abs()
    if result.dtype == torch.float16:
        bound = bound + 2.0**-25  # half the spacing of its subnormals
    assert result.shape == exact.shape
    assert result.is_contiguous()
    excess = (result.double() - exact).abs() - bound
    assert bool((excess <= 0).all()), f"worst excess {excess.max()}"


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("count", _COUNTS)
def test_norms(kernels: SimpleNamespace, dtype: torch.dtype, count: int) -> None:
    x = _random(9, count, dtype=dtype)
    weight, bias = (_random(count, dtype=dtype, seed=seed).contiguous() for seed in (1, 2))
    wide, w, b = x.double(), weight.double(), bias.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w
    result = kernels.rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    _assert_close(result, exact, scale=10.0)
    result = kernels.layer_norm(x, weight, bias, 1e-3)
    _assert_close(result, F.layer_norm(wide, (count,), w, b, 1e-3), scale=100.0)
    for row in range(9):  # a row alone has the same bits
        assert torch.equal(kernels.layer_norm(x[row : row + 1], weight, bias, 1e-3)[0], result[row])


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("half", [0, 3, 16, 32])
@pytest.mark.parametrize("normalised", ["both", "queries", "none"])
def test_rotated_heads(
    kernels: SimpleNamespace, dtype: torch.dtype, half: int, normalised: str
) -> None:
    x = _random(6, 5, 64, dtype=dtype)
    angles = torch.linspace(0, 9, 6 * half).view(6, half)
    cos, sin = angles.cos(), angles.sin()
    q_weight = _random(64, dtype=dtype, seed=1).contiguous() if normalised != "none" else None
    k_weight = _random(64, dtype=dtype, seed=2).contiguous() if normalised == "both" else None
    heads = x.double()
    for part, weight in ((slice(0, 3), q_weight), (slice(3, 5), k_weight)):
        if weight is not None:
            mean = heads[:, part].square().mean(-1, keepdim=True)
            heads[:, part] = heads[:, part] * torch.rsqrt(mean + 1e-6) * weight.double()
    first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    turn, lift = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    heads[..., :half] = first * turn - second * lift
    heads[..., half : 2 * half] = second * turn + first * lift
    result = kernels.rotate_heads(x, cos, sin, q_weight, k_weight, 3, 1e-6)
    assert result.dtype == dtype
    _assert_close(result, heads, scale=10.0)


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", _KINDS)
def test_activations(kernels: SimpleNamespace, dtype: torch.dtype, kind: str) -> None:
    x = torch.linspace(-30, 30, 7 * 730).view(7, 730).to(dtype)
    # In float16, 900 squared is infinite.
    large = 40.0 if (kind, dtype) == ("relu2", torch.float16) else 900.0
    x[0, :4] = torch.tensor([-large, large, 0.0, -100.0], dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    exact = activation._PLAIN[kind]
    _assert_close(kernels.activation(x, kind, False), exact(x.double()), scale=4.0)
    result = kernels.activation(x, kind, True)
    assert result.dtype == dtype
    _assert_close(result, exact(gate) * up, scale=100.0)


@pytest.mark.parametrize("count", _COUNTS)
def test_activation_of_any_length_gives_the_same_bits_with_any_number_of_threads(
    kernels: SimpleNamespace, count: int
) -> None:
    x = _random(300, 2 * count, dtype=torch.float32)  # enough rows for several workers
    whole = kernels.activation(x, "silu", True)
    torch.testing.assert_close(whole, F.silu(x[:, :count]) * x[:, count:], atol=3e-6, rtol=3e-6)
    for row in (0, 150, 299):
        assert torch.equal(kernels.activation(x[row : row + 1], "silu", True)[0], whole[row])


def test_no_rows(kernels: SimpleNamespace) -> None:
    x = torch.empty(0, 8)
    assert kernels.rms_norm(x, torch.ones(8), 1e-6).shape == (0, 8)
    assert kernels.activation(x, "relu", True).shape == (0, 4)


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize(("tokens", "heads", "shared", "own"), [(1, 3, 8, 16), (70, 128, 64, 128)])
def test_joined_heads(
    kernels: SimpleNamespace, dtype: torch.dtype, tokens: int, heads: int, shared: int, own: int
) -> None:
    first = _random(tokens, 1, shared, dtype=dtype)
    second = _random(tokens, heads, own, dtype=dtype, seed=1)
    result = kernels.join_heads(first, second)
    assert result.is_contiguous()
    assert torch.equal(result, torch.cat((first.expand(-1, heads, -1), second), -1))


def test_wrong_arguments_are_named(kernels: SimpleNamespace) -> None:
    x = torch.ones(2, 8)
    with pytest.raises(
        ValueError, match="weight must be a contiguous vector of the normalised size"
    ):
        kernels.rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="x must be float32, bfloat16 or float16"):
        kernels.rms_norm(x.double(), torch.ones(8).double(), 1e-6)
    with pytest.raises(ValueError, match="contiguous rows"):
        kernels.rms_norm(x.T, torch.ones(2), 1e-6)
    with pytest.raises(ValueError, match="an even number of elements"):
        kernels.activation(torch.ones(2, 7), "relu", True)
    with pytest.raises(ValueError, match=r"kind must be silu, .*got tanh"):
        kernels.activation(x, "tanh", False)
    table = torch.ones(2, 5)
    with pytest.raises(ValueError, match="cos and sin must be float32"):
        kernels.rotate_heads(x.view(2, 1, 8), table, table, None, None, 1, 0.0)
    with pytest.raises(ValueError, match="shared must be"):
        kernels.join_heads(x.view(2, 2, 4), x.view(2, 2, 4))


@pytest.mark.parametrize("dtype", _DTYPES, ids=name_of)
@pytest.mark.parametrize("count", _COUNTS)
def test_sigmoid_gates(kernels: SimpleNamespace, dtype: torch.dtype, count: int) -> None:
    x, gate = _random(9, count, dtype=dtype), _random(9, count, dtype=dtype, seed=1) * 9
    gate[3], gate[4] = torch.inf, -torch.inf
    result = kernels.sigmoid_gate(x, gate)
    assert result.dtype == dtype
    _assert_close(result, x.double() * torch.sigmoid(gate.double()))
    with pytest.raises(ValueError, match="one shape"):
        kernels.sigmoid_gate(x, gate[1:])
