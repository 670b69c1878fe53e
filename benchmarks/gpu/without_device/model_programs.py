"""The programs of a model on a described GPU: lowered by the engine's own compiler, never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.benchmarks.gpu.without_device.lowering import By, Launch, Lowered, lowered_graphs
from ostinato.conf.compose import load_config
from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.models.base import CausalLM
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import KVCache
from ostinato.models.registry import build_model
from ostinato.models.step_tensors import ForwardBatch, Size, StepSizes, tensor_specs
from ostinato.runtime.startup.planning import open_model

__all__ = ("BLOCK_SIZE", "MAX_MODEL_LEN", "ModelPrograms", "fake_batch", "lower_model")

BLOCK_SIZE = 16
MAX_MODEL_LEN = 16_384
_NUM_BLOCKS = 65_536  # of the cache: a copy of it would be seen in the bytes of a launch
_EXAMPLE = StepSizes(16, 2, 2)  # as at an engine's start (runtime/startup/loading.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrograms:
    """A model's launches; those of its layers are counted once."""

    config: ModelConfig
    layer: Lowered  # every layer but the last
    last: Lowered
    model: CausalLM  # of fake tensors
    kv_cache: KVCache
    mode: FakeTensorMode

    @property
    def cache_bytes(self) -> int:
        """Bytes of one of the two caches of a layer."""
        return self.kv_cache[0][0].nbytes

    def eager_launches(self, sizes: StepSizes) -> tuple[list[Launch], list[Launch]]:
        """The launches before and after the layers: (begin, finish with the output head).

        They run uncompiled: each torch op that is not a view is one launch.
        """
        batch = fake_batch(self.model, sizes, self.mode)
        with self.mode, torch.inference_mode():
            hidden = torch.empty(
                sizes.num_rows, self.config.hidden_size, dtype=torch.bfloat16, device="cuda"
            )
            with _counted() as begin:
                self.model.begin(batch)
            with _counted() as finish:
                self.model.compute_logits(self.model.finish(hidden))
        return begin, finish


def lower_model(name: str) -> ModelPrograms:
    """Lower the layers of a preset in bfloat16 with the triton backend, inside `fake_device`.

    Args:
        name: a file of conf/model/.

    Raises:
        ValueError: the model is a mixture of experts, which the CUDA path does not compile.
    """
    run = load_config([f"model={name}", "model.load_format=dummy", "device.name=cpu"])
    config = open_model(run).config
    if config.has_experts:
        raise ValueError(f"{name} has experts: the CUDA path runs them uncompiled")
    device = torch.device("cuda", 0)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.inference_mode():
        model = build_model(
            config,
            dtype=torch.bfloat16,
            device=device,
            attention_backend="triton",
            max_model_len=min(MAX_MODEL_LEN, config.max_model_len),
        )
        cache = config.kv_cache_spec(BLOCK_SIZE, torch.bfloat16).allocate(_NUM_BLOCKS, device)
    assert isinstance(model, CausalLM), f"{name} generates no tokens"
    example = fake_batch(model, _EXAMPLE, mode)
    with lowered_graphs() as found, torch.inference_mode():
        compile_model(model, GraphForm.layer, example, cache)
    first, last = found[0], found[-1]
    return ModelPrograms(
        config=config, layer=first, last=last, model=model, kv_cache=cache, mode=mode
    )


def fake_batch(model: CausalLM, sizes: StepSizes, mode: FakeTensorMode) -> ForwardBatch:
    """Step tensors of a shape, without contents."""
    fixed = {Size.blocks: MAX_MODEL_LEN // BLOCK_SIZE, Size.encoder_blocks: 1}
    with mode:
        tensors: dict[str, Tensor] = {
            name: torch.empty(
                spec.shape(sizes, fixed),
                dtype=spec.dtype,
                device="cpu" if name == "plan" else "cuda",
            )
            for name, spec in tensor_specs(model.step_tensors).items()
        }
    return model.step_tensors(**tensors)


@contextmanager
def _counted() -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    with _Counting(launches):
        yield launches


class _Counting(TorchDispatchMode):
    """Adds a launch for each op that is not a view."""

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
        if not isinstance(result, Tensor) or func.is_view:
            return result
        inputs = [one for one in args if isinstance(one, Tensor)]
        name = str(func)
        read = sum(one.nbytes for one in inputs)
        if name.startswith("aten.embedding"):
            read = result.nbytes + inputs[1].nbytes  # the rows alone
        is_product = name.startswith(("aten.mm", "aten.addmm"))
        flop = 2 * result.numel() * inputs[-1].shape[0] if is_product else 0
        self._launches.append(
            Launch(
                by=By.cublas if is_product else By.torch,
                name=name,
                num_bytes=sympy.Integer(read + result.nbytes),
                input_bytes=sympy.Integer(read),
                num_flop=sympy.Integer(flop),
            )
        )
        return result
