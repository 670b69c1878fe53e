"""A sequence's logits in steps of every kind have the bits that they have in plain chunks.

`test_row_bits.py` imports this module for the processor's best instruction set. For each other
instruction set it runs this module as a program, with the name of the instruction set.
"""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import LLM
from ostinato.ops.native import instruction_sets
from ostinato.ops.native.library import loaded_isa, set_pool_threads
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput
from tests.runtime.tiny import MODEL, tiny_config

__all__ = ("FORMS", "SomeSequences", "check_sequence", "make_llm", "sequence_lives")

FORMS = ("float32", "bfloat16", "int8", "int4", "int8-cache")
BLOCK_SIZE = 8
LENGTH = 300  # length of the sequence: more than one partition of keys
MAX_NUM_SEQS = 32
MAX_NUM_TOKENS = 96
# The MLP is wider than one pass of the linear kernels. A context can have two partitions of keys.
WIDE = {**MODEL, "intermediate_size": 1536, "max_position_embeddings": 512}
_BLOCKS = -(-LENGTH // BLOCK_SIZE)


class Chunk(NamedTuple):
    """One step of the sequence."""

    count: int  # positions
    num_logits: int  # logits are computed for the last `num_logits` positions
    beside: int  # other sequences, which decode in the same step
    is_last: bool  # whether the other sequences come before this one in the step


class Life(NamedTuple):
    """The sequence from its admission, possibly after a prefix hit or a preemption."""

    num_cached: int  # blocks of an earlier computation that it shares
    threads: int
    has_pool: bool  # the project's thread pool instead of torch's threads
    chunks: list[Chunk]


def make_llm(form: str) -> LLM:
    """A tiny engine with weights of this form."""
    settings = {
        "float32": ["model.dtype=float32"],
        "int8": ["model.quantization=int8"],
        "int4": ["model.quantization=int4"],
        "int8-cache": ["cache.dtype=int8"],
    }
    return LLM(
        config=tiny_config(
            "model.dtype=bfloat16",
            *settings.get(form, []),
            f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
            f"scheduler.max_num_batched_tokens={MAX_NUM_TOKENS}",
            "scheduler.overlap=false",
            f"cache.block_size={BLOCK_SIZE}",
            "cache.memory_gib=0.05",
            model__config=WIDE,
        )
    )


class SomeSequences:
    """Runs steps of one sequence beside others, and keeps the logits of its first computation.

    The first blocks belong to the first computation of the sequence. Then come blocks for later
    computations, and one block for each other sequence.
    """

    def __init__(self, llm: LLM) -> None:
        self._runner: ModelRunner = llm._engine._executor._runner
        numbers = random.Random(3)
        self.token_ids = [numbers.randrange(3, 300) for _ in range(LENGTH)]
        self._request = Request(
            request_id="r", prompt_token_ids=self.token_ids, sampling=SamplingParams()
        )
        for row in range(1, MAX_NUM_SEQS):
            self._runner._batch.admit(row, self._request, [])
            block = 2 * _BLOCKS + row
            length = 1 + row % BLOCK_SIZE
            self._run(
                [ScheduledSequence(row, 0, length, self.token_ids[row:][:length], [block], 1)]
            )
        self._block_ids = list(range(1, 1 + _BLOCKS))
        self._admit(self._block_ids)
        parts = [
            self.step(start, min(MAX_NUM_SEQS, LENGTH - start)) for start in range(0, LENGTH, 32)
        ]
        self.logits = torch.cat(parts)  # [LENGTH, V]

    def begin(self, num_cached: int) -> None:
        """Admit the sequence with `num_cached` blocks of its first computation."""
        own = range(1 + _BLOCKS, 1 + 2 * _BLOCKS - num_cached)
        self._admit([*self._block_ids[:num_cached], *own])

    def step(
        self,
        start: int,
        count: int,
        num_logits: int | None = None,
        beside: int = 0,
        *,
        is_last: bool = False,
    ) -> Tensor:
        """Logits [num_logits, V] float32 of the last positions of the `count` from `start` on.

        Without `num_logits`, the logits of all `count` positions.
        """
        num_logits = count if num_logits is None else num_logits
        token_ids = self.token_ids[start : start + count]
        entry = ScheduledSequence(0, start, count, token_ids, self._new_block_ids, num_logits)
        self._new_block_ids = []
        others = [
            ScheduledSequence(
                row, row % BLOCK_SIZE, 1, [self.token_ids[row + row % BLOCK_SIZE]], [], 1
            )
            for row in range(1, 1 + beside)
        ]
        logits = self._run([*others, entry] if is_last else [entry, *others])
        return logits[beside:] if is_last else logits[:num_logits]

    def _admit(self, block_ids: list[int]) -> None:
        self._runner._batch.admit(0, self._request, [])
        self._new_block_ids = block_ids

    @torch.inference_mode()
    def _run(self, entries: list[ScheduledSequence]) -> Tensor:
        runner = self._runner
        num_tokens = sum(entry.num_new_tokens for entry in entries)
        step = runner._batch.build(SchedulerOutput(entries, [], num_tokens))
        num_rows = len(step.sampled_rows)
        logits = runner.graphs.run(
            step.num_tokens, step.num_seqs, num_rows, tokens_per_seq=step.tokens_per_seq
        )
        return logits[:num_rows].clone()


@st.composite
def sequence_lives(draw: st.DrawFn) -> Life:
    """Steps of 1 to 64 positions until the sequence ends or is preempted."""
    num_cached = draw(st.sampled_from([0, 0, 1, 31, 32, 36]))
    done, chunks = num_cached * BLOCK_SIZE, []
    sizes = st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64])
    while done < LENGTH and len(chunks) < 12:
        count = min(draw(sizes), LENGTH - done)
        beside = draw(st.sampled_from([0, 0, 1, 7, 31]))
        num_logits = draw(st.sampled_from([1, min(count, MAX_NUM_SEQS - beside)]))
        chunks.append(Chunk(count, num_logits, beside, draw(st.booleans())))
        done += count
    return Life(num_cached, draw(st.sampled_from([1, 2])), draw(st.booleans()), chunks)


def check_sequence(sequences: SomeSequences, life: Life) -> None:
    """Check that every step of `life` gives the same logits as the first computation."""
    before = torch.get_num_threads()
    torch.set_num_threads(life.threads)
    set_pool_threads(life.threads if life.has_pool else 0)
    try:
        sequences.begin(life.num_cached)
        done = life.num_cached * BLOCK_SIZE
        for chunk in life.chunks:
            count, num_logits, beside, is_last = chunk
            found = sequences.step(done, count, num_logits, beside, is_last=is_last)
            done += count
            expected = sequences.logits[done - num_logits : done]
            assert torch.equal(found, expected), f"{chunk} that ends at {done}"
    finally:
        set_pool_threads(0)
        torch.set_num_threads(before)


def _check_some_lives(sequences: SomeSequences) -> None:
    @settings(max_examples=4, derandomize=True, deadline=None, database=None)
    @given(life=sequence_lives())
    def check(life: Life) -> None:
        check_sequence(sequences, life)

    check()


def _check_level(level: str) -> None:
    """Check all forms with the kernels of one instruction set. This process uses no other one."""
    levels = instruction_sets.ISA_LEVELS
    chosen = instruction_sets.instruction_set(level)
    for name in list(levels):
        del levels[name]
    levels[level] = chosen
    for form in FORMS:
        sequences = SomeSequences(make_llm(form))
        _check_some_lives(sequences)
        assert loaded_isa() == level
        sys.stdout.write(f"{level} {form}: {len(sequences.logits)} positions have the same bits\n")


if __name__ == "__main__":
    _check_level(sys.argv[1])
