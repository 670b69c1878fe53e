"""The logits of a position have the same bits in every step that computes it.

The steps compute the position alone or among up to 32 sequences, as one of 1 to 64 positions, in
any chunk of a prompt, after a prefix hit or a preemption, and with 1 or 2 threads. Speculation and
`runtime.determinism` rely on equal bits. The project's CPU kernels give equal bits. PyTorch's
matrix products do not. tests/runtime/client/test_recovery.py tests the same after crashes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from tests.ops.kernel_checks import EACH_LEVEL
from tests.runtime.sampling.row_bits import (
    FORMS,
    Life,
    SomeSequences,
    check_sequence,
    make_llm,
    sequence_lives,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=FORMS)
def sequences(request: pytest.FixtureRequest) -> SomeSequences:
    return SomeSequences(make_llm(request.param))


@settings(max_examples=12)
@given(life=sequence_lives())
def test_a_position_has_the_same_bits_in_every_step(sequences: SomeSequences, life: Life) -> None:
    check_sequence(sequences, life)


def test_positions_differ(sequences: SomeSequences) -> None:
    assert len({row.numpy().tobytes() for row in sequences.logits}) == len(sequences.logits)
    assert bool(torch.isfinite(sequences.logits).all())


@pytest.mark.slow  # 20 seconds a level; tests/ops compares the kernels of all levels in every run
@pytest.mark.parametrize("level", EACH_LEVEL[1:])
def test_on_the_other_instruction_sets(level: str) -> None:
    """Each level has a process of its own, because a process uses one instruction set only."""
    program = [sys.executable, "-m", "tests.runtime.sampling.row_bits", level]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line.split()[1] for line in run.stdout.splitlines()] == [f"{form}:" for form in FORMS]
