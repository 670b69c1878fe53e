"""Builds the grammars of an engine's requests on a thread, and keeps the matcher of each request.

Each grammar has been checked (`runtime/grammar/process.py`), so building it takes bounded time. The
build releases the interpreter's lock, so steps go on. Loading the vocabulary does not release the
lock for most of its time: 0.7 s of processor time for 151,936 tokens. So the vocabulary is loaded
while the engine starts, at the same time as the weights. The merges of the tokenizer are read with
the first grammar, in Python, so other threads go on.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import msgspec

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.matcher import (
    RequestMatcher,
    build_matcher,
    load_grammar_tokenizer,
    prepare_forced_texts,
    problem,
)
from ostinato.runtime.types.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ("GrammarBuilt", "GrammarStore")

_LOG = logging.getLogger(__name__)
# Grammars that later requests with the same text can use, and their characters together. The memory
# of a grammar grows with its text.
_MAX_CACHED = 64
_MAX_CACHED_CHARACTERS = 16 << 20


class GrammarBuilt(msgspec.Struct, frozen=True, array_like=True):
    """The result of building one request's grammar."""

    request_id: str
    error: str | None = None  # why the build failed; None = the grammar is ready
    is_refusal: bool = False  # the request caused the error, not the engine


class GrammarStore:
    """Grammars of running and waiting requests, and a cache of earlier grammars.

    One thread calls the methods. A second thread builds the grammars.

    Attributes:
        build_seconds: time of the builds, summed over grammars.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """
        Args:
            tokenizer: directory or GGUF file of the model's tokenizer.
            vocab_size: V.
            eos_token_ids: tokens that end an answer.
        """
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._builder: ThreadPoolExecutor | None = None
        self._cache: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # by grammar text
        self._num_characters = 0  # of the texts in the cache
        self._used: dict[str, Future[LLMatcher]] = {}  # by request id
        self._unreported: dict[str, Future[LLMatcher]] = {}  # by request id, in order of `prepare`
        self._matchers: dict[str, RequestMatcher] = {}  # by request id
        self._loading: Future[None] | None = None
        self.build_seconds = 0.0

    def begin_loading(self) -> None:
        """Begin to load the vocabulary on the second thread.

        An error is not reported here. Each request with a grammar tries again, and is refused.
        """
        self._loading = self._start_builder().submit(self._load)

    def wait_until_loaded(self) -> None:
        """Wait for the end of `begin_loading`, if it was called."""
        if self._loading is not None:
            wait([self._loading])

    @property
    def is_loaded(self) -> bool:
        """Whether the vocabulary is loaded."""
        return self._tokenizer is not None

    def prepare(self, request_id: str, grammar: str) -> None:
        """Begin to build a request's grammar. `take_built` reports when it is built."""
        builder = self._start_builder()
        future = self._cache.get(grammar)
        if future is None:
            future = self._cache[grammar] = builder.submit(self._build, grammar)
            self._num_characters += len(grammar)
            while len(self._cache) > 1 and (
                len(self._cache) > _MAX_CACHED or self._num_characters > _MAX_CACHED_CHARACTERS
            ):
                self._num_characters -= len(self._cache.popitem(last=False)[0])
        else:
            self._cache.move_to_end(grammar)
        self._used[request_id] = future
        self._unreported[request_id] = future

    def take_built(self, timeout_s: float = 0.0) -> list[GrammarBuilt]:
        """The grammars whose builds ended since the last call, in the order of `prepare`.

        Args:
            timeout_s: seconds to wait for the oldest unreported grammar.
        """
        if timeout_s and self._unreported:
            wait([next(iter(self._unreported.values()))], timeout=timeout_s)
        built: list[GrammarBuilt] = []
        for request_id, future in self._unreported.items():
            if not future.done():
                continue
            error = future.exception()
            if error is None:
                built.append(GrammarBuilt(request_id))
                continue
            _LOG.warning("a grammar passed its check but cannot be built: %s", error)
            is_refusal = isinstance(error, InvalidRequestError)
            if not is_refusal:
                self._forget(future)  # the cause can have passed, so the next request tries again
            built.append(GrammarBuilt(request_id, str(error), is_refusal))
        for one in built:
            del self._unreported[one.request_id]
        return built

    def _forget(self, future: Future[LLMatcher]) -> None:
        """Remove a grammar from the cache, if it is there."""
        for grammar, cached in self._cache.items():
            if cached is future:
                self._num_characters -= len(grammar)
                del self._cache[grammar]
                return

    def matcher(self, request: Request) -> RequestMatcher:
        """The matcher of a prepared request. At first it is at the beginning of the grammar."""
        found = self._matchers.get(request.request_id)
        if found is None:
            built = self._used[request.request_id].result()
            found = self._matchers[request.request_id] = RequestMatcher(built.deep_copy())
        return found

    def release(self, request_id: str) -> None:
        """Drop the grammar of a request that has ended or was aborted."""
        self._used.pop(request_id, None)
        self._matchers.pop(request_id, None)
        self._unreported.pop(request_id, None)

    def close(self) -> None:
        """End the second thread."""
        if self._builder is not None:
            self._builder.shutdown(cancel_futures=True)

    def _start_builder(self) -> ThreadPoolExecutor:
        """The second thread. It starts with its first task."""
        if self._builder is None:
            self._builder = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return self._builder

    def _load(self) -> None:
        """Load the vocabulary; raises InvalidRequestError if grammars cannot use it."""
        if self._tokenizer is None:
            self._tokenizer = load_grammar_tokenizer(
                self._path, self._vocab_size, self._eos_token_ids
            )

    def _build(self, grammar: str) -> LLMatcher:
        begin = time.perf_counter()
        self._load()
        assert self._tokenizer is not None, "loaded above"
        prepare_forced_texts(self._tokenizer)
        matcher = build_matcher(self._tokenizer, grammar)
        self.build_seconds += time.perf_counter() - begin
        error = problem(matcher)
        if error is not None:
            raise InvalidRequestError(
                f"structured_outputs cannot be used: {error}", param="structured_outputs"
            )
        return matcher
