"""Compiled programs with a model's weights: the whole model as one function, or layer by layer.

A layer runs in one of four ways (`LayerProgram`). Layer programs that are FX text can be captured:
C++ then replays them in small steps without Python (cpu_capture.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

from ostinato.graphs.compiler.cpu_capture import (
    CpuReplay,
    LayerCall,
    capture_layers,
    why_not_captured,
)
from ostinato.graphs.compiler.fx_program import FxFunction
from ostinato.models.base import LanguageModel
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import ForwardBatch, StepInputs

__all__ = ("Function", "LayerProgram", "LayeredProgram", "Program", "WholeProgram")

Function = Callable[..., Any]

_LOG = logging.getLogger(__name__)

_CAPTURED_TOKENS = 64  # of the largest step that a CPU graph serves


class LayerProgram(StrEnum):
    """How a layer runs in a small step."""

    captured = "captured"  # recorded in a CPU graph or a CUDA graph
    fx = "fx"  # Python text that calls this package's ops
    inductor = "inductor"  # code that Inductor made of the layer
    eager = "eager"  # the model's own modules


class Program(Protocol):
    """A compiled model with its weights."""

    @property
    def has_loops(self) -> bool:
        """Whether it may contain OpenMP loops, which torch and Inductor make."""
        ...

    @property
    def layers_by_program(self) -> dict[LayerProgram, int]:
        """How many layers run in which way in a small step."""
        ...

    @property
    def wants_capture(self) -> bool:
        """Whether a run inside `recording` would record something that is not recorded yet."""
        ...

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the program calls while it is run, for later steps."""
        ...

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Hidden [R, D] of `batch.logits_indices`; writes K and V of all tokens."""
        ...


class WholeProgram:
    """A model that is one function."""

    has_loops = True
    wants_capture = False

    def __init__(self, function: Function, parameters: list[Tensor], num_layers: int) -> None:
        self._function = function
        self._parameters = parameters
        self._num_layers = num_layers

    @property
    def layers_by_program(self) -> dict[LayerProgram, int]:
        return {_form_of(self._function): self._num_layers}

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        return self._function(self._parameters, batch, kv_cache)


class LayeredProgram:
    """A model whose layers are functions; the last one takes the wanted rows besides.

    Once captured, steps of up to 64 tokens replay a CPU graph of any shape. In larger steps
    Python's share is small, and a graph's results, which stay allocated, would be large.
    """

    def __init__(
        self, model: LanguageModel, calls: Sequence[tuple[Function, list[Tensor]]]
    ) -> None:
        self._model = model
        self._calls = calls
        self._has_pieces = any(
            isinstance(function, FxFunction) and function.pieces for function, _ in calls
        )
        self._replay: CpuReplay | None = None
        self._is_recording = False
        self._is_examined = False  # whether the log says which layers can not be captured

    @property
    def has_loops(self) -> bool:
        return self._replay is None or self._has_pieces

    @property
    def layers_by_program(self) -> dict[LayerProgram, int]:
        if self._replay is not None:
            return {LayerProgram.captured: len(self._calls)}
        return dict(Counter(_form_of(function) for function, _ in self._calls))

    @property
    def wants_capture(self) -> bool:
        return self._replay is None and not self._is_examined

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        hidden, step = self._model.begin(batch)
        if (
            self._is_recording
            and self.wants_capture
            and (layers := self._capturable_layers()) is not None
        ):
            self._replay = capture_layers(layers, kv_cache, hidden, step)
        replay = self._replay_for(kv_cache, hidden)
        if replay is not None:
            return self._model.finish(replay(hidden, step))
        return self._model.finish(self._run(hidden, step, kv_cache))

    def _replay_for(self, kv_cache: KVCache, hidden: Tensor) -> CpuReplay | None:
        """The captured graph, if it is for this cache and serves a step of this size."""
        replay = self._replay
        if replay is None or replay.kv_cache is not kv_cache or len(hidden) > _CAPTURED_TOKENS:
            return None
        return replay

    def _run(self, hidden: Tensor, step: StepInputs, kv_cache: KVCache) -> Tensor:
        *calls, (finish, last_parameters) = self._calls
        for (function, parameters), (k_cache, v_cache) in zip(calls, kv_cache, strict=False):
            hidden = function(parameters, hidden, step, k_cache, v_cache)
        rows = step.tensors.logits_indices
        return finish(last_parameters, hidden, step, *kv_cache[-1], rows)

    def _capturable_layers(self) -> list[LayerCall] | None:
        """All layers, if all can be captured; else the log says why not."""
        layers: list[LayerCall] = []
        reasons: dict[str, list[int]] = {}
        for index, (function, parameters) in enumerate(self._calls):
            if isinstance(function, FxFunction):
                layers.append(LayerCall(function, parameters))
                reason = why_not_captured(layers[-1])
            else:
                reason = "Inductor compiled it as a whole"
            if reason is not None:
                reasons.setdefault(reason, []).append(index)
        for reason, indices in reasons.items():
            _LOG.info("layers %s are not captured: %s", _in_words(indices), reason)
        self._is_examined = True
        return None if reasons else layers


def _form_of(function: Function) -> LayerProgram:
    return LayerProgram.fx if isinstance(function, FxFunction) else LayerProgram.inductor


def _in_words(indices: Sequence[int]) -> str:
    """ "3", or "0 to 7" of consecutive numbers."""
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return str(first)
    if last - first + 1 == len(indices):
        return f"{first} to {last}"
    return ", ".join(map(str, indices))
