"""The flight recorder: writes the last steps of an engine to a file that outlives its process.

The file is a memory-mapped ring of slots. A step is written to its slot when it begins, again when
the executor's `launch` has returned, and again when its tokens have arrived. On a CPU, the model
has run when `launch` returns. On a GPU, or with several pipeline stages, it may still be running or
waiting. A record whose `seconds` is 0 is of a step that has not ended: it is still running, or the
process died before its end. The operating system writes the pages to the file even if the process
is killed. Another process can read the file while the engine hangs. Writing a record takes a few
microseconds.

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
_MAX_ID = 72  # characters of a request id that are written
_KEPT_DUMPS = 10


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step, as the recorder writes it."""

    step: int
    began_at: float  # unix seconds
    num_tokens: int
    num_seqs: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_decodes: int  # sequences that decode, with or without drafts
    entries: list[tuple[str, int, int]]  # (request id, start, tokens) of the first sequences
    kind: str = ""  # captured | compiled | eager; empty = `launch` had not returned
    num_padded_tokens: int = 0  # tokens that the program computed, padding included
    seconds: float = 0.0  # from the launch until the tokens arrived; 0 = not arrived

    @property
    def is_done(self) -> bool:
        """Whether the step's tokens have arrived."""
        return self.seconds > 0.0


class FlightRecorder:
    """Writes steps into the ring; one writer, any number of readers.

    Args:
        path: the file to write; an existing file is replaced.
        num_steps: number of slots, at least 1.

    Raises:
        OSError: the file cannot be made, or the file system has no room for it.
        ValueError: `num_steps` is less than 1.
    """

    def __init__(self, path: Path, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"a flight recorder keeps at least 1 step, got {num_steps}")
        self._num_steps = num_steps
        self._encode = msgspec.msgpack.Encoder().encode
        size = _HEADER.size + num_steps * _SLOT_BYTES
        with path.open("w+b") as file:
            # All pages are written now. If the file system had no room for a page later, storing to
            # the mapping would end the process.
            for _ in range(num_steps):
                file.write(bytes(_SLOT_BYTES))
            file.write(bytes(_HEADER.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, num_steps, _SLOT_BYTES)

    def write(self, record: StepRecord) -> None:
        """Write a step, or its new state, to its slot."""
        data = self._encode(record)
        if len(data) > _SLOT_BYTES - _LENGTH.size:  # a character of an id can take four bytes
            data = self._encode(msgspec.structs.replace(record, entries=[]))
        begin = _HEADER.size + record.step % self._num_steps * _SLOT_BYTES
        self._map[begin : begin + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data

    def close(self) -> None:
        """Unmap the file. The file is not removed."""
        self._map.close()

    @staticmethod
    def entries(entries: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """The first entries (request id, start, tokens) of a step, with ids cut to 72 characters.

        Ids that are not ASCII can still be too long for a slot. Then `write` leaves the entries
        out.
        """
        return [(name[:_MAX_ID], start, num) for name, start, num in entries[:_MAX_ENTRIES]]


def flight_path(socket: str | Path) -> Path:
    """The path of the flight recorder's file of the engine at `socket`."""
    return Path(f"{socket}.flight")


def read_flight(path: Path) -> list[StepRecord]:
    """Read the steps from a recorder's file, oldest first.

    The recorder's process may still be running. Then a slot that is being written can be missing
    from the result. The result is empty if the file cannot be read or is not a recorder's.
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
    """Write steps to a new JSON file in `directory`. The ten newest such files are kept.

    Args:
        records: from `read_flight`.
        directory: where to write; created if it does not exist.
        reason: a sentence that is stored with the steps, for example why the engine ended.

    Returns:
        The path of the file.

    Raises:
        OSError: the file cannot be written.
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
    """Write the last steps of a dead engine to a JSON file, and log the path.

    Args:
        path: the recorder's file.
        directory: where to write; empty = `flight/` in the cache directory.
        reason: why the engine ended.

    Returns:
        The path of the JSON file; None if there were no steps or the file could not be written.
    """
    records = read_flight(path)
    if not records:
        return None
    under_way = [record for record in records if not record.is_done]
    target = Path(directory) if directory else cache_dir() / "flight"
    try:
        kept = dump_flight(records, target, reason)
    except OSError as error:
        _LOG.warning("the last steps of the flight recorder could not be saved: %s", error)
        return None
    _LOG.error(
        "flight recorder: the last steps are in %s (recorded: %d, under way: %d)",
        kept,
        len(records),
        len(under_way),
    )
    return kept


def as_json(records: Sequence[StepRecord], reason: str | None = None) -> dict[str, object]:
    """One JSON object with the steps.

    Its keys are `reason` (None = none), `written_at` in unix seconds, and `steps`. Each step has
    named fields and `state`. The steps are in the order of `records`.
    """
    steps = [
        {name: getattr(record, name) for name in StepRecord.__struct_fields__}
        | {"state": "done" if record.is_done else "under way"}
        for record in records
    ]
    return {"reason": reason, "written_at": time.time(), "steps": steps}
