"""`RankAdapters`: loads low-rank adapters into the slots of a rank's model, while steps go on.

A thread reads an adapter's files. Between steps, `advance` copies it into its slot, a few layers at
a time. So no step waits for a file, and the pause before a step stays short.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from ostinato.models.adapters.adapter_files import AdapterError
from ostinato.models.adapters.peft_adapter import Adapter, read_adapter
from ostinato.models.base import LanguageModel
from ostinato.models.layers.adapter_slots import AdapterSlots, AdapterSpace
from ostinato.models.layers.linear_layers import LinearBase

__all__ = ("RankAdapters",)

_COPY_S = 0.002  # seconds of copying between two steps


class _Load(NamedTuple):
    slot: int
    digest: str
    adapter: Future[Adapter]


class RankAdapters:
    """The adapters of one rank. One thread calls it."""

    def __init__(self, model: LanguageModel, space: AdapterSpace) -> None:
        """
        Args:
            model: the loaded model of the rank, built with this space.
            space: its slots.
        """
        self._model = model
        self._space = space
        self._slots: list[tuple[str, AdapterSlots]] = [
            (name, module.adapters)
            for name, module in model.named_modules()
            if isinstance(module, LinearBase) and module.adapters is not None
        ]
        self._reader = ThreadPoolExecutor(1, "read-adapter")
        self._loads: list[_Load] = []  # in the order of `begin`
        self._copying: Iterator[None] | None = None  # of the first load

    def begin(self, slot: int, path: str, digest: str) -> None:
        """Begin to read an adapter. `advance` copies it into the slot.

        Args:
            slot: no sequence that will run again may use it.
            path: the directory of the adapter's files.
            digest: what `adapter_digest` gave for the directory.
        """
        self._clear(slot)
        adapter = self._reader.submit(read_adapter, Path(path), self._model, self._space.max_rank)
        self._loads.append(_Load(slot, digest, adapter))

    def advance(self, timeout_s: float) -> dict[int, str]:
        """Copy parts of the adapters that have been read.

        Args:
            timeout_s: how long to wait until the next adapter has been read; 0 = do not wait.

        Returns:
            Slot -> "" for each load that is complete, or why it failed. The slot of a failed load
            is empty.
        """
        ended: dict[int, str] = {}
        if self._loads and timeout_s:
            wait([self._loads[0].adapter], timeout_s)
        end = time.monotonic() + _COPY_S
        while self._loads and time.monotonic() < end:
            load = self._loads[0]
            if not load.adapter.done():
                break
            failure = self._copy_part(load)
            if failure is not None:
                ended[load.slot] = failure
                self._loads.pop(0)
                self._copying = None
        return ended

    def close(self) -> None:
        """Drop the unfinished loads, and end the thread."""
        self._loads.clear()
        self._reader.shutdown(cancel_futures=True)

    def _copy_part(self, load: _Load) -> str | None:
        """Copy one layer's part; None if more are left, "" after the last, else the failure."""
        try:
            adapter = load.adapter.result()
        except (AdapterError, OSError) as error:
            return str(error)
        if adapter.digest != load.digest:
            return "its files have changed since the adapter was named; load it again"
        if self._copying is None:
            self._copying = self._copy(load.slot, adapter)
        for _ in self._copying:
            return None
        return ""

    def _copy(self, slot: int, adapter: Adapter) -> Iterator[None]:
        for name, slots in self._slots:
            if (part := adapter.modules.get(name)) is not None:
                slots.write(slot, part)
                yield

    def _clear(self, slot: int) -> None:
        for _, slots in self._slots:
            slots.clear(slot)
