"""Compiled programs with a model's weights: the whole model as one function, or layer by layer.

A layer runs in one of four ways (`LayerProgram`). Layer programs that are FX text can be captured:
C++ then replays them in steps of up to 64 tokens without Python (cpu_capture.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ostinato.graphs.compiler.cpu_capture import (
    CpuReplay,
    LayerCall,
    capture_layers,
    why_not_captured,
)
from ostinato.graphs.compiler.fx_program import FxFunction
from ostinato.models.base import AuxStates, LanguageModel
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import ForwardBatch, StepInputs

__all__ = (
    "CAPTURED_TOKENS",
    "AdaptableProgram",
    "FewRowsCall",
    "Function",
    "LayerProgram",
    "LayeredProgram",
    "Program",
    "WholeProgram",
)

Function = Callable[..., Any]

_LOG = logging.getLogger(__name__)

CAPTURED_TOKENS = 64
"""Tokens of the largest step that a CPU graph serves."""


class LayerProgram(StrEnum):
    """How a layer runs in a small step.

    On a CPU, a step of up to `CAPTURED_TOKENS` tokens is small. On a GPU, a step that fits a
    captured bucket is small; if nothing is captured, a step that all programs for few rows take.
    """

    captured = "captured"  # recorded in a CPU graph or a CUDA graph
    fx = "fx"  # Python text that calls this package's ops
    inductor = "inductor"  # code that Inductor made of the layer
    eager = "eager"  # the model's own modules


class Program(Protocol):
    """A compiled model with its weights."""

    @property
    def has_loops(self) -> bool:
        """Whether it may contain OpenMP loops, such as those of torch and Inductor."""
        ...

    @property
    def layers_by_program(self) -> dict[LayerProgram, int]:
        """How a layer runs in a small step -> number of such layers."""
        ...

    @property
    def wants_capture(self) -> bool:
        """Whether a run inside `recording` would record something that is not recorded yet."""
        ...

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the program calls while it is run, for later steps."""
        ...

    def __call__(
        self, batch: ForwardBatch, kv_cache: KVCache, aux: AuxStates | None = None
    ) -> Tensor:
        """Hidden [R, D] of `batch.logits_indices`; writes K and V of all tokens.

        Shows `aux` the hidden states that enter its layers. `aux.layers` must be the same in all
        calls of a program.
        """
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

    def __call__(
        self, batch: ForwardBatch, kv_cache: KVCache, aux: AuxStates | None = None
    ) -> Tensor:
        assert aux is None, "one function gives no states between its layers"
        return self._function(self._parameters, batch, kv_cache)


class AdaptableProgram:
    """A program for steps without low-rank adapters, and one for steps with them.

    So adapters take no time in steps that have none.
    """

    def __init__(self, base: Program, adapted: Program) -> None:
        self._base = base
        self._adapted = adapted

    @property
    def has_loops(self) -> bool:
        return self._base.has_loops or self._adapted.has_loops

    @property
    def layers_by_program(self) -> dict[LayerProgram, int]:
        return self._base.layers_by_program

    @property
    def wants_capture(self) -> bool:
        return self._base.wants_capture or self._adapted.wants_capture

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._base.recording(), self._adapted.recording():
            yield

    def __call__(
        self, batch: ForwardBatch, kv_cache: KVCache, aux: AuxStates | None = None
    ) -> Tensor:
        program = self._base if batch.adapter_slots is None else self._adapted
        return program(batch, kv_cache, aux)


class FewRowsCall(NamedTuple):
    """A layer's program for small steps on a GPU."""

    function: Function
    parameters: list[Tensor]
    most_tokens: int  # of a step that runs it


class _Part(NamedTuple):
    """Consecutive layers of a model."""

    first: int
    stop: int
    replay: CpuReplay | None  # None = the layers' functions are called


class LayeredProgram:
    """A model whose layers are functions. The last layer also takes the indices of wanted rows.

    On a GPU, a layer's small steps use its program in `few_calls` in place of that in `calls`. A
    layer without one has None there.

    Once captured, consecutive layers are replayed as one CPU graph in steps of up to 64 tokens, of
    any shape. A layer that cannot be captured is called between the replays. In larger steps
    Python's share is small, and a graph's results, which stay allocated, would be large.
    """

    def __init__(
        self,
        model: LanguageModel,
        calls: Sequence[tuple[Function, list[Tensor]]],
        few_calls: Sequence[FewRowsCall | None] = (),
    ) -> None:
        self._model = model
        self._calls = calls
        # The index of the model's last layer; None = it belongs to a later stage.
        self._last = len(calls) - 1 if model.stage.is_last else None
        # (most tokens, calls), in ascending order
        self._few_calls = [
            (most, _calls_up_to(most, calls, few_calls))
            for most in sorted({few.most_tokens for few in few_calls if few is not None})
        ]
        self._has_pieces = any(
            isinstance(function, FxFunction) and function.pieces for function, _ in calls
        )
        self._has_loops: bool | None = None  # None = not known yet
        self._called = [_Part(0, len(calls), None)]
        self._captured: list[_Part] | None = None  # None = nothing was recorded yet
        self._captured_cache: KVCache | None = None  # the CPU graphs hold its addresses
        self._is_recording = False

    @property
    def has_loops(self) -> bool:
        # If a CPU graph can hold a layer, the layer runs only this package's kernels, in every
        # step. Larger steps run them without a graph.
        if self._has_loops is None:
            self._has_loops = self._has_pieces or not all(
                self._is_capturable(index, {}) for index in range(len(self._calls))
            )
        return self._has_loops

    @property
    def layers_by_program(self) -> dict[LayerProgram, int]:
        counts: Counter[LayerProgram] = Counter()
        for first, stop, replay in self._captured or self._called:
            if replay is not None:
                counts[LayerProgram.captured] += stop - first
            else:
                counts.update(_form_of(function) for function, _ in self._calls_of(1)[first:stop])
        return dict(counts)

    @property
    def wants_capture(self) -> bool:
        return self._captured is None

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def __call__(
        self, batch: ForwardBatch, kv_cache: KVCache, aux: AuxStates | None = None
    ) -> Tensor:
        hidden, step = self._model.begin(batch)
        if self._is_recording and self._captured is None:
            shown = frozenset[int]() if aux is None else aux.layers
            self._captured = self._capture(hidden, step, kv_cache, shown)
            self._captured_cache = kv_cache
        for part in self._parts_for(kv_cache, hidden):
            if part.replay is not None:
                if aux is not None:
                    aux.see(part.first, hidden)
                hidden = part.replay(hidden, step)
            else:
                hidden = self._call(part, hidden, step, kv_cache, aux)
        return self._model.finish(hidden)

    def _parts_for(self, kv_cache: KVCache, hidden: Tensor) -> list[_Part]:
        """The parts with captured graphs if they fit this cache and step, else those without."""
        if (
            self._captured is None
            or self._captured_cache is not kv_cache
            or hidden.shape[0] > CAPTURED_TOKENS
        ):
            return self._called
        return self._captured

    def _call(
        self,
        part: _Part,
        hidden: Tensor,
        step: StepInputs,
        kv_cache: KVCache,
        aux: AuxStates | None,
    ) -> Tensor:
        """hidden [T, D] -> [T, D], or [R, D] of the wanted rows after the model's last layer."""
        calls = self._calls_of(hidden.shape[0])
        for index in range(part.first, part.stop):
            if aux is not None:
                aux.see(index, hidden)
            function, parameters = calls[index]
            rows = (step.tensors.logits_indices,) if index == self._last else ()
            hidden = function(parameters, hidden, step, *kv_cache[index], *rows)
        return hidden.contiguous()

    def _calls_of(self, num_tokens: int) -> Sequence[tuple[Function, list[Tensor]]]:
        """The layers' programs of a step."""
        for most, calls in self._few_calls:
            if num_tokens <= most:
                return calls
        return self._calls

    def _capture(
        self, hidden: Tensor, step: StepInputs, kv_cache: KVCache, shown: frozenset[int]
    ) -> list[_Part]:
        """Record each run of layers that can be captured; the log says why others cannot.

        A layer whose input is shown to `AuxStates` begins a part, because the states between the
        layers of a CPU graph are overwritten.
        """
        reasons: dict[str, list[int]] = {}
        parts: list[_Part] = []
        for (is_captured, _), indices in groupby(
            range(len(self._calls)),
            lambda index: (
                self._is_capturable(index, reasons),
                sum(first <= index for first in shown),
            ),
        ):
            first, *rest = indices
            stop = first + 1 + len(rest)
            replay = None
            if is_captured:
                calls = self._calls[first:stop]
                layers = [
                    LayerCall(f, weights) for f, weights in calls if isinstance(f, FxFunction)
                ]
                replay = capture_layers(
                    layers, kv_cache[first:stop], hidden, step, has_last=stop - 1 == self._last
                )
            parts.append(_Part(first, stop, replay))
        for reason, found in reasons.items():
            _LOG.info("%s not captured: %s", _in_words(found), reason)
        return parts

    def _is_capturable(self, index: int, reasons: dict[str, list[int]]) -> bool:
        """Whether a CPU graph can hold a layer; if not, the layer's index is added to `reasons`."""
        function, parameters = self._calls[index]
        if isinstance(function, FxFunction):
            reason = why_not_captured(LayerCall(function, parameters))
        else:
            reason = "Inductor compiled it as a whole"
        if reason is not None:
            reasons.setdefault(reason, []).append(index)
        return reason is None


def _calls_up_to(
    num_tokens: int,
    calls: Sequence[tuple[Function, list[Tensor]]],
    few_calls: Sequence[FewRowsCall | None],
) -> list[tuple[Function, list[Tensor]]]:
    """The layers' programs of a step of `num_tokens` tokens."""
    return [
        call if few is None or num_tokens > few.most_tokens else few[:2]
        for call, few in zip(calls, few_calls, strict=True)
    ]


def _form_of(function: Function) -> LayerProgram:
    return LayerProgram.fx if isinstance(function, FxFunction) else LayerProgram.inductor


def _in_words(indices: Sequence[int]) -> str:
    """ "layer 3 is", "layers 0 to 7 are" for consecutive numbers, or "layers 0, 2, 5 are"."""
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return f"layer {first} is"
    if last - first + 1 == len(indices):
        return f"layers {first} to {last} are"
    return f"layers {', '.join(map(str, indices))} are"
