"""Holds requests until what they need besides the model exists: a grammar, encoded images or audio.

Then the scheduler gets them. Steps of other requests go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ostinato.runtime.engine.accepted_inputs import AcceptedInputs
from ostinato.runtime.engine.encoding_queue import EncodingQueue
from ostinato.runtime.engine.grammar_queue import GrammarQueue
from ostinato.runtime.execution.executor import Executor
from ostinato.runtime.scheduling.sequences.sequence import duplicate_id
from ostinato.runtime.types.outputs import SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = ("PendingRequests", "ReadyRequests")


# How long an engine without other work waits for a grammar before it looks for new requests.
_GRAMMAR_WAIT_S = 0.02


class ReadyRequests(msgspec.Struct, frozen=True):
    """What became of pending requests."""

    complete: list[Request]  # the scheduler can have them
    built: list[Request]  # their grammars were built
    failed: list[SequenceOutput]  # the errors of requests whose grammar could not be built
    encoding: str | None = None  # the request for which encodings were computed


class PendingRequests:
    """Requests that the scheduler does not have yet.

    Args:
        executor: builds grammars, and encodes images and audio.
        inputs: what the model takes besides text.
        rank: requests of a lower rank are encoded first.
    """

    def __init__(
        self,
        executor: Executor,
        inputs: AcceptedInputs,
        *,
        rank: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self.encodings = EncodingQueue(executor, inputs.num_rows, rank=rank)
        self._inputs = inputs
        self._grammars = GrammarQueue(executor)
        self._requests: dict[str, Request] = {}  # without pixels and features
        self._announced: str | None = None  # the request whose encodings were computed last

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._requests)

    @property
    def num_waiting_for_grammar(self) -> int:
        """Requests whose grammar is not built."""
        return self._grammars.num_waiting

    @property
    def num_waiting_for_encodings(self) -> int:
        """Requests whose images or audio are not encoded."""
        return self.encodings.num_waiting

    def request_ids(self) -> list[str]:
        """Ids of the requests that wait."""
        return list(self._requests)

    def check(self, request: Request) -> None:
        """Check a new request.

        Raises:
            InvalidRequestError: a waiting request has its id, or the model does not take its images
                and its audio (`AcceptedInputs.check`).
        """
        if request.request_id in self._requests:
            raise duplicate_id(request.request_id)
        self._inputs.check(request)

    def add(self, request: Request) -> bool:
        """Hold a request if it needs a grammar or encodings; returns whether it is held."""
        if not (request.grammar or request.encoded_inputs):
            return False
        if request.grammar:
            self._grammars.add(request)
        if request.encoded_inputs:
            request = self.encodings.add(request)
        self._requests[request.request_id] = request
        return True

    def take_ready(
        self, announce: Callable[[list[str], float], object] | None, *, is_busy: bool
    ) -> ReadyRequests:
        """Compute a part of the missing encodings, and take the requests that are complete.

        Args:
            announce: called with a request, and 0.0 seconds, before encodings are computed for it.
                So the client knows which request was served if the engine dies.
            is_busy: other requests wait for their next step.
        """
        arrived: list[str] = []
        encoding = None
        if self.encodings.num_waiting:
            encoding = self.encodings.encoding
            if encoding not in (None, self._announced) and announce is not None:
                announce([encoding], 0.0)
            self._announced = encoding
            arrived += self.encodings.advance(is_busy=is_busy)
        built: list[Request] = []
        failed: list[SequenceOutput] = []
        if self._grammars.num_waiting:
            waits = not (is_busy or self.encodings.num_waiting or arrived)
            built, failed = self._grammars.take_ready(_GRAMMAR_WAIT_S if waits else 0.0)
        for output in failed:
            del self._requests[output.request_id]
            self.encodings.release(output.request_id)
        complete: list[Request] = []
        for request_id in (*arrived, *(request.request_id for request in built)):
            waits = self._grammars.holds_back(request_id) or self.encodings.holds_back(request_id)
            # A request is named twice if both parts arrived now, and is gone if its grammar failed.
            if not waits and request_id in self._requests:
                complete.append(self._requests.pop(request_id))
        return ReadyRequests(complete, built, failed, encoding)

    def release(self, request_id: str) -> bool:
        """Release what a request that has ended held; returns whether it still waited."""
        self._grammars.release(request_id)
        self.encodings.release(request_id)
        return self._requests.pop(request_id, None) is not None
