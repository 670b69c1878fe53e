"""Dynamo's traces hold for steps of all sizes, or are refused with the guard that does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.graphs.compiler.compiled_piece import PieceCompiler
from ostinato.graphs.compiler.dynamo_trace import (
    Example,
    SizeGuardError,
    example_batch,
    trace_fx,
    varying_in_batch,
)
from ostinato.graphs.compiler.functions import compile_function
from ostinato.graphs.compiler.fx_program import FxFunction
from ostinato.models.step_tensors import ForwardBatch
from ostinato.ops.norm import rms_norm
from tests.graphs.toy import make_buffers


def arguments(batch: ForwardBatch) -> tuple[Any, ...]:
    return [torch.ones(8)], torch.randn(len(batch.token_ids), 8), batch


def examples() -> list[Example]:
    found = []
    for is_second in (False, True):
        batch = example_batch(make_buffers().batch(16, 3, 3), is_second=is_second)
        values = arguments(batch)
        found.append(Example(values, [*varying_in_batch(batch), values[1]]))
    return found


SIZES = [
    (lambda tokens, seqs, rows: tokens <= 1000, "x.size()[0] <= 1000"),
    (lambda tokens, seqs, rows: tokens > 10, "x.size()[0] > 10"),  # true in both examples
    (lambda tokens, seqs, rows: tokens == 16, "Eq(x.size()[0], 16)"),
    (lambda tokens, seqs, rows: tokens != 512, "Ne(x.size()[0], 512)"),
    (lambda tokens, seqs, rows: tokens % 8 == 0, "Eq(Mod(x.size()[0], 8), 0)"),
    (lambda tokens, seqs, rows: tokens > seqs, "batch.seq_lens.size()[0]"),
    (lambda tokens, seqs, rows: tokens == seqs, "batch.seq_lens.size()[0]"),
    (lambda tokens, seqs, rows: rows > tokens, "batch.logits_indices.size()[0]"),
    (lambda tokens, seqs, rows: rows > seqs, "batch.logits_indices.size()[0]"),  # true in both
]


@pytest.mark.parametrize(("condition", "guard"), SIZES, ids=[guard for _, guard in SIZES])
@torch.inference_mode()
def test_a_branch_that_depends_on_a_size_is_refused(
    condition: Callable[..., bool], guard: str
) -> None:
    def function(parameters: list[Tensor], x: Tensor, batch: ForwardBatch) -> Tensor:
        sizes = x.shape[0], batch.seq_lens.shape[0], batch.logits_indices.shape[0]
        if condition(*sizes):
            return rms_norm(x, parameters[0], 1e-6)
        return rms_norm(x * 2, parameters[0], 1e-6)

    with pytest.raises(SizeGuardError) as refused:
        trace_fx(function, examples(), PieceCompiler())
    text = str(refused.value)
    assert "it holds only for " in text
    assert guard in text
    assert "test_dynamo_trace.py:" in text, "the error must name the line of the comparison"
    assert text.endswith("or set graphs.mode=eager")


@torch.inference_mode()
def test_a_function_with_such_a_branch_is_not_compiled() -> None:
    def function(parameters: list[Tensor], x: Tensor, batch: ForwardBatch) -> Tensor:
        result = rms_norm(x, parameters[0], 1e-6)
        return result if x.shape[0] <= 1000 else result * 2

    with pytest.raises(SizeGuardError, match=r"x\.size\(\)\[0\] <= 1000"):
        compile_function(function, examples(), None, "layer-0", nn.Module(), PieceCompiler())


@torch.inference_mode()
def test_a_constant_that_was_a_size_is_refused() -> None:
    def function(parameters: list[Tensor], x: Tensor, batch: ForwardBatch) -> Tensor:
        return rms_norm(x.view(16, 8), parameters[0], 1e-6)

    with pytest.raises(SizeGuardError, match=r"16"):
        trace_fx(function, examples(), PieceCompiler())


@pytest.mark.slow  # Inductor compiles; other tests trace layers of families, which have such sizes
@torch.inference_mode()
def test_sizes_that_are_equal_in_all_steps_are_no_obstacle() -> None:
    """Dynamo adds two guards, which hold in all steps.

    x has a row for each token, and query_start_loc has one element more than there are sequences.
    """

    def function(parameters: list[Tensor], x: Tensor, batch: ForwardBatch) -> Tensor:
        ends = batch.query_start_loc[1:] + batch.seq_lens
        rows = x + batch.token_ids[:, None] + 0 * ends.sum()
        return rms_norm(rows, parameters[0], 1e-6)

    program = trace_fx(function, examples(), PieceCompiler()).program
    assert program is not None
    values = arguments(make_buffers().batch(24, 7, 7))
    torch.testing.assert_close(FxFunction(program)(*values), function(*values))
