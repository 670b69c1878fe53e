"""Compiles the bundle of a model for a described GPU.

The bundle holds the programs of layers for few rows, as text. It also holds the compiled kernels of
all programs: this project's kernels in the shapes of the engine's buckets, and the kernels that
Inductor wrote.

The bundle holds no program that Inductor made. torch stores such a program with the version and the
toolkit of its build, and compares both when it loads the program (torch/_dynamo/package.py,
SystemInfo). So a build with CUDA does not load the programs of a build without CUDA. A build with
CUDA needs a driver to store a program, because Inductor first loads the program's kernels. So a
first start on the GPU lowers these programs again, finds their kernels compiled, and stores the
programs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ostinato.benchmarks.gpu.without_device.expert_calls import expert_calls
from ostinato.benchmarks.gpu.without_device.fake_device import fake_device
from ostinato.benchmarks.gpu.without_device.kernels import compile_inductor_kernel
from ostinato.benchmarks.gpu.without_device.model_programs import ModelPrograms, lower_config
from ostinato.benchmarks.gpu.without_device.steps import Step, own_attention
from ostinato.benchmarks.machine.described_device import DescribedDevice
from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.environment import triton_cache_in
from ostinato.conf.schema import ExpertKernels, GraphMode
from ostinato.graphs.buckets import GraphKey
from ostinato.graphs.bundle import Bundle
from ostinato.graphs.compiler.functions import is_portable
from ostinato.graphs.kernel_archive import pack_triton_kernels, triton_entry
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.loading import open_bundle
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan

__all__ = ("DescribedBundle", "bundle_for")


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedBundle:
    """A saved bundle and what is in it."""

    bundle: Bundle
    num_kernels: int
    max_model_len: int  # tokens of the longest context, which is part of the bundle's name


class _Portable:
    """Keeps the programs that any machine can load."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def get(self, name: str) -> bytes | None:
        # no stored program is used, so that every program, and with it its kernels, is compiled
        return None

    def put(self, name: str, data: bytes) -> None:
        if is_portable(data):
            self._bundle.put(name, data)

    def reject(self, reason: str) -> None:
        raise AssertionError(f"nothing was stored, but {reason}")


def bundle_for(config: EngineConfig, device: DescribedDevice) -> DescribedBundle:
    """Compile and save a model's bundle.

    A process can do this for one device only, because compilers remember the device.

    Args:
        config: the engine's configuration.
        device: the GPU.

    Raises:
        StartupError: the model does not fit on the GPU or is not compiled there, or the bundle can
            not be saved.
    """
    with fake_device(device), _kernel_folder() as folder, torch.inference_mode():
        plan = make_plan(config, 1)
        _check(plan)
        bundle = open_bundle(plan)
        if bundle is None:
            raise StartupError(
                f"graphs.bundle={str(config.graphs.bundle).lower()} with graphs.mode="
                f"{config.graphs.mode.value} compiles nothing that could be saved; leave both out"
            )
        store = _Portable(bundle)
        programs = lower_config(
            plan.source.config,
            plan.source.dtype,
            plan.kv_cache_spec,
            plan.memory.max_model_len,
            weights=plan.source.weights,
            form=config.graphs.form,
            store=store,
        )
        _compile_kernels(programs, plan, device)
        name = triton_entry()
        assert name is not None, "Triton has compiled the kernels"
        bundle.put(name, pack_triton_kernels(folder))
        num_kernels = len(list(folder.glob("*/*.cubin")))
    bundle.save()
    if not bundle.is_saved:
        raise StartupError(f"the bundle could not be saved in {bundle.directory}; the log says why")
    return DescribedBundle(
        bundle=bundle, num_kernels=num_kernels, max_model_len=plan.memory.max_model_len
    )


def _check(plan: EnginePlan) -> None:
    """Refuse settings with which nothing is compiled, and models that take other kernels."""
    config, source = plan.config, plan.source
    if config.graphs.mode is GraphMode.eager:
        raise StartupError("graphs.mode=eager compiles nothing; leave it out")
    if not source.config.kind.generates:
        raise StartupError(
            f"compile.gpu compiles models that generate, and {source.config.architecture} does not"
        )
    if source.adapters is not None:
        raise StartupError(
            "compile.gpu compiles no programs with low-rank adapters; leave lora at its "
            "defaults, or compile on a machine with the GPU"
        )
    model = source.config
    for inputs, tower in (("images", model.vision), ("audio", model.audio or model.sound)):
        if tower is not None:
            raise StartupError(
                f"compile.gpu compiles models of texts, and {model.architecture} takes "
                f"{inputs}; compile on a machine with the GPU"
            )
    if model.recurrent is not None:
        raise StartupError(
            f"compile.gpu compiles models whose layers all have attention, and "
            f"{model.architecture} has recurrent layers; compile on a machine with the GPU"
        )
    if plan.backend != "triton":
        raise StartupError(
            f"compile.gpu compiles the kernels of graphs.attention=triton, and this model takes "
            f"{plan.backend}"
        )
    if plan.experts is not ExpertKernels.auto:
        raise StartupError(
            f"compile.gpu compiles this project's kernels, and graphs.experts={plan.experts} takes "
            "others; leave it at auto"
        )


@contextmanager
def _kernel_folder() -> Iterator[Path]:
    """An empty folder as Triton's cache. In the end it holds only the kernels compiled here."""
    with tempfile.TemporaryDirectory() as folder, triton_cache_in(Path(folder)):
        yield Path(folder)


def _compile_kernels(programs: ModelPrograms, plan: EnginePlan, device: DescribedDevice) -> None:
    """Compile the kernels of both kinds of layers for every shape that a start runs."""
    for name, source in {**programs.layer.sources, **programs.last.sources}.items():
        compile_inductor_kernel(name, source)
    for step in _steps(plan):
        own_attention(programs, step, device.arch)
        if step.sizes.num_tokens <= programs.most_few_tokens:
            programs.fused_launches(step.sizes, device.arch)
        expert_calls(programs, step.sizes.num_tokens, device.arch)


def _steps(plan: EnginePlan) -> Iterator[Step]:
    """The buckets, and the steps that a start runs uncaptured."""
    for sizes in plan.warm_up_steps:
        per_seq = sizes.num_tokens // sizes.num_seqs
        yield Step(name=str(sizes), seqs=((sizes.num_seqs, per_seq, per_seq),))
    for key in plan.buckets.keys:
        yield _padded(key)


def _padded(key: GraphKey) -> Step:
    """A step of a bucket's shape; only the number of tokens and of sequences matter."""
    per_seq = key.num_tokens // key.num_seqs
    if per_seq * key.num_seqs == key.num_tokens:
        return Step(name=str(key), seqs=((key.num_seqs, per_seq, per_seq),))
    rest = key.num_tokens - per_seq * key.num_seqs
    rows = ((key.num_seqs - rest, per_seq, per_seq), (rest, per_seq + 1, per_seq + 1))
    return Step(name=str(key), seqs=rows)
