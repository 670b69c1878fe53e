"""Dummy weights depend on the seed alone, for every weight method."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
from torch import Tensor

from ostinato.models import quantized_checkpoints, weight_methods
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.layers.linear_layers import BuildOptions, Linear
from ostinato.models.quantized_checkpoints.awq import Awq
from ostinato.models.quantized_checkpoints.gguf import AsStored
from ostinato.models.quantized_checkpoints.gptq import Gptq
from ostinato.models.quantized_checkpoints.packed_integers import PackedIntegers
from ostinato.models.quantized_checkpoints.rounded_inputs import RoundedInputs
from ostinato.models.quantized_checkpoints.stored_floats import Float4, Float8
from ostinato.models.quantized_checkpoints.stored_groups import InputsStated
from ostinato.models.weight_methods.compressed import Compressed
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_methods.int8 import Int8
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import WeightMethod
from ostinato.ops.w8a8.round_rows import InputScales

METHODS: tuple[WeightMethod, ...] = (
    Plain(),
    Packed(),
    Compressed(),
    Int8(),
    Int4(),
    Gptq(bits=4, group_size=32, symmetric=True, has_order=True),
    Awq(bits=4, group_size=32, symmetric=False),
    PackedIntegers(bits=4, group_size=32, symmetric=False, is_packed=True),
    PackedIntegers(bits=4, group_size=32, symmetric=True, is_packed=False),
    Float8(),
    Float4(group_size=16, library="modelopt"),
    RoundedInputs(Float8(inputs=InputsStated(InputScales.static))),
    AsStored(("Q8_0",)),
    AsStored(("Q4_K",), keeps_blocks=True),
)


def methods() -> set[type]:
    """The classes of weight methods without those that other methods derive from."""
    modules = [
        import_module(f"{package.__name__}.{module.name}")
        for package in (quantized_checkpoints, weight_methods)
        for module in iter_modules(package.__path__)
    ]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, WeightMethod)
    }
    return {one for one in found if not any(issubclass(other, one) for other in found - {one})}


def drawn(method: WeightMethod, seed: int) -> dict[str, Tensor]:
    options = BuildOptions(
        dtype=torch.bfloat16, device=torch.device("cpu"), attention_backend="", max_model_len=8
    )
    layer = Linear(256, 64, options)
    layer.use(method)
    init_dummy_weights(layer, seed)
    return layer.weights


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_seed_gives_the_same_weights(method: WeightMethod) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one = drawn(method, 3)
        torch.manual_seed(2)
        again, other = drawn(method, 3), drawn(method, 4)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_every_method_is_tested() -> None:
    assert {type(method) for method in METHODS} == methods() | {Packed}
