"""Writes a scheduled step into the static host buffers.

A row is the index of a running sequence in arrays that persist between steps (block table, last
token). The batch of a step is compact: entry i of the scheduler's output is sequence i of the step
tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ostinato.graphs.buffers import HostBuffers, StaticBuffers
from ostinato.models.kv_groups import KVGroup
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput

__all__ = ("BatchBuilder", "StepShape", "tokens_per_seq")

# A step of at most this many sequences and tokens is written one by one if all tokens are sampled.
_FEW_SEQUENCES, _FEW_TOKENS = 4, 32
_NO_STATES = (0, 0, 0, 0)  # states begin with zeros, and slot 0 is written


class StepShape(NamedTuple):
    """The sizes of the step in the buffers, and the rows that it samples."""

    num_tokens: int
    num_seqs: int
    # [R]; the row of each position whose logits are computed, in the scheduler's order. A row with
    # k drafts occurs 1 + k times.
    sampled_rows: list[int]
    # [R]; for each row of logits, the position that the drawn token has in its sequence.
    sampled_positions: list[int]
    # The number of tokens of each sequence, if it is the same for all and all tokens are sampled.
    # 0 = other steps.
    tokens_per_seq: int
    # The draft tokens of each sequence that samples; None = no sequence has any.
    drafts: list[list[int]] | None = None
    has_adapters: bool = False  # whether a token has a low-rank adapter


class _RowTables:
    """The block tables of all rows, of one KV group; they hold the block ids of a layer."""

    def __init__(self, group: KVGroup, buffers: StaticBuffers, *, is_second: bool) -> None:
        self.block_size = group.units * buffers.block_size
        self._is_second = is_second
        self._pieces = group.pieces
        shape = self.of(buffers.host)[0].shape
        self.blocks = np.zeros(shape, dtype=np.int32)
        self._num_blocks = [0] * shape[0]

    def of(self, host: HostBuffers) -> tuple[np.ndarray, np.ndarray]:
        """The block table and the slot mapping of this group in the host buffers."""
        if not self._is_second:
            return host.block_table, host.slot_mapping
        assert host.window_block_table is not None, "the buffers have two groups"
        assert host.window_slot_mapping is not None, "the buffers have two groups"
        return host.window_block_table, host.window_slot_mapping

    def clear(self, row: int) -> None:
        """Empty the table of a row."""
        self.blocks[row] = 0
        self._num_blocks[row] = 0

    def append(self, row: int, block_ids: list[int]) -> None:
        """Append blocks, given by their ids in the pool, to the table of a row."""
        begin = self._num_blocks[row]
        end = self._num_blocks[row] = begin + len(block_ids)
        self.blocks[row, begin:end] = block_ids
        if self._pieces > 1:
            self.blocks[row, begin:end] *= self._pieces

    def slots(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """[N] int64: the slots of the positions [N], each in the row at the same index of `rows`,
        or all in one row.
        """
        size = self.block_size
        return self.blocks[rows, positions // size].astype(np.int64) * size + positions % size


class BatchBuilder:
    """Writes steps into the host buffers; owns the arrays that persist per row."""

    def __init__(self, buffers: StaticBuffers, *, few_sequences: int = _FEW_SEQUENCES) -> None:
        self._buffers = buffers
        self._few_sequences = few_sequences
        max_num_seqs = len(buffers.host.block_table)
        self._tables = [
            _RowTables(group, buffers, is_second=bool(index))
            for index, group in enumerate(buffers.groups)
        ]
        # The last token of every row; on a CPU this is the memory of `buffers.last_tokens`.
        self.last_token = buffers.last_tokens.cpu().numpy()
        # The slot of each row's low-rank adapter, -1 = none; None = steps cannot have adapters.
        self._adapter_slots = (
            np.full(max_num_seqs, -1, dtype=np.int32) if buffers.has_adapters else None
        )
        self._counting = np.arange(max_num_seqs + 1, dtype=np.int32)

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Give the row to a new sequence, with empty block tables."""
        for table in self._tables:
            table.clear(row)
        if self._adapter_slots is not None:
            self._adapter_slots[row] = request.adapter_slot

    def build(self, output: SchedulerOutput) -> StepShape:
        """Write the step into the host buffers, after the last upload has finished."""
        self._buffers.wait_for_upload()
        for entry in output.scheduled:
            if entry.new_block_ids:
                self._tables[0].append(entry.row, entry.new_block_ids)
            if entry.new_window_block_ids:
                self._tables[1].append(entry.row, entry.new_window_block_ids)
        if (host_slots := self._buffers.host.state_slots) is not None:
            host_slots[: output.num_seqs] = [
                entry.state_slots or _NO_STATES for entry in output.scheduled
            ]
        shape = self._build(output.scheduled, output.num_tokens)
        if self._adapter_slots is None:
            return shape
        return shape._replace(has_adapters=self._write_adapters(output, self._adapter_slots))

    def _build(self, scheduled: list[ScheduledSequence], num_tokens: int) -> StepShape:
        is_few = len(scheduled) <= self._few_sequences and num_tokens <= _FEW_TOKENS
        if (is_few or num_tokens == len(scheduled)) and all(
            entry.num_logits == entry.num_new_tokens for entry in scheduled
        ):
            return self._build_few(scheduled) if is_few else self._build_decode(scheduled)
        return self._build_mixed(scheduled, num_tokens)

    def _write_adapters(self, output: SchedulerOutput, by_row: np.ndarray) -> bool:
        """Write the slot of each token's adapter; returns whether any token has one."""
        slots = by_row[[entry.row for entry in output.scheduled]]
        if slots.max(initial=-1) < 0:
            return False
        counts = [entry.num_new_tokens for entry in output.scheduled]
        host = self._buffers.host.adapter_slots
        assert host is not None, "the buffers have adapters"
        host[: output.num_tokens, 0] = slots.repeat(counts)
        return True

    def _build_decode(self, scheduled: list[ScheduledSequence]) -> StepShape:
        """Write a step of one sampled token per sequence, by array operations."""
        host, count = self._buffers.host, len(scheduled)
        row_list = [entry.row for entry in scheduled]
        start_list = [entry.start for entry in scheduled]
        rows = np.array(row_list, dtype=np.intp)
        starts = np.array(start_list, dtype=np.int64)
        if self._buffers.async_tokens:
            host.token_ids[:count] = -1 - rows
        else:
            np.take(self.last_token, rows, out=host.token_ids[:count])
        for index, entry in enumerate(scheduled):
            if entry.token_ids:
                host.token_ids[index] = entry.token_ids[0]
        host.positions[:count] = starts
        for table in self._tables:
            block_table, slot_mapping = table.of(host)
            np.take(table.blocks, rows, axis=0, out=block_table[:count])
            slot_mapping[:count] = table.slots(rows, starts)
        host.query_start_loc[: count + 1] = self._counting[: count + 1]
        host.seq_lens[:count] = starts + 1
        host.logits_indices[:count] = self._counting[:count]
        host.sampled_rows[:count] = rows
        positions = [start + 1 for start in start_list]
        return StepShape(count, count, row_list, positions, tokens_per_seq=1)

    def _build_few(self, scheduled: list[ScheduledSequence]) -> StepShape:
        """Write a step whose tokens are all sampled, with single writes.

        One array operation takes as long as ten single writes.
        """
        host, async_tokens = self._buffers.host, self._buffers.async_tokens
        rows: list[int] = []
        sampled_positions: list[int] = []
        has_drafts = False
        index = 0
        for number, entry in enumerate(scheduled):
            row, start, token_ids = entry.row, entry.start, entry.token_ids
            host.query_start_loc[number] = index
            host.sampled_rows[number] = row
            if not token_ids:
                token_ids = (-1 - row if async_tokens else self.last_token[row],)
            has_drafts = has_drafts or len(token_ids) > 1
            for position, token in enumerate(token_ids, start):
                host.token_ids[index] = token
                host.positions[index] = position
                host.logits_indices[index] = index
                rows.append(row)
                sampled_positions.append(position + 1)
                index += 1
            host.seq_lens[number] = start + len(token_ids)
        host.query_start_loc[len(scheduled)] = index
        for table in self._tables:
            _write_few(table, host, scheduled)
        return StepShape(
            index,
            len(scheduled),
            rows,
            sampled_positions,
            tokens_per_seq=tokens_per_seq(scheduled) if has_drafts else 1,
            drafts=[entry.token_ids[1:] for entry in scheduled] if has_drafts else None,
        )

    def _build_mixed(self, scheduled: list[ScheduledSequence], num_tokens: int) -> StepShape:
        host = self._buffers.host
        sampled_rows: list[int] = []
        sampled_positions: list[int] = []
        drafts: list[list[int]] = []  # the drafts of each sequence that samples
        begin = 0
        for index, entry in enumerate(scheduled):
            end = begin + entry.num_new_tokens
            row, stop = entry.row, entry.start + entry.num_new_tokens
            if entry.token_ids or not self._buffers.async_tokens:
                host.token_ids[begin:end] = entry.token_ids or self.last_token[row]
            else:
                host.token_ids[begin:end] = -1 - row
            positions = np.arange(entry.start, stop)
            host.positions[begin:end] = positions
            for table in self._tables:
                block_table, slot_mapping = table.of(host)
                block_table[index] = table.blocks[row]
                slot_mapping[begin:end] = table.slots(row, positions)
            host.query_start_loc[index] = begin
            host.seq_lens[index] = stop
            count = entry.num_logits
            if count:
                num_rows = len(sampled_rows)
                host.logits_indices[num_rows : num_rows + count] = range(end - count, end)
                host.sampled_rows[len(drafts)] = row
                drafts.append(entry.token_ids[1:] if count > 1 else [])
                sampled_rows += [row] * count
                sampled_positions += range(stop - count + 1, stop + 1)
            begin = end
        assert begin == num_tokens, f"scheduler announced {num_tokens} tokens and listed {begin}"
        host.query_start_loc[len(scheduled)] = begin
        has_drafts = any(drafts)
        return StepShape(
            num_tokens,
            len(scheduled),
            sampled_rows,
            sampled_positions,
            tokens_per_seq=tokens_per_seq(scheduled) if has_drafts else 0,
            drafts=drafts if has_drafts else None,
        )


def _write_few(table: _RowTables, host: HostBuffers, scheduled: list[ScheduledSequence]) -> None:
    """Write the block table and the slots of a group with single writes."""
    block_table, slot_mapping = table.of(host)
    size, index = table.block_size, 0
    for number, entry in enumerate(scheduled):
        blocks = table.blocks[entry.row]
        block_table[number] = blocks
        for position in range(entry.start, entry.start + entry.num_new_tokens):
            slot_mapping[index] = int(blocks[position // size]) * size + position % size
            index += 1


def tokens_per_seq(scheduled: list[ScheduledSequence]) -> int:
    """The number of tokens of each sequence, if it is equal for all and all are sampled; else 0."""
    counts = {entry.num_new_tokens if entry.is_decode else 0 for entry in scheduled}
    return counts.pop() if len(counts) == 1 else 0
