"""Streams, events and graphs of the simulated CUDA device in late_device.py."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from tests.runtime.late_device import LateDevice

__all__ = ("Event", "Graph", "Stream", "spoil")

_NONSENSE = -0x5A5A5A5A


class Stream:
    """A queue of work, which runs in order."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()  # two threads can wait for the stream
        self.num_run = 0

    @property
    def num_added(self) -> int:
        return self.num_run + len(self._work)

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def run_until(self, number: int) -> None:
        with self._lock:
            while self.num_run < number:
                work = self._work.popleft()
                with torch.inference_mode(), _disable_current_modes():
                    work()
                self.num_run += 1

    def synchronize(self) -> None:
        self._device.check_not_capturing("a stream is waited for")
        self.run_until(self.num_added)

    def wait_stream(self, other: Stream) -> None:
        number = other.num_added
        if other is not self:
            self._device.submit(lambda: other.run_until(number), self)


class Event:
    """A place in a stream."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._place: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        chosen = stream or self._device.current
        self._place = (chosen, chosen.num_added)

    def synchronize(self) -> None:
        if self._place is not None:
            stream, number = self._place
            stream.run_until(number)

    def query(self) -> bool:
        return self._place is None or self._place[0].num_run >= self._place[1]

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "the device has not reached the end event"
        return 1.0


class Graph:
    """A captured list of work."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.work: list[Callable[[], None]] = []
        self.inner: list[Tensor] = []  # results of captured ops: memory of the graphs' pool

    def replay(self) -> None:
        for work in self.work:
            self._device.submit(work)
        # Another graph of the pool may use the memory next.
        self._device.submit(partial(spoil_all, self.inner))


def spoil_all(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        spoil(tensor)


def spoil(tensor: Tensor) -> None:
    """Fill with NaN, with True, or with a negative integer (0 in unsigned dtypes)."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(max(_NONSENSE, torch.iinfo(tensor.dtype).min))
