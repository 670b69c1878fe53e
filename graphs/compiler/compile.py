"""Compiles a model, as one graph or layer by layer.

Both forms compute the same results. In the form `model`, `begin`, every layer and `finish` are one
graph. In the form `layer`, each kind of decoder layer is traced once and called at every depth with
its weights as arguments, so compile time does not grow with depth. The last layer is traced apart,
because it gives the wanted rows only. Both forms are `fullgraph`, dynamic in tokens, sequences and
rows, and are called without Dynamo's guards: the tensors of a step always come from the same static
buffers, and evaluating guards costs 0.3-2 ms a step.

`call_trace` traces layers that call only ops of this package, `dynamo_trace` all others.
`functions` compiles and stores the traces. `programs` binds functions to weights and runs them once
a step. Apart from the benchmarks, no other package changes settings of Dynamo or Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ostinato.conf.environment import prepare_compiler
from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compiled_piece import PieceCompiler
from ostinato.graphs.compiler.dynamo_trace import (
    Example,
    example_batch,
    module_tensors,
    varying_in_batch,
    varying_in_layer,
    without_weights,
)
from ostinato.graphs.compiler.functions import (
    Function,
    ProgramStore,
    compile_function,
    stored_function,
)
from ostinato.graphs.compiler.programs import (
    AdaptableProgram,
    FewRowsCall,
    LayeredProgram,
    Program,
    WholeProgram,
)
from ostinato.models.base import DecoderLayer, FewRows, LanguageModel
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import ForwardBatch, StepInputs

__all__ = ("Binder", "compile_model")

Binder = Callable[[LanguageModel], Program]
"""Gives a compiled program the weights of a model that has the structure of the traced model."""

Parameters = list[Tensor]


def compile_model(
    model: LanguageModel,
    form: GraphForm,
    example: ForwardBatch,
    kv_cache: KVCache,
    store: ProgramStore | None = None,
) -> Binder:
    """Compile `model` for any number of tokens and sequences.

    Args:
        model: its code and its weights' shapes and layouts are traced. The values of the weights do
            not matter, so tracing can run while they are loaded. On a CPU it has the layers of all
            stages, so that every stage finds its programs. On a GPU it has those of its stage.
        form: whole model or layer by layer.
        example: a batch of at least 2 tokens and 2 sequences (Dynamo takes the sizes 0 and 1 for
            constants). It is traced, not run. If it has `adapter_slots`, two programs are compiled:
            one for steps with low-rank adapters, and one for steps without them.
        kv_cache: a cache of any number of blocks, of a stage's layers. It is traced, not written.
        store: may have compiled functions of an earlier start; new ones are put there.

    Returns:
        A function that binds the program to a loaded model (or to a stage of it, if the form is
        layer by layer). The bound program gives the results of that model's `forward`. It reads the
        weights at every call and never copies them; they must be in their final place when it is
        bound.

    Raises:
        SizeGuardError: the model compares a size that differs between steps.
    """
    prepare_compiler(kernel_pool=example.token_ids.device.type != "cpu")
    compile_one = _compile_whole if form is GraphForm.model else _compile_layers
    if example.adapter_slots is None:
        return compile_one(model, example, kv_cache, store)
    base = compile_one(model, replace(example, adapter_slots=None), kv_cache, store)
    adapted = compile_one(model, example, kv_cache, store)
    return lambda model: AdaptableProgram(base(model), adapted(model))


def _compile_whole(
    model: LanguageModel, example: ForwardBatch, kv_cache: KVCache, store: ProgramStore | None
) -> Binder:
    skeleton = without_weights(model)
    tensors = module_tensors(model)
    names = list(tensors)

    def forward(
        parameters: Parameters, batch: ForwardBatch, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        return torch.func.functional_call(
            skeleton, dict(zip(names, parameters, strict=True)), (batch, cache), tie_weights=False
        )

    name = f"model{_suffix(example)}"
    compiled = stored_function(store, name, skeleton)
    if compiled is None:
        cache = _separate(kv_cache)
        examples = [
            Example((list(tensors.values()), batch, cache), varying_in_batch(batch))
            for batch in _example_batches(example)
        ]
        compiled = compile_function(forward, examples, store, name, skeleton, PieceCompiler())

    def bind(model: LanguageModel) -> Program:
        parameters = list(module_tensors(model).values())
        return WholeProgram(compiled, parameters, len(model.layers))

    return bind


def _compile_layers(
    model: LanguageModel, example: ForwardBatch, kv_cache: KVCache, store: ProgramStore | None
) -> Binder:
    """Compile a function for each kind of layer, and one for the last layer.

    Most models have one kind of layer.
    """

    def layer_inputs() -> list[tuple[Tensor, StepInputs]]:
        return [model.begin(batch) for batch in _example_batches(example)]

    # The fused kernels for few rows add no adapters.
    has_few = example.token_ids.device.type == "cuda" and example.adapter_slots is None
    compiled: dict[tuple[object, ...], Function] = {}
    few: dict[tuple[object, ...], Function] = {}
    pieces = PieceCompiler()
    last = _last_layer(model)
    for index, layer in enumerate(model.layers):
        key = (index == last, *_static_key(layer))
        if key in compiled:
            continue
        # The caches of layers differ at most in numbers of blocks and tokens of a block, which no
        # program depends on.
        number, is_last = _first_layer(model) + index, index == last
        name = f"layer-{number}{_suffix(example)}"
        traced = _Traced(layer, layer_inputs, kv_cache[0], name, is_last)
        compiled[key] = traced.compile(store, pieces)
        fused = _few_rows(layer) if has_few else None
        if fused is not None:
            name = f"{name}-few-rows"
            traced = _Traced(fused, layer_inputs, kv_cache[0], name, is_last)
            few[key] = traced.compile(store, pieces, calls_own_ops=True)

    def bind(model: LanguageModel) -> Program:
        last = _last_layer(model)
        keys = [(index == last, *_static_key(layer)) for index, layer in enumerate(model.layers)]
        calls = [
            (compiled[key], list(module_tensors(layer).values()))
            for key, layer in zip(keys, model.layers, strict=True)
        ]
        few_calls = [
            FewRowsCall(few[key], list(module_tensors(fused).values()), fused.most_tokens)
            if key in few and (fused := _few_rows(layer)) is not None
            else None
            for key, layer in zip(keys, model.layers, strict=True)
        ]
        return LayeredProgram(model, calls, few_calls)

    return bind


def _separate(kv_cache: KVCache) -> list[tuple[Tensor, Tensor]]:
    """The caches to trace with. Layers that share memory get tensors of their own, of two blocks.

    Compilers replace inputs that share memory by views of one input. The layers of a model write
    different blocks, and each waits for the result of the one before, so nothing depends on the
    memory that they share.
    """
    if len(kv_cache.pages) == 2 * len(kv_cache):
        return list(kv_cache)
    return [
        (k_cache.new_empty((2, *k_cache.shape[1:])), v_cache.new_empty((2, *v_cache.shape[1:])))
        for k_cache, v_cache in kv_cache
    ]


def _suffix(example: ForwardBatch) -> str:
    """The end of the names of stored functions."""
    return "" if example.adapter_slots is None else "-adapters"


def _example_batches(batch: ForwardBatch) -> list[ForwardBatch]:
    return [example_batch(batch), example_batch(batch, is_second=True)]


def _last_layer(model: LanguageModel) -> int | None:
    """The index of the layer that gets the wanted rows; None = it belongs to a later stage."""
    return len(model.layers) - 1 if model.stage.is_last else None


def _first_layer(model: LanguageModel) -> int:
    """The number of a stage's first layer in the whole model.

    On a GPU each stage traces its own layers. On a CPU the layers of all stages are traced.
    """
    layers = model.stage.layers
    return 0 if layers is None else layers.start


@dataclass(frozen=True, slots=True)
class _Traced:
    """A layer as a function of its parameters and a step, with the arguments to trace it with."""

    layer: nn.Module
    inputs: Callable[[], list[tuple[Tensor, StepInputs]]]  # returns those of two example steps
    cache: tuple[Tensor, Tensor]
    name: str  # in the store
    is_last: bool  # its function takes the indices of the wanted rows, too

    def compile(
        self, store: ProgramStore | None, pieces: PieceCompiler, *, calls_own_ops: bool = False
    ) -> Function:
        """The stored or compiled function; arguments as for `compile_function`."""
        skeleton = without_weights(self.layer)
        stored = stored_function(store, self.name, skeleton)
        if stored is not None:
            return stored
        names = list(module_tensors(self.layer))
        return compile_function(
            _layer_call(skeleton, names, is_last=self.is_last),
            [self._example(hidden, step) for hidden, step in self.inputs()],
            store,
            self.name,
            skeleton,
            pieces,
            calls_own_ops=calls_own_ops,
        )

    def _example(self, hidden: Tensor, step: StepInputs) -> Example:
        parameters = list(module_tensors(self.layer).values())
        rows = (step.tensors.logits_indices,) if self.is_last else ()
        arguments = (parameters, hidden, step, *self.cache, *rows)
        return Example(arguments, varying_in_layer(hidden, step))


def _few_rows(layer: nn.Module) -> FewRows | None:
    assert isinstance(layer, DecoderLayer), f"{type(layer).__name__} is not a DecoderLayer"
    return layer.few_rows()


def _layer_call(skeleton: nn.Module, names: list[str], *, is_last: bool) -> Function:
    """A layer as a function of its inputs and its tensors, whose names are `names`."""

    def all_tokens(
        parameters: Parameters, hidden: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        return torch.func.functional_call(
            skeleton, dict(zip(names, parameters, strict=True)), (hidden, step, k_cache, v_cache)
        )

    def wanted_rows(
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

    return wanted_rows if is_last else all_tokens


def _static_key(layer: nn.Module) -> tuple[object, ...]:
    assert isinstance(layer, DecoderLayer), f"{type(layer).__name__} is not a DecoderLayer"
    return layer.static_key()
