"""`RankEncoder`: encodes images or audio on one rank, in units between the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Generator
from typing import NamedTuple

import numpy as np
import torch

from ostinato.runtime.execution.encoding.input_encoder import InputEncoder
from ostinato.runtime.execution.executor import AdvanceEncodings, BeginEncoding

__all__ = ("RankEncoder",)


class _Job(NamedTuple):
    digest: bytes
    units: Generator[None, None, None]


class RankEncoder:
    """The encodings of one rank. One thread calls it.

    Args:
        encoder: computes and stores the encodings; None = this rank has no layer that reads them.
    """

    def __init__(self, encoder: InputEncoder | None) -> None:
        self._encoder = encoder
        self._jobs = deque[_Job]()
        self._completed: list[bytes] = []  # encodings that no answer has named yet
        self._rows: dict[bytes, np.ndarray] = {}  # [num_rows] int64, for each encoding

    def begin(self, call: BeginEncoding) -> None:
        """Take an input. `advance` encodes it."""
        self._forget(call.dropped)
        self._rows[call.digest] = np.array(call.rows, dtype=np.int64)
        if self._encoder is None:
            self._completed.append(call.digest)
        else:
            self._jobs.append(_Job(call.digest, self._encoder.begin(call)))

    @torch.inference_mode()
    def advance(self, call: AdvanceEncodings) -> list[bytes]:
        """Compute a part of the encodings; returns those that are complete since last time.

        Computes at least one unit.
        """
        self._forget(call.dropped)
        if len(self._jobs) > 1:
            places = {digest: place for place, digest in enumerate(call.order)}
            last = len(places)
            self._jobs = deque(sorted(self._jobs, key=lambda job: places.get(job.digest, last)))
        left_s = call.seconds
        while self._jobs:
            unit_s = self._compute_unit(self._jobs[0])
            left_s -= unit_s
            if left_s < unit_s:  # the next unit would probably take too long
                break
        completed, self._completed = self._completed, []
        return completed

    def _compute_unit(self, job: _Job) -> float:
        """Compute one unit of the first job; returns its seconds on the device."""
        assert self._encoder is not None, "a rank without an encoder has no jobs"
        begin, events = time.perf_counter(), None
        if self._encoder.device.type == "cuda":  # without the step that is in flight
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        try:
            next(job.units)
        except StopIteration:
            self._jobs.popleft()
            self._completed.append(job.digest)
        if events is None:
            return time.perf_counter() - begin
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encode a small input, so that all kernels are loaded."""
        if self._encoder is not None:
            self._encoder.warm_up()

    @torch.inference_mode()
    def touch(self) -> None:
        """Write zeros to the memory of encodings. No request has any yet."""
        if self._encoder is not None:
            self._encoder.touch()

    def rows_of(self, digest: bytes) -> np.ndarray:
        """[num_rows] int64: the rows of an encoding."""
        return self._rows[digest]

    def close(self) -> None:
        """Drop the unfinished work."""
        self._jobs.clear()

    def _forget(self, digests: Collection[bytes]) -> None:
        if digests:
            self._jobs = deque(job for job in self._jobs if job.digest not in digests)
            self._completed = [one for one in self._completed if one not in digests]
        for digest in digests:
            self._rows.pop(digest, None)
