"""Tracing a model into compiled programs; the only place that touches dynamo or inductor settings.

Two forms of the same program. `model`: begin, every layer and finish as one graph. `layer`: the
decoder layer traced once and called for every depth with its weights as arguments, so that compile
time does not grow with depth. Both are `fullgraph`, dynamic in the token and sequence dimensions,
and are called without Dynamo's guards: a step's tensors always come from the same static buffers,
and evaluating guards costs 0.3-2 ms a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.conf.environment import without_kernel_pool
from ostinato.conf.schema import GraphForm
from ostinato.models.base import CausalLM, DecoderLayer, ForwardBatch, KVCache, StepInputs
from ostinato.ops.attention import AttentionMetadata

__all__ = ("Binder", "Program", "compile_model")

Program = Callable[[ForwardBatch, KVCache], Tensor]
"""(batch, kv_cache) -> hidden [T, D], writing K and V into the cache."""

Binder = Callable[[CausalLM], Program]
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


def compile_model(
    model: CausalLM, form: GraphForm, example: ForwardBatch, kv_cache: KVCache
) -> Binder:
    """Compile `model` for any number of tokens and sequences.

    Args:
        model: its code and its weights' shapes and layouts are traced. What the weights hold does
            not matter, so that tracing need not wait for loading.
        form: whole model or layer by layer.
        example: a batch of at least 2 tokens and 2 sequences (0 and 1 would be taken for
            constants). It is traced, not run.
        kv_cache: the final cache. Compiling against another size first would make its sizes
            symbolic, and a mutated view with symbolic sizes is miscompiled (docs/design.md).

    Returns:
        A function from a loaded model to a program with the results of that model's `forward`. The
        program reads the weights at every call and never copies them; they must be in their final
        place when it is bound.
    """
    if example.token_ids.device.type == "cpu":
        without_kernel_pool()
    if form is GraphForm.model:
        return _compile_whole(model, example, kv_cache)
    return _compile_layers(model, example, kv_cache)


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


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """`function` compiled for `arguments`' shapes, marked dimensions free, as a callable without
    guards.
    """
    compiled: Any = torch.compile(  # `aot_compile` is not in its declared type
        function, fullgraph=True, dynamic=False, options=_INDUCTOR_OPTIONS
    )
    return compiled.aot_compile((arguments, {})).fn


def _mark_dynamic(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


def _fresh(batch: ForwardBatch) -> ForwardBatch:
    """Own tensors of the same shapes: marking them leaves no trace on the static buffers."""
    attention = batch.attention
    return ForwardBatch(
        batch.token_ids.clone(),
        batch.positions.clone(),
        AttentionMetadata(*(tensor.clone() for tensor in attention)),
    )


def _mark_batch(attention: AttentionMetadata, tokens: Sequence[Tensor]) -> None:
    _mark_dynamic(
        (
            *tokens,
            attention.slot_mapping,
            attention.query_start_loc,
            attention.seq_lens,
            attention.block_table,
        )
    )


def _compile_whole(model: CausalLM, example: ForwardBatch, kv_cache: KVCache) -> Binder:
    skeleton = _skeleton(model)
    tensors = _tensors(model)
    names = list(tensors)

    def forward(parameters: Parameters, batch: ForwardBatch, cache: KVCache) -> Tensor:
        return torch.func.functional_call(
            skeleton, dict(zip(names, parameters, strict=True)), (batch, cache), tie_weights=False
        )

    batch = _fresh(example)
    _mark_batch(batch.attention, (batch.token_ids, batch.positions))
    compiled = _compile(forward, (list(tensors.values()), batch, kv_cache))

    def bind(model: CausalLM) -> Program:
        values = list(_tensors(model).values())
        return lambda batch, kv_cache: compiled(values, batch, kv_cache)

    return bind


def _compile_layer(
    layer: torch.nn.Module, hidden: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor
) -> Callable[..., Tensor]:
    skeleton = _skeleton(layer)
    names = list(_tensors(layer))

    def forward(
        parameters: Parameters, hidden: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        return torch.func.functional_call(
            skeleton, dict(zip(names, parameters, strict=True)), (hidden, step, k_cache, v_cache)
        )

    _mark_batch(step.attention, (hidden, step.cos, step.sin))
    return _compile(forward, (list(_tensors(layer).values()), hidden, step, k_cache, v_cache))


def _compile_layers(model: CausalLM, example: ForwardBatch, kv_cache: KVCache) -> Binder:
    """One compiled function per distinct kind of layer (nearly always one)."""
    hidden, step = model.begin(example)
    compiled: dict[tuple[object, ...], Callable[..., Tensor]] = {}
    for layer, (k_cache, v_cache) in zip(model.layers, kv_cache, strict=True):
        key = _kind(layer)
        if key not in compiled:
            fresh = StepInputs(
                step.cos.clone(),
                step.sin.clone(),
                AttentionMetadata(*(tensor.clone() for tensor in step.attention)),
            )
            compiled[key] = _compile_layer(layer, hidden.clone(), fresh, k_cache, v_cache)

    def bind(model: CausalLM) -> Program:
        calls = [(compiled[_kind(layer)], list(_tensors(layer).values())) for layer in model.layers]

        def program(batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
            hidden, step = model.begin(batch)
            for (function, parameters), (k_cache, v_cache) in zip(calls, kv_cache, strict=True):
                hidden = function(parameters, hidden, step, k_cache, v_cache)
            return model.finish(hidden)

        return program

    return bind


def _kind(layer: torch.nn.Module) -> tuple[object, ...]:
    assert isinstance(layer, DecoderLayer), f"{type(layer).__name__} is not a DecoderLayer"
    return layer.static_key()
