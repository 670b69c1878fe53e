"""`RankTiers`: one rank's copies of KV blocks in host memory and on disk.

    device -> buffer -> disk          device -> host memory
    disk -> buffer -> device          host memory -> device

The copies from the device are begun before a step writes. A thread does the rest: it writes buffers
to the disk, and it loads blocks. Another thread synchronises the files, which can take seconds.
Each rank has its own part of a block and its own files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ostinato.models.kv_cache import KVCache
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.tiers.block_file import BlockFile
from ostinato.runtime.tiers.device_blocks import Mark, device_blocks
from ostinato.runtime.tiers.own_files import TierBusyError, TierError
from ostinato.runtime.tiers.tier_calls import (
    AdvanceTiers,
    ClearTiers,
    FlushTiers,
    OpenTiers,
    StartTransfers,
    TierCall,
    TierProgress,
    num_buffers,
)
from ostinato.runtime.tiers.tier_directory import rank_folder
from ostinato.runtime.types.step import BlockTransfer

__all__ = ("RankTiers",)

_LOG = logging.getLogger(__name__)
# If an engine was killed, its other ranks live a moment longer and hold their files.
_RELEASE_S = 3.0
_CLOSE_S = 5.0  # how long the end waits for a read or write of the disk
_SYNC_S = 5.0  # what was written longer ago survives a power cut


class _Write(NamedTuple):
    buffer: int  # index of the buffer
    place: int  # on the disk, counted from 0
    block_hash: bytes
    after: Mark  # the buffer is filled when the device has reached it


class _Load(NamedTuple):
    transfer: BlockTransfer
    after: Mark  # the device's blocks can be overwritten when it has reached this mark


class RankTiers:
    """Host memory and disk of one rank. One thread calls it.

    Args:
        kv_cache: the rank's KV cache.
        num_host_places: blocks that host memory has room for; their places are 0, 1, ... The places
            of the disk follow.
        has_disk: `OpenTiers` will be called.
        rank: the number of the rank.
    """

    def __init__(
        self, kv_cache: KVCache, *, num_host_places: int, has_disk: bool, rank: int = 0
    ) -> None:
        self._rank = rank
        self._blocks = device_blocks(kv_cache)
        self._num_host_places = num_host_places
        self._host = self._blocks.make_buffers(num_host_places)
        count = num_buffers(self._blocks.block_bytes) if has_disk else 0
        self._buffers = self._blocks.make_buffers(count)
        self._load_buffer = self._blocks.make_buffers(int(has_disk))
        self._free = list(range(count))
        self._file: BlockFile | None = None
        self._can_write = has_disk
        self._changed = threading.Condition()  # guards all that follows, and `_free`
        self._writes: deque[_Write] = deque()
        self._loads: deque[_Load] = deque()
        self._is_busy = False  # the thread works on a job that it has taken from a queue
        self._is_closed = False
        self._wants_sync = False  # `_flush` waits
        self._host_hashes: dict[int, bytes] = {}
        self._has_warned = False  # that the disk cannot be read
        self._num_reported = count  # free buffers in the last report
        self._finished: list[tuple[int, int, float]] = []
        self._lost: list[int] = []
        self._unsynced_since: float | None = None  # time of the first write that is not safe yet
        self._is_timed = False  # whether the thread that synchronises waits for a fixed time
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "kv-tiers"), (self._run_sync, "kv-tiers-sync"))
        ]
        for thread in self._threads:
            thread.start()

    def answer(self, call: TierCall) -> str:
        """Execute a call of the engine; returns the answer that is described there.

        Raises:
            InvalidRequestError: the files of the rank cannot be used.
        """
        match call:
            case OpenTiers(directory, identity, num_places):
                entries = self._open(Path(directory), identity, num_places)
                return msgspec.json.encode([(place, one.hex()) for place, one in entries]).decode()
            case StartTransfers(transfers):
                self.start(transfers)
            case AdvanceTiers(timeout_s):
                return msgspec.json.encode(self._advance(timeout_s)).decode()
            case ClearTiers():
                self._clear()
            case FlushTiers(timeout_s):
                self._flush(timeout_s)
        return ""

    def start(self, transfers: list[BlockTransfer]) -> None:
        """Begin copies: from the device, before a later step writes, and to it."""
        loads = [transfer for transfer in transfers if transfer.is_load]
        writes: list[tuple[int, int, bytes]] = []
        with torch.inference_mode():
            for transfer in transfers:
                if not transfer.is_load:
                    writes += self._save(transfer)
        mark = self._blocks.mark()
        with self._changed:
            self._writes += [_Write(*write, mark) for write in writes]
            self._loads += [_Load(load, mark) for load in loads]
            self._changed.notify_all()

    def _open(self, directory: Path, identity: str, num_places: int) -> list[tuple[int, bytes]]:
        """Open the rank's files; returns (place, hash) of the blocks in them, the oldest first."""
        try:
            path = rank_folder(directory, self._rank)
            file = self._open_file(path, f"{identity} rank {self._rank}", num_places)
            entries = file.entries()
        except (TierError, OSError) as error:
            raise InvalidRequestError(str(error)) from error
        with self._changed:
            self._file = file
        return entries

    def _open_file(self, path: Path, identity: str, num_places: int) -> BlockFile:
        end = time.monotonic() + _RELEASE_S
        while True:
            try:
                return BlockFile(
                    path,
                    block_bytes=self._blocks.block_bytes,
                    num_places=num_places,
                    identity=identity,
                )
            except TierBusyError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def _advance(self, timeout_s: float) -> TierProgress:
        with self._changed:
            if timeout_s:
                self._changed.wait_for(self._has_news, timeout_s)
            finished, self._finished = self._finished, []
            lost, self._lost = self._lost, []
            is_writing = len(self._free) < len(self._buffers)
            self._num_reported = len(self._free)
            return TierProgress(finished, lost, len(self._free), is_writing, self._can_write)

    def _clear(self) -> None:
        """Forget all blocks on disk. Loads that have begun fail or end."""
        with self._changed:
            self._free += [write.buffer for write in self._writes]
            self._writes.clear()
            self._changed.wait_for(lambda: not self._is_busy)
            try:
                if self._file is not None:
                    self._file.clear()
            except OSError as error:
                raise InvalidRequestError(
                    f"the KV blocks in cache.disk_dir cannot be removed: {error}; stop the server "
                    "and remove the directory"
                ) from error

    def _flush(self, timeout_s: float) -> None:
        """Wait until all stores are on the disk, but at most `timeout_s`."""
        with self._changed:
            self._wants_sync = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_flushed, timeout_s)

    def close(self) -> None:
        """Drop the copies that have not been made, end the thread and close the files.

        If the disk does not answer, they are left to the end of the process.
        """
        with self._changed:
            self._is_closed = True
            self._writes.clear()
            self._loads.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        has_ended = not any(thread.is_alive() for thread in self._threads)
        if self._file is not None and has_ended:
            self._file.close()

    def _save(self, transfer: BlockTransfer) -> list[tuple[int, int, bytes]]:
        """Begin stores; returns (buffer, place on disk, hash) of those to the disk."""
        writes: list[tuple[int, int, bytes]] = []
        stores = zip(transfer.block_ids, transfer.places, transfer.hashes, strict=True)
        for block_id, place, block_hash in stores:
            if place < self._num_host_places:
                self._blocks.save(block_id, self._host[place])
                self._host_hashes[place] = block_hash
                continue
            with self._changed:
                buffer = self._free.pop() if self._free and self._can_write else None
                if buffer is None:
                    self._lost.append(place)
                    continue
            self._blocks.save(block_id, self._buffers[buffer])
            writes.append((buffer, place - self._num_host_places, block_hash))
        return writes

    def _has_news(self) -> bool:
        has_buffer = len(self._free) > self._num_reported
        return bool(self._finished or self._lost or has_buffer)

    def _is_flushed(self) -> bool:
        is_done = not (self._writes or self._is_busy or self._wants_sync)
        return is_done or self._file is None or self._is_closed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._loads or self._is_closed)
                if self._is_closed:
                    return
                job = self._take()
                self._is_busy = True
            if isinstance(job, _Load):
                self._load(job)
            else:
                self._write(job)

    def _run_sync(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_sync, self._seconds_to_sync())
                if self._is_closed:
                    return
                is_flush = self._is_flush_ready()
                is_due = self._seconds_to_sync() == 0.0
                if not (is_flush or is_due):
                    continue
                self._unsynced_since = None
            try:
                if self._file is not None:
                    self._file.sync()
            except OSError as error:
                _LOG.warning("cache.disk_dir cannot be synchronised: %s", error)
            with self._changed:
                self._wants_sync = self._wants_sync and not is_flush
                self._changed.notify_all()

    def _has_sync(self) -> bool:
        """Whether the thread that synchronises must look: a flush, the end, or a first write."""
        is_first = not self._is_timed and self._unsynced_since is not None
        return self._is_closed or self._is_flush_ready() or is_first

    def _is_flush_ready(self) -> bool:
        return self._wants_sync and not (self._writes or self._is_busy)

    def _seconds_to_sync(self) -> float | None:
        self._is_timed = self._unsynced_since is not None
        if self._unsynced_since is None:
            return None
        return max(0.0, self._unsynced_since + _SYNC_S - time.monotonic())

    def _take(self) -> _Load | _Write:
        """The next job. A load comes before the writes of other places."""
        if self._loads:
            first = self._num_host_places
            written = {first + write.place for write in self._writes}
            if written.isdisjoint(self._loads[0].transfer.places):
                return self._loads.popleft()
        return self._writes.popleft()

    def _write(self, job: _Write) -> None:
        is_written = False
        try:
            self._blocks.wait(job.after)
            if self._file is not None and self._can_write:
                self._file.write(job.place, job.block_hash, [_bytes_of(self._buffers[job.buffer])])
                is_written = True
        except OSError as error:
            _LOG.warning(
                "blocks of the KV cache are not written to cache.disk_dir any more: %s; free "
                "space there, or lower cache.disk_gib, and start again",
                error.strerror or error,
            )
        except Exception:  # the thread goes on: sequences wait for its loads
            _LOG.exception("blocks of the KV cache are not written to cache.disk_dir any more")
        with self._changed:
            self._free.append(job.buffer)
            if is_written:
                self._unsynced_since = self._unsynced_since or time.monotonic()
            else:
                self._can_write = False
                self._lost.append(self._num_host_places + job.place)

    def _load(self, job: _Load) -> None:
        transfer, begin = job.transfer, time.monotonic()
        count = 0
        try:
            for block_id, place, block_hash in zip(
                transfer.block_ids, transfer.places, transfer.hashes, strict=True
            ):
                buffer = self._read(place, block_hash)
                if buffer is None:
                    break
                self._blocks.restore(block_id, buffer, job.after)
                count += 1
        except Exception:  # the sequences that wait for the load must go on
            _LOG.exception("blocks of the KV cache were not loaded; they are computed")
        with self._changed:
            self._finished.append((transfer.transfer_id, count, time.monotonic() - begin))

    def _read(self, place: int, block_hash: bytes) -> Tensor | None:
        """A buffer with the contents of a place; None if the disk does not have them."""
        if place < self._num_host_places:
            return self._host[place] if self._host_hashes.get(place) == block_hash else None
        buffer, file = self._load_buffer[0], self._file
        if file is None:
            return None
        is_read = file.read(place - self._num_host_places, block_hash, [_bytes_of(buffer)])
        if file.num_errors and not self._has_warned:
            self._has_warned = True
            _LOG.warning("blocks of the KV cache cannot be read from cache.disk_dir")
        return buffer if is_read else None


def _bytes_of(buffer: Tensor) -> memoryview:
    return buffer.numpy().data
