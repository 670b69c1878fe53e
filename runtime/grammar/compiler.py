"""Sends constraints to the grammar processes, and caches the checked grammars."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from ostinato.runtime.errors import HelperProcessError, InvalidRequestError
from ostinato.runtime.sandbox import Fault, Limits, SandboxError, SandboxProcess, call
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("GrammarAnswer", "GrammarCompiler", "GrammarModel")

_LOG = logging.getLogger(__name__)

LIMITS = Limits(cpu_s=3, wall_s=120.0, memory_bytes=1 << 30, answer_bytes=8 << 20)
MAX_BYTES = 4 << 20  # the largest constraint, as JSON
MAX_CACHED = 1024
MAX_CACHED_BYTES = 64 << 20
_NUM_PROCESSES = 2  # so that a slow grammar does not delay the next one
# A job is tried this many times if its process is killed from outside. Even if all processes were
# killed, the last try starts a new process.
_NUM_TRIES = 1 + _NUM_PROCESSES


class GrammarModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that grammars are for. A grammar process receives this as its first frame."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar, or the error that the client gets, as a sentence."""

    grammar: str = ""
    error: str = ""
    code: str = "invalid_value"


class _Job(NamedTuple):
    """A constraint that is sent to a grammar process."""

    data: bytes  # JSON of up to 4 MiB
    key: bytes  # hash of `data`, the key in the cache

    @classmethod
    def of(cls, params: StructuredOutputsParams) -> _Job:
        """Raises InvalidRequestError if the constraint is too large or cannot become JSON."""
        data = _encoded(params)
        return cls(data, hashlib.sha256(data).digest())


class GrammarCompiler:
    """Builds and checks grammars for one model; caches the latest results, also refusals.

    Use either `compile` on one thread or `compile_async` on one event loop. Do not mix them.

    Attributes:
        num_hits: constraints that the cache had.
        num_misses: constraints that the cache did not have.
    """

    def __init__(self, model: ServedModel) -> None:
        first = msgspec.json.encode(
            GrammarModel(
                tokenizer=model.tokenizer,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
            )
        )
        self._processes = [
            SandboxProcess("ostinato.runtime.grammar.process", LIMITS, first)
            for _ in range(_NUM_PROCESSES)
        ]
        self._idle = list(self._processes)
        self._turn = asyncio.Semaphore(_NUM_PROCESSES)
        self._checks: set[asyncio.Task[GrammarAnswer | None]] = set()
        self._cache: OrderedDict[bytes, GrammarAnswer] = OrderedDict()  # by `_Job.key`
        self._cached_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def compile(self, params: StructuredOutputsParams) -> str:
        """The checked grammar of a constraint; blocks.

        Raises:
            InvalidRequestError: the constraint is not valid, cannot be enforced, or exceeds a
                limit.
            HelperProcessError: no process could check the constraint.
        """
        job = _Job.of(params)
        answer = self._cached(job)
        for number in range(_NUM_TRIES):
            if answer is not None:
                break
            try:
                answer = msgspec.json.decode(self._processes[0].call(job.data), type=GrammarAnswer)
            except SandboxError as error:
                answer = self._refusal(job, error, is_last=number + 1 == _NUM_TRIES)
            else:
                self._keep(job, answer)
        return _grammar(answer)

    async def compile_async(self, params: StructuredOutputsParams) -> str:
        """Like `compile`, for an event loop.

        After a wait for a process, the call looks into the cache again. A cancelled call leaves the
        queue for a process. A check that has begun goes on, because ending it would end a process
        that takes seconds to start.
        """
        job = _Job.of(params)
        answer = self._cached(job)
        if answer is not None:
            return _grammar(answer)
        for number in range(_NUM_TRIES):
            await self._turn.acquire()
            answer = self._cache.get(job.key)
            if answer is not None:  # another request compiled the same constraint
                self._turn.release()
                break
            check = asyncio.create_task(self._check(job, is_last=number + 1 == _NUM_TRIES))
            self._checks.add(check)
            check.add_done_callback(self._end_check)
            answer = await asyncio.shield(check)
            if answer is not None:
                break
        return _grammar(answer)

    async def _check(self, job: _Job, *, is_last: bool) -> GrammarAnswer | None:
        """Check a constraint in an idle process. For errors and None see `_refusal`."""
        process = self._idle.pop()
        try:
            data = await call(process, job.data)
        except SandboxError as error:
            return self._refusal(job, error, is_last=is_last)
        finally:
            self._idle.append(process)
            self._turn.release()
        answer = msgspec.json.decode(data, type=GrammarAnswer)
        self._keep(job, answer)
        return answer

    def _end_check(self, check: asyncio.Task[GrammarAnswer | None]) -> None:
        self._checks.discard(check)
        if not check.cancelled():
            check.exception()  # asyncio logs an exception that is not read

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def _cached(self, job: _Job) -> GrammarAnswer | None:
        answer = self._cache.get(job.key)
        if answer is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._cache.move_to_end(job.key)
        return answer

    def _keep(self, job: _Job, answer: GrammarAnswer) -> None:
        if job.key in self._cache:
            return
        self._cache[job.key] = answer
        self._cached_bytes += len(answer.grammar)
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= len(dropped.grammar)

    def _refusal(self, job: _Job, error: SandboxError, *, is_last: bool) -> GrammarAnswer | None:
        """The error of a job without an answer; None = try again.

        Raises:
            HelperProcessError: the job is not the cause, and this was the last try.
        """
        if error.reason.fault is not Fault.job:
            _LOG.warning("the process that checks structured_outputs %s", error.reason.text)
            if not is_last:
                return None
            raise HelperProcessError(
                "structured_outputs cannot be checked now: the process for it "
                f"{error.reason.text}; try again later"
            )
        answer = GrammarAnswer(
            error="structured_outputs cannot be used: checking it takes "
            f"{error.reason.text}; make it simpler",
            code="constraint_too_complex",
        )
        self._keep(job, answer)
        return answer


def _encoded(params: StructuredOutputsParams) -> bytes:
    try:
        job = msgspec.json.encode(params)  # integers of msgpack have at most 64 bits
    except ValueError as error:  # Python writes numbers of at most 4300 digits
        raise InvalidRequestError(
            f"structured_outputs cannot be written as JSON: {error}", param="structured_outputs"
        ) from error
    if len(job) > MAX_BYTES:
        raise InvalidRequestError(
            f"structured_outputs has {len(job)} bytes, but at most {MAX_BYTES} are allowed; make "
            "it smaller",
            param="structured_outputs",
            code="constraint_too_complex",
        )
    return job


def _grammar(answer: GrammarAnswer | None) -> str:
    assert answer is not None, "the last try gives a grammar or a refusal"
    if answer.error:
        raise InvalidRequestError(answer.error, param="structured_outputs", code=answer.code)
    return answer.grammar
