"""Programs: compiled functions bound to a model's weights, called once a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ostinato.graphs.compiler.cpu_capture import CpuReplay, LayerCall, capture_layers
from ostinato.graphs.compiler.functions import Function, FxFunction
from ostinato.models.base import LanguageModel
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import ForwardBatch, StepInputs

__all__ = ("LayeredProgram", "Program", "WholeProgram")

_REPLAYED_TOKENS = 64  # of the largest step whose layers are replayed as a CPU graph


class Program(Protocol):
    """A compiled model with its weights."""

    @property
    def has_loops(self) -> bool:
        """Whether it may contain parallel loops besides those of our own kernels."""
        ...

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Hidden [R, D] of `batch.logits_indices`; writes K and V of all tokens."""
        ...


class WholeProgram:
    """A model that is one function of (parameters, batch, kv_cache)."""

    has_loops = True

    def __init__(self, function: Function, parameters: list[Tensor]) -> None:
        self._function = function
        self._parameters = parameters

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        return self._function(self._parameters, batch, kv_cache)


class LayeredProgram:
    """A model whose layers are functions. The last one takes the wanted rows as well.

    In small steps on a CPU the layers are replayed as a CPU graph, which is captured at the first
    such step. In larger steps Python takes a small share of the time, and the results of a CPU
    graph, which has memory of its own, would be large.
    """

    def __init__(
        self, model: LanguageModel, calls: Sequence[tuple[Function, list[Tensor]]]
    ) -> None:
        """
        Args:
            model: its `begin` and `finish` run as they are.
            calls: function and parameters of each layer.
        """
        self._model = model
        self._calls = calls
        self._can_capture = all(isinstance(function, FxFunction) for function, _ in calls)
        self._replay: CpuReplay | None = None

    @property
    def has_loops(self) -> bool:
        return self._replay is None  # a CPU graph holds nothing but calls of our kernels

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        hidden, step = self._model.begin(batch)
        replay = self._find_replay(kv_cache, hidden, step)
        if replay is not None:
            return self._model.finish(replay(hidden, step))
        *calls, (last, last_parameters) = self._calls
        for (function, parameters), (k_cache, v_cache) in zip(calls, kv_cache, strict=False):
            hidden = function(parameters, hidden, step, k_cache, v_cache)
        hidden = last(last_parameters, hidden, step, *kv_cache[-1], batch.logits_indices)
        return self._model.finish(hidden)

    def _find_replay(self, kv_cache: KVCache, hidden: Tensor, step: StepInputs) -> CpuReplay | None:
        """The CPU graph over this cache; None when the functions must be called."""
        if not self._can_capture or len(hidden) > _REPLAYED_TOKENS:
            return None
        if self._replay is None or self._replay.kv_cache is not kv_cache:
            layers = [
                LayerCall(function.program, parameters)
                for function, parameters in self._calls
                if isinstance(function, FxFunction)
            ]
            self._replay = capture_layers(layers, kv_cache, hidden, step)
            self._can_capture = self._replay is not None
        return self._replay
