"""Compares the tensors that the batch builder writes with literal values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.kv_groups import KVGroup
from ostinato.models.step_tensors import given_tensors
from ostinato.runtime.execution.batch_builder import BatchBuilder
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput

REQUEST = Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())


def make_builder(few_sequences: int = 4) -> tuple[BatchBuilder, StaticBuffers]:
    buffers = StaticBuffers(
        max_num_tokens=16,
        max_num_seqs=3,
        max_blocks_per_seq=4,
        block_size=4,
        max_num_rows=16,
        device=torch.device("cpu"),
    )
    return BatchBuilder(buffers, few_sequences=few_sequences), buffers


def step(*scheduled: ScheduledSequence) -> SchedulerOutput:
    return SchedulerOutput(list(scheduled), [], sum(entry.num_new_tokens for entry in scheduled))


@pytest.mark.parametrize("few", [0, 4])
@pytest.mark.parametrize("count", [1, 3])
def test_slots_of_states_are_in_the_order_of_the_step(few: int, count: int) -> None:
    """A step that serves no request has no slots; it begins with zeros and writes to slot 0."""
    buffers = StaticBuffers(
        max_num_tokens=16,
        max_num_seqs=3,
        max_blocks_per_seq=4,
        block_size=4,
        device=torch.device("cpu"),
        has_states=True,
    )
    builder = BatchBuilder(buffers, few_sequences=few)
    plans = [(5, 5, 0, 0), (0, 7, 8, 2), None]
    tokens = list(range(count))
    builder.build(
        step(
            *(
                ScheduledSequence(row, 0, count, tokens, [1 + row], 1, state_slots=plan)
                for row, plan in zip((2, 0, 1), plans, strict=True)
            )
        )
    )
    assert buffers.host.state_slots is not None
    assert buffers.host.state_slots.tolist() == [[5, 5, 0, 0], [0, 7, 8, 2], [0, 0, 0, 0]]


def test_a_prefill_beside_a_decode() -> None:
    builder, buffers = make_builder()
    builder.admit(2, REQUEST, [])
    shape = builder.build(step(ScheduledSequence(2, 0, 5, [10, 11, 12, 13, 14], [7, 3], True)))
    assert shape[:5] == (5, 1, [2], [5], 0)
    builder.last_token[2] = 99
    builder.admit(0, REQUEST, [])
    shape = builder.build(
        step(
            ScheduledSequence(2, 5, 1, [], [], True),
            ScheduledSequence(0, 4, 3, [20, 21, 22], [5, 6], False),
        )
    )
    host = buffers.host
    assert shape[:5] == (4, 2, [2], [6], 0)
    assert host.token_ids[:4].tolist() == [99, 20, 21, 22]
    assert host.positions[:4].tolist() == [5, 4, 5, 6]
    # Position 5 is in the second block of row 2, block 3. Positions 4 to 6 are in the second block
    # of row 0, block 6.
    assert host.slot_mapping[:4].tolist() == [3 * 4 + 1, 6 * 4, 6 * 4 + 1, 6 * 4 + 2]
    assert host.query_start_loc[:3].tolist() == [0, 1, 4]
    assert host.seq_lens[:2].tolist() == [6, 7]
    assert host.block_table[0].tolist() == [7, 3, 0, 0]
    assert host.block_table[1].tolist() == [5, 6, 0, 0]
    assert host.logits_indices[0] == 0


def test_a_uniform_decode_reads_the_last_tokens() -> None:
    builder, buffers = make_builder()
    for row in (0, 1):
        builder.admit(row, REQUEST, [])
    builder.build(
        step(
            ScheduledSequence(0, 0, 4, [1, 2, 3, 4], [1], True),
            ScheduledSequence(1, 0, 2, [5, 6], [2], True),
        )
    )
    builder.last_token[:2] = 40, 41
    shape = builder.build(
        step(ScheduledSequence(1, 2, 1, [], [], True), ScheduledSequence(0, 4, 1, [], [3], True))
    )
    host = buffers.host
    assert shape[:5] == (2, 2, [1, 0], [3, 5], 1)
    assert host.token_ids[:2].tolist() == [41, 40]
    assert host.positions[:2].tolist() == [2, 4]
    assert host.slot_mapping[:2].tolist() == [2 * 4 + 2, 3 * 4]
    assert host.query_start_loc[:3].tolist() == [0, 1, 2]
    assert host.seq_lens[:2].tolist() == [3, 5]
    assert host.block_table[:2].tolist() == [[2, 0, 0, 0], [1, 3, 0, 0]]


def test_a_one_token_prompt_is_read_from_the_request() -> None:
    builder, buffers = make_builder()
    builder.admit(0, REQUEST, [])
    builder.last_token[0] = 77  # stale values of the row's previous sequence
    shape = builder.build(step(ScheduledSequence(0, 0, 1, [5], [1], True)))
    assert shape.tokens_per_seq == 1
    assert buffers.host.token_ids[0] == 5


def test_a_new_owner_of_a_row_does_not_see_the_old_blocks() -> None:
    builder, buffers = make_builder()
    builder.admit(0, REQUEST, [])
    builder.build(step(ScheduledSequence(0, 0, 8, list(range(8)), [1, 2], True)))
    builder.admit(0, REQUEST, [])
    builder.build(step(ScheduledSequence(0, 0, 2, [8, 9], [3], True)))
    assert buffers.host.block_table[0].tolist() == [3, 0, 0, 0]


@given(st.data())
def test_few_sequences_are_written_as_many_are(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    scheduled, last = [], data.draw(st.lists(st.integers(0, 99), min_size=3, max_size=3))
    for row in rows:
        start = data.draw(st.integers(0, 11))
        token_ids = data.draw(st.lists(st.integers(100, 200), max_size=4))
        count = max(1, len(token_ids))
        blocks = [1 + 4 * row + index for index in range((start + count - 1) // 4 + 1)]
        scheduled.append(ScheduledSequence(row, start, count, token_ids, blocks, count))
    few, many = make_builder(3), make_builder(0)
    for builder, _ in (few, many):
        for row in rows:
            builder.admit(row, REQUEST, [])
        builder.last_token[:] = last
    assert few[0].build(step(*scheduled)) == many[0].build(step(*scheduled))
    for name in given_tensors(few[1].host):
        written, expected = getattr(few[1].host, name), getattr(many[1].host, name)
        assert written.tolist() == expected.tolist(), name


def test_drafts_need_the_logits_of_every_position() -> None:
    builder, buffers = make_builder()
    for row in range(3):
        builder.admit(row, REQUEST, [])
    builder.build(step(ScheduledSequence(0, 0, 4, [1, 2, 3, 4], [1], 1)))
    shape = builder.build(
        step(
            ScheduledSequence(1, 0, 3, [7, 8, 9], [2], 0),
            ScheduledSequence(0, 4, 2, [5, 6], [3], 2),
            ScheduledSequence(2, 0, 2, [7, 8], [4], 1),
        )
    )
    assert shape.sampled_rows == [0, 0, 2]
    assert shape.sampled_positions == [5, 6, 2]
    assert shape.drafts == [[6], []]
    assert buffers.host.logits_indices[:3].tolist() == [3, 4, 6]
    assert buffers.host.sampled_rows[:2].tolist() == [0, 2]


GROUPS = (KVGroup(0, 2, 1), KVGroup(5, 1, 2))
BLOCK_SIZE, NUM_ROWS, MAX_LEN = 4, 3, 24


class Twin:
    """The block tables of a row, read block by block."""

    def __init__(self) -> None:
        self.length = 0
        self.tables: list[list[int]] = [[], []]  # of block ids of the pool

    def grow(self, count: int, draw: Callable[[], int]) -> list[list[int]]:
        """Add tokens; returns the new blocks of each group. Blocks can be 0, which is no block."""
        self.length += count
        new: list[list[int]] = []
        for group, table in zip(GROUPS, self.tables, strict=True):
            missing = -(-self.length // (group.units * BLOCK_SIZE)) - len(table)
            new.append([draw() for _ in range(missing)])
            table += new[-1]
        return new

    def slot(self, group: int, position: int) -> int:
        size, pieces = GROUPS[group].units * BLOCK_SIZE, GROUPS[group].pieces
        slots = [
            block * pieces * size + offset for block in self.tables[group] for offset in range(size)
        ]
        return slots[position]


@given(st.data(), st.sampled_from([0, 4]))
def test_two_block_tables_are_those_of_a_slow_twin(data: st.DataObject, few: int) -> None:
    buffers = StaticBuffers(
        max_num_tokens=24,
        max_num_seqs=NUM_ROWS,
        max_blocks_per_seq=3,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
        groups=GROUPS,
        max_window_blocks_per_seq=6,
    )
    builder = BatchBuilder(buffers, few_sequences=few)
    twins = [Twin() for _ in range(NUM_ROWS)]
    for row in range(NUM_ROWS):
        builder.admit(row, REQUEST, [])
    for _ in range(data.draw(st.integers(1, 5))):
        scheduled: list[ScheduledSequence] = []
        for row in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
            if twins[row].length > MAX_LEN - 8 or data.draw(st.integers(0, 9)) == 0:
                builder.admit(row, REQUEST, [])  # the row has another sequence
                twins[row] = Twin()
            start, count = twins[row].length, data.draw(st.sampled_from([1, 1, 3, 8]))
            new = twins[row].grow(count, lambda: data.draw(st.integers(0, 50)))
            token_ids = [] if count == 1 else list(range(count))
            scheduled.append(
                ScheduledSequence(
                    row, start, count, token_ids, new[0], 1, new_window_block_ids=new[1]
                )
            )
        builder.build(step(*scheduled))
        host = buffers.host
        assert host.window_block_table is not None
        assert host.window_slot_mapping is not None
        written = (
            (host.block_table, host.slot_mapping),
            (host.window_block_table, host.window_slot_mapping),
        )
        for group, (table, slots) in enumerate(written):
            assert slots[: sum(entry.num_new_tokens for entry in scheduled)].tolist() == [
                twins[entry.row].slot(group, position)
                for entry in scheduled
                for position in range(entry.start, entry.start + entry.num_new_tokens)
            ]
            for index, entry in enumerate(scheduled):
                ids = [one * GROUPS[group].pieces for one in twins[entry.row].tables[group]]
                padding = [0] * (table.shape[1] - len(ids))
                assert table[index].tolist() == ids + padding


def test_models_with_one_group_have_one_block_table() -> None:
    _, buffers = make_builder()
    assert "window_block_table" not in given_tensors(buffers.host)
    assert buffers.batch(4, 2, 2).window_slot_mapping is None
