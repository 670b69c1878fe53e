"""The adapters that an engine's ranks have loaded, and those that they are loading."""

from __future__ import annotations

import msgspec

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.executor import AdvanceAdapters, BeginAdapter, Executor
from ostinato.runtime.types.request import Request

__all__ = ("AdapterLoads",)


class AdapterLoads:
    """Which adapter each slot has. A load is complete when every rank has completed it."""

    def __init__(self, executor: Executor, num_slots: int) -> None:
        self._executor = executor
        self._num_slots = num_slots
        self._loaded: dict[int, str] = {}  # slot -> digest
        self._loading: dict[int, str] = {}
        self._answers: dict[int, list[str]] = {}  # slot -> answers of ranks for its load
        self._ended: list[tuple[int, str]] = []

    @property
    def num_loading(self) -> int:
        """Loads that have not ended."""
        return len(self._loading)

    def begin(self, slot: int, path: str, digest: str) -> None:
        """Begin to load an adapter into a slot, in place of the slot's adapter.

        Raises:
            InvalidRequestError: there is no such slot, or a load into the slot has not ended.
        """
        if not 0 <= slot < self._num_slots:
            raise InvalidRequestError(
                f"adapter slot {slot} must be in [0, {self._num_slots}); raise lora.max_adapters"
            )
        if slot in self._loading:
            raise InvalidRequestError(f"an adapter is being loaded into slot {slot}; wait for it")
        self._loaded.pop(slot, None)
        self._executor.call(BeginAdapter(slot, path, digest))
        self._loading[slot] = digest
        self._answers[slot] = []

    def advance(self, timeout_s: float) -> None:
        """Let the ranks copy parts of the adapters that they have read.

        Args:
            timeout_s: how long each rank waits until the next adapter has been read.
        """
        answers = self._executor.call(AdvanceAdapters(timeout_s))
        for answer in answers:
            ended = msgspec.json.decode(answer, type=dict[int, str]) if answer else {}
            for slot, failure in ended.items():
                self._answers[slot].append(failure)
        for slot in [slot for slot in self._loading if len(self._answers[slot]) == len(answers)]:
            failures = [failure for failure in self._answers.pop(slot) if failure]
            digest = self._loading.pop(slot)
            if not failures:
                self._loaded[slot] = digest
            self._ended.append((slot, failures[0] if failures else ""))

    def take_ended(self) -> list[tuple[int, str]]:
        """(slot, "" or why it failed) of each load that has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def check(self, request: Request) -> None:
        """Check that the adapter of a request is loaded.

        Raises:
            InvalidRequestError: it is not.
        """
        slot = request.adapter_slot
        if slot >= 0 and self._loaded.get(slot) not in request.cache_keys:
            raise InvalidRequestError(
                f"the adapter of request {request.request_id} is not loaded in this engine; load "
                "it again",
                param="model",
                code="model_not_found",
                status=404,
            )
