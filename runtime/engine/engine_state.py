"""Describes an engine's rows, queue, blocks and recent steps, for the web page and `/debug/state`.

The description is made between two steps, when a client asks for it (`ipc.GetState`). It holds no
text and no token ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from ostinato.runtime.engine.flight_recorder import StepRecord
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.sequences.sequence import Sequence
from ostinato.runtime.types.engine_info import EngineStats

__all__ = ("BlockMap", "EngineState", "RunningState", "WaitingState", "describe_engine")

_MAX_CELLS = 2048
_MAX_ROWS = 512
_MAX_WAITING = 100
_NUM_GROUPS = 8
_SHARED = 3


class RunningState(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes part in steps."""

    row: int
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_num_tokens: int  # the largest number of prompt and output tokens that it can reach
    num_blocks: int
    num_shared_blocks: int  # blocks that other sequences hold too
    group: int  # number of the colour of its shared blocks, from 1; 0 = it has no shared blocks
    num_preemptions: int
    age_s: float  # seconds since the request arrived


class WaitingState(msgspec.Struct, frozen=True, array_like=True):
    """A sequence without a row."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int  # can be above 0 after a preemption
    age_s: float  # seconds since the request arrived
    priority: int


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """A picture of the block pool: at most 2048 cells. A cell stands for consecutive blocks."""

    num_blocks: int  # usable blocks
    block_size: int  # tokens
    blocks_per_cell: int  # the last cell can have fewer
    kinds: list[int]  # the most frequent kind in each cell: 0 free, 1 cached, 2 held, 3 shared
    # For each cell, the number of a colour (1 to 8) if it has shared blocks; 0 = none. The blocks
    # of one shared prefix have the same colour.
    groups: list[int]
    counts: list[int]  # number of blocks of each kind


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """The state of an engine between two steps."""

    stats: EngineStats
    rows: list[RunningState]  # at most 512
    num_rows: int  # rows in total, not only those in `rows`
    waiting: list[WaitingState]  # the first 100
    blocks: BlockMap
    steps: list[StepRecord]  # the last 120, oldest first, without their sequences
    bucket_tokens: list[int]  # token counts of the captured buckets
    seconds: float = 0.0  # time to make this description


def describe_engine(
    requests: Iterable[Sequence],
    cache: KVCacheManager,
    stats: EngineStats,
    steps: Iterable[StepRecord],
    bucket_tokens: Iterable[int],
) -> EngineState:
    """The state of an engine between two steps.

    Args:
        requests: sequences that have not ended, in order of arrival.
        cache: the KV cache manager of these sequences.
        stats: the engine's counters.
        steps: the last steps.
        bucket_tokens: token counts of the captured programs.
    """
    begin, now = time.perf_counter(), time.monotonic()
    kinds = cache.block_kinds()
    rows: list[RunningState] = []
    waiting: list[WaitingState] = []
    groups: dict[int, int] = {}
    for sequence in requests:
        if not sequence.is_running:
            if len(waiting) < _MAX_WAITING:
                waiting.append(_waiting(sequence, now))
            continue
        shared = [one for one in sequence.block_table.held() if kinds[one - 1] == _SHARED]
        # Sequences that share a prefix have the same first shared block, so they get one colour.
        group = 1 + shared[0] % _NUM_GROUPS if shared else 0
        groups.update(dict.fromkeys(shared, group))
        if len(rows) < _MAX_ROWS:
            rows.append(_row(sequence, len(shared), group, now))
    rows.sort(key=lambda row: row.row)
    return EngineState(
        stats,
        rows,
        stats.num_running,
        waiting,
        _block_map(kinds, groups, cache.block_size),
        list(steps),
        sorted(set(bucket_tokens)),
        time.perf_counter() - begin,
    )


def _row(sequence: Sequence, num_shared: int, group: int, now: float) -> RunningState:
    return RunningState(
        sequence.row,
        sequence.request.request_id,
        sequence.num_prompt_tokens,
        min(sequence.num_computed_tokens, sequence.num_tokens),
        sequence.num_output_tokens,
        sequence.max_num_tokens,
        len(sequence.block_table.held()),
        num_shared,
        group,
        sequence.num_preemptions,
        max(0.0, now - sequence.request.arrival_time),
    )


def _waiting(sequence: Sequence, now: float) -> WaitingState:
    return WaitingState(
        sequence.request.request_id,
        sequence.num_prompt_tokens,
        sequence.num_output_tokens,
        max(0.0, now - sequence.request.arrival_time),
        sequence.request.priority,
    )


def _block_map(kinds: bytes, groups: dict[int, int], block_size: int) -> BlockMap:
    counts = [kinds.count(kind) for kind in range(_SHARED + 1)]
    num_blocks = len(kinds)
    per_cell = max(1, -(-num_blocks // _MAX_CELLS))
    cells = [_most(kinds[at : at + per_cell]) for at in range(0, num_blocks, per_cell)]
    colours = [0] * len(cells)
    for block_id, group in groups.items():
        colours[(block_id - 1) // per_cell] = group
    return BlockMap(num_blocks, block_size, per_cell, cells, colours, counts)


def _most(kinds: bytes) -> int:
    """The most frequent kind of block; the largest number if several are equally frequent."""
    if len(kinds) == 1:
        return kinds[0]
    _, most = max((kinds.count(kind), kind) for kind in range(_SHARED + 1))
    return most
