"""`TierCopies`: the copies of KV blocks in slower tiers, as the engine sees them.

The scheduler plans the copies, and every rank makes its part. A load has ended when it has ended on
every rank.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import msgspec

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.executor import Executor
from ostinato.runtime.kv.block_pool import BlockHash
from ostinato.runtime.kv.tier_index import TierIndex
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.tiers.own_files import TierError
from ostinato.runtime.tiers.tier_calls import (
    AdvanceTiers,
    ClearTiers,
    FlushTiers,
    OpenTiers,
    StartTransfers,
    TierProgress,
)
from ostinato.runtime.tiers.tier_directory import TierDirectory
from ostinato.runtime.tiers.tier_opening import TierOpening
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("TierCopies",)

_LOG = logging.getLogger(__name__)
_WAIT_S = 0.005  # how long an engine without other work waits before it looks for new requests
# Least time between two questions to the ranks while steps run: while a load is unfinished, and
# while only stores are.
_POLL_LOADS_S, _POLL_STORES_S = 0.005, 0.025
_POLL_LANES_S = 0.1  # the same for a pipeline with steps in flight


class _Load(NamedTuple):
    begin: float
    num_blocks: int


class TierCopies:
    """Starts copies and takes in their results."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        index: TierIndex,
        opening: TierOpening | None,
        *,
        num_disk_places: int,
        num_buffers: int,
    ) -> None:
        """
        Args:
            executor: makes the copies.
            scheduler: the scheduler that plans them.
            index: its index of the tiers.
            opening: prepares the directory of the disk; None = there is no disk.
            num_disk_places: blocks that the disk has room for.
            num_buffers: blocks of each rank that can be on their way to the disk at once.
        """
        self._executor = executor
        self._scheduler = scheduler
        self._index = index
        self._opening = opening
        self._directory: TierDirectory | None = None
        self._num_disk_places = num_disk_places
        self._loads: dict[int, _Load] = {}  # loads that have not ended, by transfer id
        self._late: set[int] = set()  # loads that no sequence waits for any more
        # transfer id -> loaded blocks and seconds of each rank that has ended its part
        self._parts: dict[int, list[tuple[int, float]]] = {}
        self._is_storing = False  # a store may be unfinished
        self._polled_at = 0.0  # time of the last question to the ranks
        self._ended_at = 0.0  # time at which the last load ended
        index.set_buffers(num_buffers)

    @property
    def has_stores(self) -> bool:
        """Whether blocks wait for a copy."""
        return self._index.has_stores

    @property
    def is_opening(self) -> bool:
        """Whether the directory of the disk is being prepared."""
        return self._opening is not None

    def start_alone(self, output: SchedulerOutput) -> None:
        """Start the transfers of a step without entries."""
        self._executor.call(StartTransfers(output.transfers))
        self.note(output)

    def note(self, output: SchedulerOutput) -> None:
        """Note the transfers of a step that was launched."""
        now = time.monotonic()
        for transfer in output.transfers:
            if transfer.is_load:
                self._loads[transfer.transfer_id] = _Load(now, len(transfer.places))
                self._parts[transfer.transfer_id] = []
            else:
                self._is_storing = True

    def advance(self, *, waits: bool, has_in_flight: bool = False) -> None:
        """Open the disk when it is prepared, and take in the results of copies.

        Args:
            waits: nothing else can run. Then this call waits a little for the next result.
            has_in_flight: steps are in flight. The ranks of a pipeline answer after these, so they
                are asked less often.
        """
        if self._opening is not None and self._opening.is_done:
            opening, self._opening = self._opening, None
            self._open(opening)
        if not (self._loads or self._is_storing):
            return
        now = time.monotonic()
        poll_s = _POLL_LOADS_S if self._loads else _POLL_STORES_S
        if has_in_flight and self._executor.has_lanes:
            poll_s = _POLL_LANES_S
        if waits or now - self._polled_at >= poll_s:
            self._take_progress(_WAIT_S if waits else 0.0)
            self._polled_at = now
        for transfer_id, load in self._loads.items():
            seconds = now - max(load.begin, self._ended_at)  # a load waits for the one before
            is_late = seconds > self._index.costs.late_after(load.num_blocks)
            if is_late and transfer_id not in self._late:
                self._late.add(transfer_id)
                self._scheduler.abandon_load(transfer_id)

    def clear(self) -> None:
        """Forget all copies, also for later starts. The KV cache manager clears the index.

        Raises:
            InvalidRequestError: the copies on disk cannot be removed.
        """
        self._executor.call(ClearTiers())

    def flush(self, timeout_s: float) -> None:
        """Write the blocks that wait for a copy to the disk. No step may be in flight."""
        end = time.monotonic() + timeout_s
        while self.has_stores and time.monotonic() < end:
            transfers = self._index.take_stores()
            if transfers:
                self._executor.call(StartTransfers(transfers))
            self._take_progress(0.0 if transfers else _WAIT_S)
        self._executor.call(FlushTiers(max(0.1, end - time.monotonic())))

    def close(self) -> None:
        """Release the directory of the disk, after the executor has closed its files."""
        if self._opening is not None:
            self._opening.drop()
        if self._directory is not None:
            self._directory.close()

    def _open(self, opening: TierOpening) -> None:
        try:
            self._directory = opening.take()
            path = self._directory.path
            call = OpenTiers(str(path), path.parent.name, self._num_disk_places)
            answers = self._executor.call(call)
        except (InvalidRequestError, TierError) as error:
            _LOG.warning("the KV cache has no copies on disk: %s", error)
            self._index.close_disk()
            return
        first, *others = (msgspec.json.decode(one, type=list[tuple[int, str]]) for one in answers)
        # A block can be read only if every rank has its part.
        common = set(first).intersection(*others)
        contents = [
            (place, BlockHash(bytes.fromhex(text)))
            for place, text in first
            if (place, text) in common
        ]
        self._index.open_disk(self._num_disk_places, contents)
        _LOG.info("cache.disk_dir has %d of %d blocks", len(contents), self._num_disk_places)

    def _take_progress(self, timeout_s: float) -> None:
        answers = self._executor.call(AdvanceTiers(timeout_s))
        reports = [msgspec.json.decode(answer, type=TierProgress) for answer in answers]
        for report in reports:
            for transfer_id, num_blocks, seconds in report.finished_loads:
                self._parts[transfer_id].append((num_blocks, seconds))
            for place in report.lost_places:
                self._index.lose(place)
        self._index.set_buffers(min(report.num_free_buffers for report in reports))
        if not all(report.can_write for report in reports):
            self._index.stop_disk_stores()
        self._is_storing = any(report.is_writing for report in reports)
        ended = [one for one in self._loads if len(self._parts[one]) == len(answers)]
        for transfer_id in ended:
            del self._loads[transfer_id]
            self._late.discard(transfer_id)
            self._ended_at = time.monotonic()
            counts, seconds = zip(*self._parts.pop(transfer_id), strict=True)
            num_blocks = min(counts)
            self._index.costs.observe(num_blocks, max(seconds))
            self._scheduler.finish_load(transfer_id, num_blocks)
