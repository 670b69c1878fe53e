"""Holds requests until the executor has built their grammars. Then the scheduler gets them."""

from __future__ import annotations

from ostinato.runtime.execution.executor import Executor
from ostinato.runtime.types.outputs import GRAMMAR_REFUSAL, FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = ("GrammarQueue",)


class GrammarQueue:
    """Requests that wait for their grammar, and the ids of all requests with a grammar."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: dict[str, Request] = {}
        self._prepared: set[str] = set()  # requests with a grammar that have not ended

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not built yet."""
        return len(self._waiting)

    def holds_back(self, request_id: str) -> bool:
        """Whether a request waits for its grammar."""
        return request_id in self._waiting

    def add(self, request: Request) -> None:
        """Have the request's grammar built. When it is built, `take_ready` returns the request."""
        self._waiting[request.request_id] = request
        self._prepared.add(request.request_id)
        self._executor.prepare_grammar(request.request_id, request.grammar)

    def take_ready(self, timeout_s: float) -> tuple[list[Request], list[SequenceOutput]]:
        """The requests whose grammar is built, and error outputs for requests whose grammar failed.

        Args:
            timeout_s: how long to wait for the oldest grammar.
        """
        ready: list[Request] = []
        ended: list[SequenceOutput] = []
        for built in self._executor.take_built_grammars(timeout_s):
            request = self._waiting.pop(built.request_id, None)
            if request is None:
                continue  # aborted
            if built.error is None:
                ready.append(request)
                continue
            self.release(built.request_id)
            ended.append(
                SequenceOutput(
                    built.request_id,
                    [],
                    FinishReason.error,
                    error=built.error,
                    refusal=GRAMMAR_REFUSAL if built.is_refusal else None,
                )
            )
        return ready, ended

    def release(self, request_id: str) -> bool:
        """Release the grammar of a request that has ended; returns whether it still waited."""
        if request_id not in self._prepared:
            return False
        self._prepared.remove(request_id)
        self._executor.release_grammar(request_id)
        return self._waiting.pop(request_id, None) is not None
