"""The programs of a model on a described GPU: lowered by the engine's own compiler, never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.benchmarks.gpu.without_device.expert_bytes import fused_experts_launches
from ostinato.benchmarks.gpu.without_device.kernels import OwnLaunch, recorded_launches
from ostinato.benchmarks.gpu.without_device.lowering import By, Launch, Lowered, lowered_graphs
from ostinato.conf.compose import load_config
from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.functions import ProgramStore
from ostinato.models.base import CausalLM, DecoderLayer, FewRows
from ostinato.models.choose_weights import PLAIN
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import KVCache, KVCacheSpec
from ostinato.models.layers.adapter_slots import AdapterSpace
from ostinato.models.registry import build_model
from ostinato.models.step_tensors import ForwardBatch, Size, StepSizes, tensor_specs
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_policy import WeightPolicy
from ostinato.ops.backends.triton_tiles import ceil_div
from ostinato.ops.fused import triton_fused_linear
from ostinato.ops.fused.triton_fused_experts import launch_experts
from ostinato.ops.fused.triton_fused_quantized import launch_quantized
from ostinato.runtime.startup.plan.model_source import open_model

__all__ = (
    "BLOCK_SIZE",
    "MAX_MODEL_LEN",
    "FusedLaunch",
    "ModelPrograms",
    "counted_ops",
    "lower_config",
    "lower_model",
)

BLOCK_SIZE = 16
MAX_MODEL_LEN = 16_384
_NUM_BLOCKS = 65_536  # so large that a copied cache would show in a launch's bytes
_EXAMPLE = StepSizes(16, 2, 2)  # as at an engine's start (runtime/startup/loading.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLaunch:
    """A launch of a layer's program for steps of few tokens (models/layers/few_rows.py)."""

    launch: Launch
    # None for attention, which makes several launches, and for ops of torch
    kernel: OwnLaunch | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrograms:
    """A model and its lowered programs, from which the launches of a step are counted."""

    config: ModelConfig
    dtype: torch.dtype  # of weights and activations
    max_model_len: int
    table_blocks: Mapping[Size, int]  # blocks of the longest sequence in each block table
    layer: Lowered  # every layer but the last
    last: Lowered
    model: CausalLM  # its tensors are fake
    kv_cache: KVCache
    mode: FakeTensorMode

    @property
    def cache_bytes(self) -> int:
        """Bytes of one of the two caches of a layer."""
        return self.kv_cache[0][0].nbytes

    def eager_launches(self, sizes: StepSizes) -> tuple[list[Launch], list[Launch]]:
        """The launches before and after the layers: (begin, finish with the output head).

        They run uncompiled: each torch op is one launch, except views and `empty`.
        """
        batch = self.batch(sizes)
        with self.mode, torch.inference_mode():
            hidden = torch.empty(
                sizes.num_rows, self.config.hidden_size, dtype=self.dtype, device="cuda"
            )
            with counted_ops() as begin:
                self.model.begin(batch)
            with counted_ops() as finish:
                self.model.compute_logits(self.model.finish(hidden))
        return begin, finish

    def batch(self, sizes: StepSizes) -> ForwardBatch:
        """Step tensors of a shape, without contents."""
        return _fake_batch(self.model, sizes, self.table_blocks, self.mode)

    @property
    def most_few_tokens(self) -> int:
        """Tokens of the largest step that runs the layers' form for few rows; 0 = there is none."""
        few = self._few_rows(0)
        return 0 if few is None else few.most_tokens

    def fused_launches(
        self, sizes: StepSizes, arch: int, *, is_last: bool = False
    ) -> list[FusedLaunch]:
        """The launches of a layer for few rows. Our kernels, except attention, are compiled.

        Args:
            sizes: the sizes of the step.
            arch: the compute capability as one number.
            is_last: whether it is the last layer, which computes only the rows that need logits.
        """
        index = len(self.model.layers) - 1 if is_last else 0
        block = self._few_rows(index)
        assert block is not None, "the model's layers have no form for few rows"
        batch = self.batch(sizes)
        found: list[FusedLaunch] = []
        with self.mode, torch.inference_mode():
            hidden, step = self.model.begin(batch)
            rows = batch.logits_indices if is_last else None
            with _Fused(found, arch):
                block(hidden, step, *self.kv_cache[index], rows)
        return found

    def _few_rows(self, index: int) -> FewRows | None:
        layer = self.model.layers[index]
        assert isinstance(layer, DecoderLayer), f"{type(layer).__name__} is not a DecoderLayer"
        return layer.few_rows()


def lower_model(name: str) -> ModelPrograms:
    """Lower the layers of a preset in bfloat16 with the triton backend, inside `fake_device`.

    Args:
        name: a file of conf/model/. `, int4` after it = weights of 4 bits in the layers.
    """
    name, _, method = name.partition(", ")
    assert method in ("", "int4"), f"{name}: weights can be plain or int4, not {method}"
    run = load_config([f"model={name}", "model.load_format=dummy", "device.name=cpu"])
    config = open_model(run).config
    return lower_config(
        config,
        torch.bfloat16,
        config.kv_cache_spec(BLOCK_SIZE, torch.bfloat16),
        min(MAX_MODEL_LEN, config.max_model_len),
        weights=replace(PLAIN, layers=Int4()) if method else PLAIN,
    )


def lower_config(
    config: ModelConfig,
    dtype: torch.dtype,
    cache: KVCacheSpec,
    max_model_len: int,
    *,
    weights: WeightPolicy = PLAIN,
    form: GraphForm = GraphForm.layer,
    store: ProgramStore | None = None,
    adapters: AdapterSpace | None = None,
) -> ModelPrograms:
    """Lower a model with the triton backend, inside `fake_device`.

    Args:
        config: its hyperparameters.
        dtype: the dtype of weights and activations.
        cache: the shapes of its KV cache.
        max_model_len: tokens of the longest context.
        weights: the weight method of each matrix.
        form: whether a layer or the whole model is one program.
        store: where compiled functions are put; None = nowhere.
        adapters: the room for low-rank adapters. With it, `layer` is the first layer without
            adapters, and `last` the last one with them. None = no room.
    """
    device = torch.device("cuda", 0)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.inference_mode():
        model = build_model(
            config,
            dtype=dtype,
            device=device,
            attention_backend="triton",
            max_model_len=max_model_len,
            weights=weights,
            adapters=adapters,
        )
        kv_cache = cache.allocate(_NUM_BLOCKS, device)
    assert isinstance(model, CausalLM), f"{config.architecture} generates no tokens"
    table_blocks = {
        size: ceil_div(max_model_len, group.units * cache.block_size)
        for size, group in zip((Size.blocks, Size.window_blocks), cache.groups, strict=False)
    }
    example = _fake_batch(model, _EXAMPLE, table_blocks, mode, has_adapters=adapters is not None)
    with lowered_graphs() as found, torch.inference_mode():
        compile_model(model, form, example, kv_cache, store)
    return ModelPrograms(
        config=config,
        dtype=dtype,
        max_model_len=max_model_len,
        table_blocks=table_blocks,
        layer=found[0],
        last=found[-1],
        model=model,
        kv_cache=kv_cache,
        mode=mode,
    )


def _fake_batch(
    model: CausalLM,
    sizes: StepSizes,
    table_blocks: Mapping[Size, int],
    mode: FakeTensorMode,
    *,
    has_adapters: bool = False,
) -> ForwardBatch:
    absent = set[str]() if has_adapters else {"adapter_slots"}
    if Size.window_blocks not in table_blocks:
        absent |= {"window_block_table", "window_slot_mapping"}
    with mode:
        tensors: dict[str, Tensor] = {
            name: torch.empty(
                spec.shape(sizes, table_blocks),
                dtype=spec.dtype,
                device="cpu" if name == "plan" else "cuda",
            )
            for name, spec in tensor_specs(model.step_tensors).items()
            if name not in absent
        }
    return model.step_tensors(**tensors)


@contextmanager
def counted_ops() -> Iterator[list[Launch]]:
    """Inside, each op of torch is appended to the list as a launch, except views and `empty`."""
    launches: list[Launch] = []
    with _Counting(launches):
        yield launches


class _Counting(TorchDispatchMode):
    """Adds a launch for each op, except views and `empty`."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple) else (result,)
        aten = torch.ops.aten
        is_memory = func.overloadpacket in (aten.empty, aten.new_empty, aten.empty_like)
        if isinstance(results[0], Tensor) and not func.is_view and not is_memory:
            self._launches.append(_torch_launch(func, args, results[0]))
        return result


class _Fused(TorchDispatchMode):
    """Adds the launches of our ops, and one for each op of torch that is not a view."""

    def __init__(self, launches: list[FusedLaunch], arch: int) -> None:
        super().__init__()
        self._launches = launches
        self._arch = arch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.ostinato.fused_linear.default:
            with recorded_launches(self._arch) as kernels:
                triton_fused_linear.launch(*args)
            self._launches.append(FusedLaunch(launch=_linear(args, result), kernel=kernels[0]))
        elif func is torch.ops.ostinato.linear_and_scale.default:
            with recorded_launches(self._arch) as kernels:
                triton_fused_linear.launch_linear_and_scale(*args)
            self._launches.append(FusedLaunch(launch=_scaled(args, result), kernel=kernels[0]))
        elif func is torch.ops.ostinato.scale_rows.default:
            with recorded_launches(self._arch) as kernels:
                triton_fused_linear.launch_scale_rows(*args)
            launch = _launch(By.own, "norm", *_norm_bytes(args), 0)
            self._launches.append(FusedLaunch(launch=launch, kernel=kernels[0]))
        elif func is torch.ops.ostinato.fused_quantized_linear.default:
            with recorded_launches(self._arch) as kernels:
                launch_quantized(*args)
            launch = _quantized(args, result, kernels[0])
            self._launches.append(FusedLaunch(launch=launch, kernel=kernels[0]))
        elif func is torch.ops.ostinato.fused_experts.default:
            with recorded_launches(self._arch) as kernels, counted_ops() as others:
                launch_experts(*args)
            launches = list(fused_experts_launches(args, result, kernels))
            self._add(others, [])
            self._add(launches, kernels)
        elif func is torch.ops.ostinato.norm_linear.default:
            with recorded_launches(self._arch) as kernels, counted_ops() as others:
                triton_fused_linear.launch_norm_linear(*args)
            self._add([_launch(By.own, "norm", *_norm_bytes(args), 0)], kernels[:1])
            self._add(others, [])
            x, _, eps, weight, bias, _ = args
            squares = x.new_empty((x.shape[0], 1), dtype=torch.float32)
            product = _linear((x, weight, bias, squares, eps, "", None), result[0])
            self._add([product] * len(kernels[1:]), kernels[1:])
        elif func is torch.ops.ostinato.rotary_attention.default:
            launch = _launch(By.own, "rotary_attention", 0, 0, 0)
            self._launches.append(FusedLaunch(launch=launch, kernel=None))
        elif isinstance(result, Tensor) and not func.is_view:
            launch = _torch_launch(func, args, result)
            self._launches.append(FusedLaunch(launch=launch, kernel=None))
        return result

    def _add(self, launches: list[Launch], kernels: list[OwnLaunch]) -> None:
        """Add launches and their kernels; no kernels = they are not of this project."""
        for launch, kernel in zip(launches, kernels or [None] * len(launches), strict=True):
            self._launches.append(FusedLaunch(launch=launch, kernel=kernel))


def _norm_bytes(args: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes that the kernel of a norm reads and writes; `args` begin with x and the scale."""
    x, norm_weight, num_counters = *args[:2], args[-1]
    return x.nbytes + norm_weight.nbytes, x.nbytes + 4 * len(x) + 4 * num_counters


def _torch_launch(func: Any, args: tuple[Any, ...], result: Tensor) -> Launch:
    """An op of torch that runs by itself."""
    inputs = [one for one in args if isinstance(one, Tensor)]
    name = str(func)
    read = sum(one.nbytes for one in inputs)
    if name.startswith("aten.embedding"):
        read = result.nbytes + inputs[1].nbytes  # only the rows that are read
    is_product = name.startswith(("aten.mm", "aten.addmm"))
    flop = 2 * result.numel() * inputs[-1].shape[0] if is_product else 0
    return _launch(By.cublas if is_product else By.torch, name, read, result.nbytes, flop)


def _linear(args: tuple[Any, ...], result: Tensor) -> Launch:
    """A call of `fused_linear`, named by its parts."""
    x, weight, _, squares, _, activation, residual = args
    parts = ["norm"] * (squares is not None)
    parts.append(f"{weight.shape[0]} x {weight.shape[1]}")
    parts += [activation] * bool(activation) + ["residual"] * (residual is not None)
    read = sum(one.nbytes for one in args if isinstance(one, Tensor))
    flop = 2 * x.shape[0] * weight.numel()
    return _launch(By.own, ", ".join(parts), read, result.nbytes, flop)


def _scaled(args: tuple[Any, ...], results: tuple[Tensor, ...]) -> Launch:
    """A call of `linear_and_scale`."""
    x, weight, *_ = args
    read = sum(one.nbytes for one in args if isinstance(one, Tensor))
    name = f"{weight.shape[0]} x {weight.shape[1]}, residual, scale"
    return _launch(By.own, name, read, _bytes_of(results), 2 * x.shape[0] * weight.numel())


def _quantized(args: tuple[Any, ...], results: tuple[Tensor, ...], kernel: OwnLaunch) -> Launch:
    """A call of `fused_quantized_linear`. Programs that divide K write and read their sums."""
    x, weight, bias, out_features, order, squares, _, activation, residual, norm_weight = args[:10]
    given = (x, weight, bias, order, squares, residual, norm_weight)
    width, split = out_features * (2 if activation else 1), kernel.grid[2]
    parts = 4 * split * len(x) * width if split > 1 else 0
    name = ["norm"] * (squares is not None) + [f"{width} x {x.shape[1]}, quantised"]
    name += [activation] * bool(activation) + ["residual"] * (residual is not None)
    name += ["scale"] * (norm_weight is not None) + ["sum of parts"] * (split > 1)
    read = sum(one.nbytes for one in given if one is not None) + parts
    flop = 2 * len(x) * width * x.shape[1]
    return _launch(By.own, ", ".join(name), read, _bytes_of(results) + parts, flop)


def _bytes_of(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _launch(by: By, name: str, read: int, written: int, flop: int) -> Launch:
    return Launch(
        by=by,
        name=name,
        num_bytes=sympy.Integer(read + written),
        input_bytes=sympy.Integer(read),
        num_flop=sympy.Integer(flop),
    )
