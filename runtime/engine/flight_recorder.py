"""The flight recorder: the last steps of an engine, in a file that outlives its process.

Each step is written to a memory-mapped ring when it begins and again when it is done, so that the
step that was under way when the process was killed is the one without an end. The kernel keeps the
pages of a killed process. So the process need not write anything when it is killed, and the file of
a hanging process can be read too. A record costs a few microseconds.

    header  magic, number of slots, bytes a slot       16 bytes
    slot    length of the record (uint32), the record in msgpack, rest unused
"""

from __future__ import annotations

import logging
import mmap
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ostinato.conf.environment import cache_dir

__all__ = (
    "FlightRecorder",
    "StepRecord",
    "as_json",
    "dump_flight",
    "flight_path",
    "keep_flight",
    "read_flight",
)

_LOG = logging.getLogger(__name__)
_MAGIC = b"OSTFLT01"
_HEADER = struct.Struct("<8sII")
_LENGTH = struct.Struct("<I")
_SLOT_BYTES = 4096
_MAX_ENTRIES = 24
_MAX_ID = 72  # characters of a request id that are kept
_KEPT_DUMPS = 10


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step as the recorder keeps it."""

    step: int
    began_at: float  # unix seconds
    num_tokens: int
    num_seqs: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_decodes: int  # sequences that computed one token, that the step before had sampled
    entries: list[tuple[str, int, int]]  # (request id, start, tokens) of the first sequences
    kind: str = ""  # captured | compiled | eager; empty = its program was not started
    num_padded_tokens: int = 0  # that the program computed, padding included
    seconds: float = 0.0  # from its launch until its tokens were there; 0 = they never were

    @property
    def is_done(self) -> bool:
        """Whether its tokens came back."""
        return self.seconds > 0.0


class FlightRecorder:
    """Writes steps into the ring; one writer, any number of readers.

    Args:
        path: the file; one that is there is replaced.
        num_steps: how many steps are kept.

    Raises:
        OSError: the file can not be made, or the file system has no room for it.
    """

    def __init__(self, path: Path, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"a flight recorder keeps at least 1 step, got {num_steps}")
        self._num_steps = num_steps
        self._encode = msgspec.msgpack.Encoder().encode
        size = _HEADER.size + num_steps * _SLOT_BYTES
        with path.open("w+b") as file:
            # All of it now: a store to a page for which the file system has no room would end the
            # process.
            for _ in range(num_steps):
                file.write(bytes(_SLOT_BYTES))
            file.write(bytes(_HEADER.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, num_steps, _SLOT_BYTES)

    def write(self, record: StepRecord) -> None:
        """Write a step, or its new state, to its slot."""
        data = self._encode(record)
        if len(data) > _SLOT_BYTES - _LENGTH.size:  # ids of four bytes a character
            data = self._encode(msgspec.structs.replace(record, entries=[]))
        begin = _HEADER.size + record.step % self._num_steps * _SLOT_BYTES
        self._map[begin : begin + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._map.close()

    @staticmethod
    def entries(entries: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """As many of a step's (request id, start, tokens) as a slot has room for."""
        return [(name[:_MAX_ID], start, num) for name, start, num in entries[:_MAX_ENTRIES]]


def flight_path(socket: str | Path) -> Path:
    """Where the engine behind a socket keeps its flight recorder."""
    return Path(f"{socket}.flight")


def read_flight(path: Path) -> list[StepRecord]:
    """The steps in a recorder's file, oldest first; the process that wrote it may have ended.

    A slot that is being written this moment may be left out. An unreadable or foreign file has no
    steps.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return []
    if len(data) < _HEADER.size:
        return []
    magic, num_steps, slot_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) != _HEADER.size + num_steps * slot_bytes:
        return []
    decoder = msgspec.msgpack.Decoder(StepRecord)
    records: list[StepRecord] = []
    for begin in range(_HEADER.size, _HEADER.size + num_steps * slot_bytes, slot_bytes):
        (length,) = _LENGTH.unpack_from(data, begin)
        if not 0 < length <= slot_bytes - _LENGTH.size:
            continue
        begin += _LENGTH.size
        try:
            records.append(decoder.decode(data[begin : begin + length]))
        except msgspec.DecodeError:
            continue
    return sorted(records, key=lambda record: record.step)


def dump_flight(records: Sequence[StepRecord], directory: Path, reason: str) -> Path:
    """Write steps to a new JSON file, for people; the oldest of more than ten files are removed.

    Args:
        records: as `read_flight` gives them.
        directory: made when it is not there.
        reason: why, in words.

    Returns:
        The file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    path = directory / f"flight-{stamp}-{int(now * 1000) % 1000:03d}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(as_json(records, reason)), indent=1))
    for old in sorted(directory.glob("flight-*.json"))[:-_KEPT_DUMPS]:
        old.unlink(missing_ok=True)
    return path


def keep_flight(path: Path, directory: str, reason: str) -> Path | None:
    """After an engine's end: write its last steps where people find them, and say so in the log.

    Args:
        path: the recorder's file.
        directory: where to; empty = `flight/` in the cache directory.
        reason: why the engine ended.

    Returns:
        The file; None when there were no steps, or it could not be written.
    """
    records = read_flight(path)
    if not records:
        return None
    under_way = [record for record in records if not record.is_done]
    target = Path(directory) if directory else cache_dir() / "flight"
    try:
        kept = dump_flight(records, target, reason)
    except OSError as error:
        _LOG.warning("the flight recorder could not be written: %s", error)
        return None
    _LOG.error(
        "flight recorder: the last %d steps, %d of them under way, are in %s",
        len(records),
        len(under_way),
        kept,
    )
    return kept


def as_json(records: Sequence[StepRecord], reason: str | None = None) -> dict[str, object]:
    """Steps with the names of their fields, oldest first."""
    steps = [
        {name: getattr(record, name) for name in StepRecord.__struct_fields__}
        | {"state": "done" if record.is_done else "under way"}
        for record in records
    ]
    return {"reason": reason, "written_at": time.time(), "steps": steps}
