"""What the client keeps of every request that has not ended, so that it survives its engine.

A flight is one engine request with the tokens it has given so far. When an engine dies, the flights
that it had wait for the next one and go on from their last token: they are sent again with what
they gave, like a preempted sequence that resumes.

    held -> aboard (sent to an engine) -> running (part of its steps) -> ended
      ^        |                             |
      +--------+-----------------------------+ the engine died

Whoever was running is a suspect. Suspects board the next engine one by one, each when the one
before has been cleared: it has ended, given a token, or (a prompt in chunks, a beam search) come
further than it was when the engine died. The others follow. So a request that brings its engine
down every time does it alone the second time, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = ("Flight", "Flights", "given_up_news")

Q = TypeVar("Q")  # whoever reads a request's news


class Flight(Generic[Q]):
    """One request of an engine that has not ended."""

    __slots__ = (
        "crashed_at",
        "is_aboard",
        "is_running",
        "num_crashes",
        "output_token_ids",
        "progress",
        "reader",
        "request",
    )

    def __init__(self, request: Request, reader: Q) -> None:
        self.request = request
        self.reader = reader
        self.output_token_ids: list[int] = []  # all that were routed to the reader
        self.is_aboard = False  # the running engine has it
        self.is_running = False  # and computes it
        self.num_crashes = 0  # while it was running, without being cleared in between
        self.progress = 0  # positions that engines are known to have computed
        self.crashed_at = 0  # the progress at the last crash


class Flights(Generic[Q]):
    """All requests that have not ended, in the order in which they came."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight[Q]] = {}
        self._held: dict[str, Flight[Q]] = {}  # not aboard; suspects first
        self._on_trial: str | None = None  # the one suspect that is aboard

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def num_held(self) -> int:
        """Those that no engine has at the moment."""
        return len(self._held)

    @property
    def num_suspects(self) -> int:
        """Those that are not cleared since an engine died with them."""
        return sum(1 for one in self._flights.values() if one.num_crashes)

    @property
    def num_queued(self) -> int:
        """Those that wait for their first token."""
        return sum(1 for one in self._flights.values() if not one.output_token_ids)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those."""
        return sum(
            len(one.request.prompt_token_ids)
            for one in self._flights.values()
            if not one.output_token_ids
        )

    def ids(self) -> list[str]:
        """Request ids, in the order in which they came."""
        return list(self._flights)

    def get(self, request_id: str) -> Flight[Q] | None:
        """A flight by its request's id; None when it has ended."""
        return self._flights.get(request_id)

    def add(self, request: Request, reader: Q) -> None:
        """A new request; it is held until `board` gives it out."""
        self._flights[request.request_id] = self._held[request.request_id] = Flight(request, reader)

    def board(self) -> list[Request]:
        """Requests to send to the engine now, with what they have given; they count as aboard."""
        if self._on_trial is not None or not self._held:
            return []
        first = next(iter(self._held.values()))
        boarding = list(self._held.values())
        if first.num_crashes:
            boarding = [first]
            self._on_trial = first.request.request_id
        requests: list[Request] = []
        for flight in boarding:
            flight.is_aboard = True
            del self._held[flight.request.request_id]
            requests.append(
                msgspec.structs.replace(flight.request, output_token_ids=flight.output_token_ids[:])
                if flight.output_token_ids
                else flight.request
            )
        return requests

    def begin(self, request_ids: Iterable[str]) -> None:
        """Note requests that take part in the engine's next step."""
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            if flight is not None:
                flight.is_running = True

    def take(self, news: SequenceOutput) -> Flight[Q] | None:
        """Note an engine's news; whose it is, or None when that request has ended."""
        flight = self._flights.get(news.request_id)
        if flight is None:
            return None
        if news.new_token_ids:
            flight.output_token_ids += news.new_token_ids
            flight.progress = len(flight.request.prompt_token_ids) + len(flight.output_token_ids)
            self._clear(flight)
        if news.finish_reason is not None:
            self._remove(news.request_id)
        return flight

    def advance(self, progress: Mapping[str, int]) -> None:
        """Note steps that gave no news.

        Args:
            progress: positions that requests have come to, by their ids.
        """
        for request_id, position in progress.items():
            flight = self._flights.get(request_id)
            if flight is not None:
                flight.progress = max(flight.progress, position)
                # No further than before may be just before the step that brings engines down.
                if position > flight.crashed_at:
                    self._clear(flight)

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests whose reader is gone; those that an engine must be told of."""
        aboard: list[str] = []
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            if flight is not None:
                self._remove(request_id)
                if flight.is_aboard:
                    aboard.append(request_id)
        return aboard

    def crashed(self, num_allowed: int) -> list[Flight[Q]]:
        """The engine died: everybody aboard is held again, and a suspect who was running.

        Args:
            num_allowed: crashes in a row that a request survives.

        Returns:
            Those that are given up, and forgotten.
        """
        given_up: list[Flight[Q]] = []
        suspects: dict[str, Flight[Q]] = {}
        others: dict[str, Flight[Q]] = {}
        for request_id, flight in self._flights.items():
            if flight.is_running:
                flight.num_crashes += 1
                flight.crashed_at = flight.progress
            flight.is_aboard = flight.is_running = False
            if flight.num_crashes > num_allowed:
                given_up.append(flight)
            else:
                (suspects if flight.num_crashes else others)[request_id] = flight
        for flight in given_up:
            del self._flights[flight.request.request_id]
        self._held = suspects | others
        self._on_trial = None
        return given_up

    def clear(self) -> list[Flight[Q]]:
        """Forget everything; what there was."""
        flights = list(self._flights.values())
        self._flights.clear()
        self._held.clear()
        self._on_trial = None
        return flights

    def _remove(self, request_id: str) -> None:
        self._clear(self._flights.pop(request_id))
        self._held.pop(request_id, None)

    def _clear(self, flight: Flight[Q]) -> None:
        flight.num_crashes = 0
        if self._on_trial == flight.request.request_id:
            self._on_trial = None


def given_up_news(request: Request, num_crashes: int, reason: str) -> SequenceOutput:
    """The last news of a request that was aboard of too many crashes; its text names it."""
    name = request.request_id.rpartition("#")[0]
    return SequenceOutput(
        request.request_id,
        [],
        FinishReason.error,
        error=(
            f"request {name} was aboard when the engine died {num_crashes} times in a row and is "
            f"given up; the last time: {reason}"
        ),
    )
