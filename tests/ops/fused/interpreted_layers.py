"""The kernels that Inductor writes for a layer, under Triton's interpreter.

The engine's compiler lowers the layers of a model for a described GPU. Then the layers run with
tensors in host memory: the interpreter runs Inductor's kernels and ours, and torch's CPU kernels
multiply matrices.

pytest collects no file of this name: test_interpreted_kernels.py runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode

from ostinato.benchmarks.gpu.without_device.fake_device import fake_device, replaced
from ostinato.benchmarks.gpu.without_device.model_programs import _fake_batch
from ostinato.benchmarks.machine.described_device import described_device
from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import Binder, compile_model
from ostinato.graphs.compiler.programs import LayeredProgram
from ostinato.models.base import CausalLM
from ostinato.models.registry import build_model, model_class
from ostinato.models.step_tensors import Size, StepSizes
from tests.models.driver import Driver, Forward
from tests.ops.fused.interpreted_fused import MODELS, logits_of

_BLOCKS = {"XBLOCK": 16, "R0_BLOCK": 16}


@triton.jit
def _rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


class Interpreted:
    """A kernel of Inductor, with Inductor's way to launch it."""

    num_runs = 0

    def __init__(self, name: str, source: str) -> None:
        module = PyCodeCache.load(source)
        # The interpreter has no functions of CUDA's library.
        module.libdevice = SimpleNamespace(rsqrt=_rsqrt, exp=_exp, tanh=_tanh)
        self._kernel = getattr(module, name)

    def run(self, *arguments: Any, stream: int) -> None:
        kernel = self._kernel
        names = kernel.arg_names
        given = dict(zip(names, arguments, strict=False))
        blocks = {name: size for name, size in _BLOCKS.items() if name in names}
        kernel[(triton.cdiv(given["xnumel"], blocks["XBLOCK"]),)](**given, **blocks)
        Interpreted.num_runs += 1


def _undecorated(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


@contextmanager
def in_host_memory() -> Iterator[None]:
    """Inside, Inductor's code for CUDA allocates in host memory, and kernels are interpreted."""
    forms = ("pointwise", "reduction", "persistent_reduction")
    with ExitStack() as stack:
        for owner, values in (
            (AsyncCompile, {"triton": lambda _, name, source, **more: Interpreted(name, source)}),
            (triton_heuristics, dict.fromkeys(forms, _undecorated)),
            (import_module("torch._C._dynamo.guards"), {"_empty_strided_cuda": _empty}),
            (torch.cuda, {"_DeviceGuard": nullcontext, "set_device": lambda index: None}),
        ):
            stack.enter_context(replaced(owner, **values))
        yield


def compiled(hf_config: dict[str, Any]) -> Binder:
    """The program of a model in float32, compiled for an H200."""
    config = model_class(hf_config["architectures"][0]).read_config(hf_config)
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda", 0)
    with fake_device(described_device("h200")), torch.no_grad():
        with mode:
            model = build_model(
                config,
                dtype=torch.float32,
                device=device,
                attention_backend="triton",
                max_model_len=256,
            )
            cache = config.kv_cache_spec(Driver.block_size, torch.float32).allocate(64, device)
        assert isinstance(model, CausalLM)
        example = _fake_batch(model, StepSizes(16, 2, 2), {Size.blocks: 32}, mode)
        return compile_model(model, GraphForm.layer, example, cache)


@pytest.mark.slow  # half a minute
def test_layers_of_larger_steps() -> None:
    """Prefill, chunks beside decodes, decode: Inductor's programs, against the reference."""
    hf_config = MODELS["qwen3"]
    expected = logits_of(hf_config, "reference", lambda model: None)

    def layers(model: CausalLM) -> Forward:
        program = bind(model)
        assert isinstance(program, LayeredProgram)
        program._few_calls = []  # the same program in steps of few tokens
        return program

    with in_host_memory():
        bind = compiled(hf_config)
        before = Interpreted.num_runs
        found = logits_of(hf_config, "triton", layers)
    # Each layer has two norms and an activation. The last one also picks the wanted rows of two
    # tensors.
    num_kernels = 3 * hf_config["num_hidden_layers"] + 2
    assert Interpreted.num_runs - before == 4 * num_kernels, "in each of four steps"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-4)
