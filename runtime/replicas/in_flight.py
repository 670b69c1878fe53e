"""Keeps unfinished requests, so that they continue in another engine when an engine process dies.

The client keeps each request with the tokens that the request has returned. When an engine process
dies, its requests are held until the next process serves, or go to another replica. Then they are
submitted again with their tokens. The scheduler continues them like preempted sequences.

    held -> submitted (sent to an engine) -> running (part of its steps) -> ended
      ^        |                                |
      +--------+--------------------------------+ the engine died

A request that was running when an engine died can be the cause, so it is a suspect. After a death
by SIGKILL, only a request that was also running at the previous death is a suspect. Suspects stay
with their replica and are quarantined: they are submitted one at a time, before all other requests.
The next suspect is submitted when the suspect before it is cleared. A suspect is cleared when it
has ended, or has returned a token. A prompt in chunks or a beam search is cleared when it has
computed more positions than at the death. So a request that kills the engine again runs alone, and
the other requests continue.

A request can be released to another replica and come back while the engine still works on it, from
before the abort. So the engine's outputs for a released request are ignored, up to the one that
ends it. If the request comes back earlier, it is held until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = ("InFlightRequest", "InFlightRequests", "given_up_output")

Q = TypeVar("Q")  # the type of the queue that gets a request's outputs


class InFlightRequest(Generic[Q]):
    """One engine request that has not ended."""

    __slots__ = (
        "crashed_at",
        "is_running",
        "is_submitted",
        "is_suspect",
        "num_crashes",
        "output_token_ids",
        "progress",
        "reader",
        "request",
    )

    def __init__(self, request: Request, reader: Q) -> None:
        self.request = request
        self.reader = reader
        self.output_token_ids: list[int] = []  # all tokens that the reader has received
        self.is_submitted = False  # the present engine process has the request
        self.is_running = False  # the request has been part of that process's steps
        self.num_crashes = 0  # engine deaths while it was running, since it was last cleared
        self.is_suspect = False  # it is a possible cause of the last of these deaths
        self.progress = 0  # positions that engines are known to have computed
        self.crashed_at = 0  # `progress` at the last death

    @property
    def is_queued(self) -> bool:
        """Whether it waits for its first token. A beam search returns it at its end only."""
        return self.progress <= len(self.request.prompt_token_ids)


class InFlightRequests(Generic[Q]):
    """All requests that have not ended, in the order in which they came."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlightRequest[Q]] = {}
        self._held: dict[str, InFlightRequest[Q]] = {}  # not submitted; suspects come first
        self._quarantined: str | None = None  # the suspect that is submitted
        self._ending: set[str] = set()  # released, and not yet ended by the present process

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_held(self) -> int:
        """Requests that are not submitted to an engine."""
        return len(self._held)

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token."""
        return sum(1 for one in self._requests.values() if one.is_queued)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for their first token."""
        return sum(
            len(one.request.prompt_token_ids) for one in self._requests.values() if one.is_queued
        )

    def ids(self) -> list[str]:
        """Request ids, in the order in which they came."""
        return list(self._requests)

    def submitted_ids(self) -> list[str]:
        """Ids of the requests that the engine has."""
        return [name for name, one in self._requests.items() if one.is_submitted]

    def get(self, request_id: str) -> InFlightRequest[Q] | None:
        """A request by its id; None when it has ended."""
        return self._requests.get(request_id)

    def add(self, request: Request, reader: Q) -> None:
        """Add a new request; it is held until `submit` returns it."""
        self.adopt(InFlightRequest(request, reader))

    def adopt(self, one: InFlightRequest[Q]) -> None:
        """Add a request that another replica has released; it is held until `submit` returns it."""
        self._requests[one.request.request_id] = self._held[one.request.request_id] = one

    def release(self) -> list[InFlightRequest[Q]]:
        """Forget every request except suspects; returns the forgotten ones for `adopt`.

        The caller must abort those that the engine has.
        """
        released = [one for one in self._requests.values() if not one.is_suspect]
        for one in released:
            request_id = one.request.request_id
            del self._requests[request_id]
            self._held.pop(request_id, None)
            if one.is_submitted:
                self._ending.add(request_id)
            one.is_submitted = one.is_running = False
        return released

    def submit(self, most: int) -> list[Request]:
        """The requests to send to the engine now, with the tokens that they have returned.

        They count as submitted from now on.

        Args:
            most: the largest number of requests; the next call returns further requests.
        """
        if self._quarantined is not None or not self._held:
            return []
        free = (one for name, one in self._held.items() if name not in self._ending)
        submitted = list(itertools.islice(free, most))
        if not submitted:
            return []
        first = submitted[0]
        if first.is_suspect:
            submitted = [first]
            self._quarantined = first.request.request_id
        requests: list[Request] = []
        for one in submitted:
            one.is_submitted = True
            del self._held[one.request.request_id]
            requests.append(
                msgspec.structs.replace(one.request, output_token_ids=one.output_token_ids[:])
                if one.output_token_ids
                else one.request
            )
        return requests

    def mark_running(self, request_ids: Iterable[str]) -> None:
        """Note that requests take part in the engine's next step."""
        for request_id in request_ids:
            one = self._requests.get(request_id)
            if one is not None and one.is_submitted:
                one.is_running = True

    def take_old(self, output: SequenceOutput) -> bool:
        """Take an output of the engine if its request was released; returns whether it was taken.

        All outputs of the engine are passed in order, because the last one of a released request
        allows its next submission.
        """
        if output.request_id not in self._ending:
            return False
        if output.finish_reason is not None:
            self._ending.remove(output.request_id)
        return True

    def take(self, output: SequenceOutput) -> InFlightRequest[Q] | None:
        """Record an output of the engine; returns its request, or None if the request has ended."""
        one = self._requests.get(output.request_id)
        if one is None:
            return None
        if output.new_token_ids:
            one.output_token_ids += output.new_token_ids
            one.progress = len(one.request.prompt_token_ids) + len(one.output_token_ids)
            self._clear(one)
        if output.finish_reason is not None:
            self._remove(output.request_id)
        return one

    def advance(self, progress: Mapping[str, int]) -> None:
        """Record steps that gave no output.

        Args:
            progress: request id -> positions that are computed.
        """
        for request_id, position in progress.items():
            one = self._requests.get(request_id)
            if one is not None and one.is_submitted:
                one.progress = max(one.progress, position)
                # At the same position the next step can kill the engine again.
                if position > one.crashed_at:
                    self._clear(one)

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests whose outputs are not read any more.

        Returns:
            The requests that the engine has, which the caller must abort.
        """
        submitted: list[str] = []
        for request_id in request_ids:
            one = self._requests.get(request_id)
            if one is not None:
                self._remove(request_id)
                if one.is_submitted:
                    submitted.append(request_id)
        return submitted

    def on_engine_end(self) -> None:
        """Hold every request again, after an engine process that was asked to end has ended."""
        self._ending.clear()
        for one in self._requests.values():
            one.is_submitted = one.is_running = False
        self._hold_all()

    def on_engine_death(self, num_allowed: int, num_free: int = 0) -> list[InFlightRequest[Q]]:
        """Hold every request again. Requests that were running can become suspects.

        Args:
            num_allowed: a request is given up after more deaths in a row than this.
            num_free: a running request becomes a suspect after more deaths in a row than this.

        Returns:
            The requests that are given up. They are forgotten.
        """
        given_up: list[InFlightRequest[Q]] = []
        self._ending.clear()
        for one in self._requests.values():
            if one.is_running:
                one.num_crashes += 1
                one.crashed_at = one.progress
                one.is_suspect = one.num_crashes > num_free
            one.is_submitted = one.is_running = False
            if one.num_crashes > num_allowed:
                given_up.append(one)
        for one in given_up:
            del self._requests[one.request.request_id]
        self._hold_all()
        return given_up

    def clear(self) -> list[InFlightRequest[Q]]:
        """Forget every request; returns them."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._held.clear()
        self._ending.clear()
        self._quarantined = None
        return requests

    def _hold_all(self) -> None:
        suspects = {name: one for name, one in self._requests.items() if one.is_suspect}
        self._held = suspects | self._requests  # the suspects come first
        self._quarantined = None

    def _remove(self, request_id: str) -> None:
        self._clear(self._requests.pop(request_id))
        self._held.pop(request_id, None)

    def _clear(self, one: InFlightRequest[Q]) -> None:
        one.num_crashes, one.is_suspect = 0, False
        if self._quarantined == one.request.request_id:
            self._quarantined = None


def given_up_output(request: Request, num_crashes: int, reason: str) -> SequenceOutput:
    """The error output of a request that was running when engines died too often in a row."""
    name = request.request_id.rpartition("#")[0]
    deaths = "died" if num_crashes == 1 else f"died {num_crashes} times in a row"
    return SequenceOutput(
        request.request_id,
        [],
        FinishReason.error,
        error=(
            f"request {name} was running when the engine {deaths}, and is given up; the last time: "
            f"{reason}"
        ),
    )
