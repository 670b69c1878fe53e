"""Tracing a model into compiled programs; the only place that touches dynamo or inductor settings.

Two forms of the same program. `model`: begin, every layer and finish as one graph. `layer`: the
decoder layer traced once and called for every depth with its weights as arguments, so that compile
time does not grow with depth. Both are `fullgraph`, dynamic in the token and sequence dimensions,
and are called without Dynamo's guards: a step's tensors always come from the same static buffers,
and evaluating guards costs 0.3-2 ms a step.

A traced graph that is nothing but our own ops (CPUs) runs as it is (graphs/fx_program.py), in small
steps from a tape (graphs/replay.py); anything else goes to Inductor. Programs are stored for the
next start.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from ostinato.conf.environment import prepare_compiler
from ostinato.conf.schema import GraphForm
from ostinato.graphs.fx_program import FxProgram, lower_fx
from ostinato.graphs.replay import LayerCall, Replay, record
from ostinato.models.base import DecoderLayer, LanguageModel
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import ForwardBatch, Size, StepInputs, tensor_specs

__all__ = ("Binder", "Program", "ProgramStore", "compile_model")


class Program(Protocol):
    """A compiled model with its weights."""

    @property
    def has_loops(self) -> bool:
        """Whether there may be parallel loops in it besides those of our own kernels."""
        ...

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Hidden [R, D] of `batch.logits_indices`; writes K and V of all tokens."""
        ...


Binder = Callable[[LanguageModel], Program]
"""Gives a compiled program the weights of a model with the traced one's structure."""

_INDUCTOR_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    # These would check, on every call of every layer, what the static buffers guarantee.
    "size_asserts": False,
    # Ask for the number of threads at every loop, so that graphs/threads.py can change it.
    "cpp.dynamic_threads": True,
    # Believe the processor's flags: compiling and running a probe for each instruction set costs
    # ten seconds of a first start.
    "cpp.vec_isa_ok": True,
}

Parameters = list[Tensor]
Function = Callable[..., Any]

_LOG = logging.getLogger(__name__)

_REPLAYED_TOKENS = 64  # of the largest step that is played from a tape

# The first byte of a stored program.
_STRAIGHT, _INDUCTOR = b"s", b"i"
_SKELETON = "skeleton"  # what a stored program is given by name: the module without weights


class ProgramStore(Protocol):
    """Keeps compiled programs from one start to the next (graphs/bundle.py)."""

    def get(self, name: str) -> bytes | None:
        """What was put under this name, None when nothing was."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` for the next start."""
        ...

    def reject(self, reason: str) -> None:
        """Distrust all that is there."""
        ...


def compile_model(
    model: LanguageModel,
    form: GraphForm,
    example: ForwardBatch,
    kv_cache: KVCache,
    store: ProgramStore | None = None,
) -> Binder:
    """Compile `model` for any number of tokens and sequences.

    Args:
        model: its code and its weights' shapes and layouts are traced. What the weights hold does
            not matter, so that tracing need not wait for loading.
        form: whole model or layer by layer.
        example: a batch of at least 2 tokens and 2 sequences (0 and 1 would be taken for
            constants). It is traced, not run.
        kv_cache: a cache of any number of blocks. It is traced, not written.
        store: where programs of an earlier start may be, and this one's are put.

    Returns:
        A function from a loaded model to a program with the results of that model's `forward`. The
        program reads the weights at every call and never copies them; they must be in their final
        place when it is bound.
    """
    prepare_compiler(kernel_pool=example.token_ids.device.type != "cpu")
    if form is GraphForm.model:
        return _compile_whole(model, example, kv_cache, store)
    return _compile_layers(model, example, kv_cache, store)


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. Plain tensors: a Parameter's class would be guarded on."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _skeleton(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of `module` whose tensors hold no memory: the code to trace, without the weights."""
    memo: dict[int, Any] = {
        id(tensor): torch.nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
        for tensor in module.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


class _Traced(Exception):
    """Carries what came of a graph out of the compiler, which has nothing left to do."""

    def __init__(self, program: FxProgram | None) -> None:
        super().__init__()
        self.program = program


def _trace_straight(function: Function, arguments: tuple[Any, ...]) -> FxProgram | None:
    """`function` as straight-line code, or None when there is something to compile."""

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Function:
        raise _Traced(lower_fx(graph_module, function))

    compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    try:
        compiled.aot_compile((arguments, {}))
    except _Traced as traced:
        return traced.program
    raise AssertionError("the backend always raises")


class _Straight:
    """A straight-line program as a function."""

    def __init__(self, program: FxProgram) -> None:
        self.program = program
        self._function = program.load()

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _compile(
    function: Function,
    arguments: tuple[Any, ...],
    store: ProgramStore | None,
    name: str,
    skeleton: torch.nn.Module,
) -> Function:
    """`function` compiled for `arguments`' shapes, marked dimensions free, as a callable without
    guards.
    """
    if arguments[0][0].device.type == "cpu":
        program = _trace_straight(function, arguments)
        if program is not None:
            if store is not None:
                store.put(name, _STRAIGHT + msgspec.msgpack.encode(program))
            return _Straight(program)
    compiled: Any = torch.compile(  # `aot_compile` is not in its declared type
        function, fullgraph=True, dynamic=False, options=_INDUCTOR_OPTIONS
    )
    result = compiled.aot_compile((arguments, {}))
    if store is not None:
        try:
            data = type(result).serialize(result, {_SKELETON: skeleton}).serialized_data
            store.put(name, _INDUCTOR + data)
        except Exception as error:  # torch promises no type; a start without a store still serves
            _LOG.warning("%s is not kept for the next start: %s", name, error)
    return result.fn


def _load(data: bytes, skeleton: torch.nn.Module) -> Function:
    """What `_compile` stored."""
    kind, content = data[:1], data[1:]
    if kind == _STRAIGHT:
        return _Straight(msgspec.msgpack.decode(content, type=FxProgram))
    if kind != _INDUCTOR:
        raise ValueError(f"a program begins with {_STRAIGHT!r} or {_INDUCTOR!r}, not {kind!r}")
    from torch._dynamo.aot_compile import AOTCompiledFunction

    return AOTCompiledFunction.deserialize(content, external_closure_data={_SKELETON: skeleton}).fn


def _stored(store: ProgramStore | None, name: str, skeleton: torch.nn.Module) -> Function | None:
    data = store.get(name) if store is not None else None
    if store is None or data is None:
        return None
    try:
        return _load(data, skeleton)
    except Exception as error:  # whatever is wrong with it: it is made anew
        store.reject(f"{name} does not load: {type(error).__name__}: {error}")
        return None


def _mark_dynamic(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


def _fresh(batch: ForwardBatch) -> ForwardBatch:
    """Own tensors of the same shapes: marking them leaves no trace on the static buffers."""
    # Sizes that are equal here would be taken for one and the same.
    num_tokens, num_seqs = len(batch.token_ids), len(batch.seq_lens)
    num_rows = num_tokens + num_seqs + 2
    table = type(batch)
    tensors = {name: getattr(batch, name).clone() for name in tensor_specs(table)}
    for name, spec in tensor_specs(table).items():
        if spec.dynamic_size is Size.rows:
            tensors[name] = tensors[name].new_zeros(num_rows, *tensors[name].shape[1:])
    return table(**tensors)


def _mark_batch(batch: ForwardBatch) -> None:
    specs = tensor_specs(type(batch)).items()
    _mark_dynamic([getattr(batch, name) for name, spec in specs if spec.dynamic_size is not None])


def _compile_whole(
    model: LanguageModel, example: ForwardBatch, kv_cache: KVCache, store: ProgramStore | None
) -> Binder:
    skeleton = _skeleton(model)
    tensors = _tensors(model)
    names = list(tensors)

    def forward(parameters: Parameters, batch: ForwardBatch, cache: KVCache) -> Tensor:
        return torch.func.functional_call(
            skeleton, dict(zip(names, parameters, strict=True)), (batch, cache), tie_weights=False
        )

    compiled = _stored(store, "model", skeleton)
    if compiled is None:
        batch = _fresh(example)
        _mark_batch(batch)
        arguments = (list(tensors.values()), batch, kv_cache)
        compiled = _compile(forward, arguments, store, "model", skeleton)

    def bind(model: LanguageModel) -> Program:
        return _WholeProgram(compiled, list(_tensors(model).values()))

    return bind


class _WholeProgram:
    """A model that is one function."""

    has_loops = True

    def __init__(self, function: Function, parameters: list[Tensor]) -> None:
        self._function = function
        self._parameters = parameters

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        return self._function(self._parameters, batch, kv_cache)


def _compile_layer(
    layer: torch.nn.Module,
    example: Callable[[], tuple[Tensor, StepInputs]],
    cache: tuple[Tensor, Tensor],
    store: ProgramStore | None,
    name: str,
    *,
    is_last: bool,
) -> Function:
    skeleton = _skeleton(layer)
    names = list(_tensors(layer))

    def every(
        parameters: Parameters, hidden: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        return torch.func.functional_call(
            skeleton, dict(zip(names, parameters, strict=True)), (hidden, step, k_cache, v_cache)
        )

    def some(
        parameters: Parameters,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor,
    ) -> Tensor:
        return torch.func.functional_call(
            skeleton,
            dict(zip(names, parameters, strict=True)),
            (hidden, step, k_cache, v_cache, rows),
        )

    function = _stored(store, name, skeleton)
    if function is not None:
        return function
    hidden, step = example()
    _mark_batch(step.tensors)
    _mark_dynamic((hidden, *chain.from_iterable(step.rope.values())))
    arguments = (list(_tensors(layer).values()), hidden, step, *cache)
    if not is_last:
        return _compile(every, arguments, store, name, skeleton)
    arguments = (*arguments, step.tensors.logits_indices)
    return _compile(some, arguments, store, name, skeleton)


def _compile_layers(
    model: LanguageModel, example: ForwardBatch, kv_cache: KVCache, store: ProgramStore | None
) -> Binder:
    """One compiled function per distinct kind of layer (nearly always one), one for the last."""

    def layer_inputs() -> tuple[Tensor, StepInputs]:
        return model.begin(_fresh(example))

    compiled: dict[tuple[object, ...], Function] = {}
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        key = (index == last, *_kind(layer))
        if key not in compiled:
            compiled[key] = _compile_layer(
                layer, layer_inputs, kv_cache[index], store, f"layer-{index}", is_last=index == last
            )

    def bind(model: LanguageModel) -> Program:
        return _LayeredProgram(
            model,
            [
                (compiled[(index == last, *_kind(layer))], list(_tensors(layer).values()))
                for index, layer in enumerate(model.layers)
            ],
        )

    return bind


class _LayeredProgram:
    """A model whose layers are functions, the last of which takes the wanted rows besides.

    In small steps the layers are played from a tape, made at the first of them. In larger ones
    Python is a small share, and a tape's results, which lie in memory of its own, would be large.
    """

    def __init__(
        self, model: LanguageModel, calls: Sequence[tuple[Function, list[Tensor]]]
    ) -> None:
        self._model = model
        self._calls = calls
        self._is_recordable = all(isinstance(function, _Straight) for function, _ in calls)
        self._replay: Replay | None = None

    @property
    def has_loops(self) -> bool:
        return self._replay is None  # a tape holds nothing but calls of our kernels

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        hidden, step = self._model.begin(batch)
        replay = self._find_replay(kv_cache, hidden, step)
        if replay is not None:
            return self._model.finish(replay(hidden, step))
        *calls, (finish, last_parameters) = self._calls
        for (function, parameters), (k_cache, v_cache) in zip(calls, kv_cache, strict=False):
            hidden = function(parameters, hidden, step, k_cache, v_cache)
        hidden = finish(last_parameters, hidden, step, *kv_cache[-1], batch.logits_indices)
        return self._model.finish(hidden)

    def _find_replay(self, kv_cache: KVCache, hidden: Tensor, step: StepInputs) -> Replay | None:
        """The tape for this cache; None when the functions must be called."""
        if not self._is_recordable or len(hidden) > _REPLAYED_TOKENS:
            return None
        if self._replay is None or self._replay.kv_cache is not kv_cache:
            layers = [
                LayerCall(function.program, parameters)
                for function, parameters in self._calls
                if isinstance(function, _Straight)
            ]
            self._replay = record(layers, kv_cache, hidden, step)
            self._is_recordable = self._replay is not None
        return self._replay


def _kind(layer: torch.nn.Module) -> tuple[object, ...]:
    assert isinstance(layer, DecoderLayer), f"{type(layer).__name__} is not a DecoderLayer"
    return layer.static_key()
