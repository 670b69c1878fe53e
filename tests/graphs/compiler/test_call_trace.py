"""A recorded program makes the calls that Dynamo traces; what is not recorded, Dynamo traces."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.graphs.compiler.call_trace import trace_calls
from ostinato.graphs.compiler.compile import _layer_call
from ostinato.graphs.compiler.compiled_piece import PieceCompiler
from ostinato.graphs.compiler.dynamo_trace import (
    Example,
    example_batch,
    module_tensors,
    trace_fx,
    varying_in_layer,
    without_weights,
)
from ostinato.graphs.compiler.functions import compile_function
from ostinato.graphs.compiler.fx_program import FxFunction, FxProgram
from ostinato.models.base import LanguageModel
from ostinato.models.step_tensors import ForwardBatch, StepInputs, given_tensors
from ostinato.ops.norm import rms_norm
from tests.graphs.compiler.test_cpu_capture import packed
from tests.graphs.compiler.test_few_rows import EXPERTS, QWEN3
from tests.graphs.toy import make_buffers


class Value:
    """Stands for a tensor. It logs the calls of its methods."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __getattr__(self, method: str) -> Callable[..., Value]:
        return lambda *arguments: logged(self.log, method, self, *arguments)

    def __getitem__(self, index: int) -> Value:
        return Value(f"{self.name}[{index}]", self.log)


def logged(log: list[str], op: str, *arguments: Any) -> Value:
    names = [each.name if isinstance(each, Value) else repr(each) for each in arguments]
    log.append(f"{op}({', '.join(names)})")
    return Value(f"result {len(log)}", log)


def calls_of(program: FxProgram, parameters: int, step: StepInputs, *, is_last: bool) -> list[str]:
    """The program's calls in order, and its result."""
    log: list[str] = []

    def value(name: str) -> Any:
        return Value(name, log)

    def find(path: str) -> Any:
        if path != "torch":
            return lambda *arguments: logged(log, path, *arguments)
        functional = SimpleNamespace(embedding=lambda *both: logged(log, "embedding", *both))
        return SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(functional=functional))

    def no_piece(piece: object) -> Any:
        raise AssertionError("the program has no pieces")

    tensors = {name: value(name) for name in given_tensors(step.tensors)}
    rope = {
        kind: type(rows)(*(value(f"{kind} {index}") for index in range(len(rows))))
        for kind, rows in step.rope.items()
    }
    inputs = StepInputs(rope, type(step.tensors)(**tensors))
    rows = (tensors["logits_indices"],) if is_last else ()
    result = FxFunction(program).bind(find, no_piece)(
        [value(f"parameter {index}") for index in range(parameters)],
        value("hidden"),
        inputs,
        value("k"),
        value("v"),
        *rows,
    )
    return [*log, result.name]


def layer_examples(
    model: LanguageModel, caches: tuple[Tensor, Tensor], index: int
) -> list[Example]:
    parameters = list(module_tensors(model.layers[index]).values())
    batch = make_buffers().batch(16, 3, 3)
    examples = []
    for is_second in (False, True):
        hidden, step = model.begin(example_batch(batch, is_second=is_second))
        rows = (step.tensors.logits_indices,) if index == len(model.layers) - 1 else ()
        arguments = (parameters, hidden, step, *caches, *rows)
        examples.append(Example(arguments, varying_in_layer(hidden, step)))
    return examples


@pytest.mark.parametrize(
    "values",
    [{}, {"model__config": QWEN3}, {"model__config": EXPERTS}],
    ids=["llama", "qwen3", "experts"],
)
@torch.inference_mode()
def test_the_calls_are_those_that_dynamo_traces(values: dict[str, Any]) -> None:
    model, spec = packed(**values)
    caches = spec.allocate(4, torch.device("cpu"))[0]
    for index in (0, len(model.layers) - 1):
        is_last = index == len(model.layers) - 1
        layer = model.layers[index]
        names = list(module_tensors(layer))
        function = _layer_call(without_weights(layer), names, is_last=is_last)
        examples = layer_examples(model, caches, index)
        recorded = trace_calls(function, examples, PieceCompiler()).program
        traced = trace_fx(function, examples, PieceCompiler()).program
        assert recorded is not None
        assert traced is not None
        step = examples[0].arguments[2]
        assert recorded.obstacle is None
        assert calls_of(recorded, len(names), step, is_last=is_last) == calls_of(
            traced, len(names), step, is_last=is_last
        )


WEIGHT = torch.ones(8)


def scaled_by_size(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1.0 / x.shape[0])


def branching(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-6) if len(x) > 4 else x.view(-1, 8)


def with_torch_op(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-6) * 2


def with_constant(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, WEIGHT, 1e-6)


def with_value(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, float(weight[0]))


def two_results(x: Tensor, weight: Tensor) -> Any:
    return rms_norm(x, weight, 1e-6), x


def with_caught_refusal(x: Tensor, weight: Tensor) -> Tensor:
    result = rms_norm(x, weight, 1e-6)
    with contextlib.suppress(Exception):
        result = result * 2
    return result


def with_caught_keyword(x: Tensor, weight: Tensor) -> Tensor:
    result = rms_norm(x, weight, 1e-6)
    with contextlib.suppress(Exception):
        result = F.linear(input=result, weight=weight.view(1, 8))
    return result


def with_named_input(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(input=rms_norm(x, weight, 1e-6), weight=weight.view(1, 8))


def with_error(x: Tensor, weight: Tensor) -> Tensor:
    raise LookupError("no such layer")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (scaled_by_size, "depends on the sizes"),
        (branching, "depends on the sizes"),
        (with_torch_op, "it calls mul"),
        (with_constant, "it reads a tensor of shape (8,) that is not an argument"),
        (with_value, "it calls"),
        (two_results, "its result is a tuple, not a tensor"),
        (with_caught_refusal, "it calls mul"),
        (with_caught_keyword, "TypeError"),
        (with_named_input, "TypeError"),
        (with_error, "LookupError: no such layer"),
    ],
)
def test_other_functions_are_not_recorded(function: Callable[..., Any], reason: str) -> None:
    examples = [Example((torch.empty(size, 8), torch.ones(8)), []) for size in (3, 5)]
    lowered = trace_calls(function, examples, PieceCompiler())
    assert lowered.program is None
    assert reason in str(lowered.reason)


@pytest.mark.parametrize(
    "number",
    [
        lambda tokens, seqs, rows: tokens > 1000,
        lambda tokens, seqs, rows: seqs >= 32,
        lambda tokens, seqs, rows: rows > 256,
        lambda tokens, seqs, rows: rows > tokens,
        lambda tokens, seqs, rows: tokens // 16,
        lambda tokens, seqs, rows: -(-tokens // 32),
        lambda tokens, seqs, rows: tokens % 16,
        lambda tokens, seqs, rows: seqs % 2,
        lambda tokens, seqs, rows: tokens // seqs,
        lambda tokens, seqs, rows: rows - tokens - seqs,
    ],
)
def test_a_number_that_follows_from_sizes_is_noticed(number: Callable[..., int]) -> None:
    def function(x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        sizes = len(batch.token_ids), len(batch.seq_lens), len(batch.logits_indices)
        return rms_norm(x, weight, float(number(*sizes)))

    batch = make_buffers().batch(16, 2, 2)
    examples = []
    for is_second in (False, True):
        step = example_batch(batch, is_second=is_second)
        hidden = torch.empty(len(step.token_ids), 8)
        examples.append(Example((hidden, torch.ones(8), step), []))
    lowered = trace_calls(function, examples, PieceCompiler())
    assert lowered.program is None
    assert "depends on the sizes" in str(lowered.reason)


@torch.inference_mode()
def test_dynamo_traces_what_is_not_recorded_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def function(parameters: list[Tensor], rows: Tensor) -> Tensor:
        found = F.embedding(rows, parameters[0], padding_idx=0)
        return rms_norm(found, parameters[1], 1e-6)

    parameters = [torch.randn(4, 8), torch.ones(8)]
    examples = []
    for size in (3, 1000):
        rows = torch.arange(size) % 4
        examples.append(Example((parameters, rows), [rows]))
    with caplog.at_level(logging.INFO):
        compiled = compile_function(
            function, examples, None, "layer-0", nn.Module(), PieceCompiler()
        )
    assert isinstance(compiled, FxFunction)
    assert "Dynamo traces layer-0, because its calls cannot be recorded: TypeError" in caplog.text
    rows = torch.tensor([3, 0, 2, 1, 0])
    assert torch.equal(compiled(parameters, rows), function(parameters, rows))


def test_views_lookups_and_products_are_recorded() -> None:
    def function(x: Tensor, weights: dict[str, list[Tensor]], rows: Tensor) -> Tensor:
        first, second = x.view(-1, 2, 8).split_with_sizes((1, 1), 1)
        assert first.shape == (len(x), 1, 8)
        assert first.dtype is x.dtype
        assert second.device == x.device
        (weight,) = weights["up"]
        return F.embedding(rows, F.linear(second.reshape(x.size(0) * 0 - 1, 8), weight))

    weight = torch.randn(4, 8)

    def arguments(size: int, rows: int) -> tuple[Any, ...]:
        return torch.randn(size, 16), {"up": [weight]}, torch.arange(rows)

    examples = [Example(arguments(3, 1), []), Example(arguments(6, 2), [])]
    program = trace_calls(function, examples, PieceCompiler()).program
    assert program is not None
    assert program.obstacle == "torch.nn.functional.linear has no C++ kernel here"
    values = arguments(7, 5)
    assert torch.equal(FxFunction(program)(*values), function(*values))
