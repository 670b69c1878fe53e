"""The engine's side of grammars: built on a thread, kept for their requests, one matcher a row.

A grammar comes here checked (`runtime/grammar/process.py`), so that building it is bounded; it
releases the interpreter's lock meanwhile, and its request joins the queue when it is there. Loading
the vocabulary does not: the first grammar of an engine holds up steps once, 0.7 s for 131,072
tokens. At the start it would hold up every start, of engines that never see a grammar too.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.matcher import build_matcher, load_grammar_tokenizer, problem
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ("GrammarStore",)

_LOG = logging.getLogger(__name__)
_MAX_CACHED = 64  # grammars that no request uses


class GrammarStore:
    """Grammars of requests that have not ended, and of some that have.

    One thread calls it; the building goes on on another.

    Attributes:
        build_seconds: summed over grammars.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._builder: ThreadPoolExecutor | None = None
        self._cache: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._used: dict[str, Future[LLMatcher]] = {}  # by request id
        self._waiting: list[tuple[Request, float]] = []  # for their grammar; since when
        self.build_seconds = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not there yet."""
        return len(self._waiting)

    def request_ids(self) -> list[str]:
        """Of the requests that wait."""
        return [request.request_id for request, _ in self._waiting]

    def add(self, request: Request) -> None:
        """Begin to build the request's grammar; `take_ready` gives the request back."""
        if self._builder is None:
            self._builder = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        future = self._cache.get(request.grammar)
        if future is None:
            future = self._cache[request.grammar] = self._builder.submit(
                self._build, request.grammar
            )
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(request.grammar)
        self._used[request.request_id] = future
        self._waiting.append((request, time.perf_counter()))

    def take_ready(self, timeout_s: float = 0.0) -> tuple[list[Request], list[SequenceOutput]]:
        """Requests whose grammar is there, in the order in which they came, and the end of those
        whose grammar can not be built.

        Args:
            timeout_s: how long to wait for the first.
        """
        if timeout_s and self._waiting:
            wait([self._used[self._waiting[0][0].request_id]], timeout=timeout_s)
        ready: list[Request] = []
        ended: list[SequenceOutput] = []
        still: list[tuple[Request, float]] = []
        for request, since in self._waiting:
            future = self._used[request.request_id]
            if not future.done():
                still.append((request, since))
                continue
            error = future.exception()
            if error is None:
                ready.append(request)
                continue
            _LOG.warning("a checked grammar can not be built: %s", error)
            self.release(request.request_id)
            ended.append(
                SequenceOutput(
                    request.request_id,
                    [],
                    FinishReason.error,
                    error=str(error),
                    is_refusal=isinstance(error, InvalidRequestError),
                )
            )
        self._waiting = still
        return ready, ended

    def matcher(self, request: Request) -> LLMatcher:
        """A matcher of the request's own, at its grammar's beginning."""
        return self._used[request.request_id].result().deep_copy()

    def release(self, request_id: str) -> bool:
        """The request has ended; whether it was waiting for its grammar."""
        if self._used.pop(request_id, None) is None:
            return False
        before = len(self._waiting)
        self._waiting = [one for one in self._waiting if one[0].request_id != request_id]
        return len(self._waiting) < before

    def close(self) -> None:
        """End the thread."""
        if self._builder is not None:
            self._builder.shutdown(cancel_futures=True)

    def _load(self) -> None:
        """Load the vocabulary; raises InvalidRequestError when grammars can not use it."""
        if self._tokenizer is None:
            model = self._model
            self._tokenizer = load_grammar_tokenizer(
                model.tokenizer, model.vocab_size, model.eos_token_ids
            )

    def _build(self, grammar: str) -> LLMatcher:
        begin = time.perf_counter()
        self._load()
        assert self._tokenizer is not None, "loaded above"
        matcher = build_matcher(self._tokenizer, grammar)
        self.build_seconds += time.perf_counter() - begin
        error = problem(matcher)
        if error is not None:
            raise InvalidRequestError(f"structured_outputs: {error}", param="structured_outputs")
        return matcher
