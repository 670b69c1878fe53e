"""The client of the grammar processes: caches checked grammars, restarts a process that died."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

import msgspec

from ostinato.runtime.errors import HelperProcessError, InvalidRequestError
from ostinato.runtime.sandbox import Fault, Limits, SandboxError, SandboxProcess, call
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("GrammarAnswer", "GrammarCompiler", "GrammarModel")

_LOG = logging.getLogger(__name__)

LIMITS = Limits(cpu_s=3, wall_s=30.0, memory_bytes=1 << 30, answer_bytes=8 << 20)
MAX_BYTES = 4 << 20  # of a constraint, as JSON
MAX_CACHED = 1024
MAX_CACHED_BYTES = 64 << 20
_NUM_PROCESSES = 2  # so that a hostile grammar does not hold up the next one
_NUM_TRIES = 2  # of a job whose process was killed from outside


class GrammarModel(msgspec.Struct, frozen=True, kw_only=True):
    """What grammars are made for: the first frame that the process gets."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar, or why there is none; the error is a sentence about `structured_outputs`."""

    grammar: str = ""
    error: str = ""
    code: str = "invalid_value"


class GrammarCompiler:
    """Makes and checks grammars for one model; remembers the latest, refusals too.

    `compile` for threads, `compile_async` for one event loop; not both of one compiler.

    Attributes:
        num_hits: of the cache.
        num_misses: the others, each a job for a process.
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
        self._cache: OrderedDict[bytes, GrammarAnswer] = OrderedDict()
        self._cached_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def compile(self, params: StructuredOutputsParams) -> str:
        """The grammar; blocks for the time that it takes.

        Raises:
            InvalidRequestError: it is not valid, can not be enforced, or takes too much.
            HelperProcessError: no process could check it.
        """
        job = _job(params)
        answer = self._cached(job)
        for number in range(_NUM_TRIES):
            if answer is not None:
                break
            try:
                answer = msgspec.json.decode(self._processes[0].call(job), type=GrammarAnswer)
            except SandboxError as error:
                answer = self._refusal(job, error, is_last=number + 1 == _NUM_TRIES)
            else:
                self._keep(job, answer)
        return _grammar(answer)

    async def compile_async(self, params: StructuredOutputsParams) -> str:
        """As `compile`; equal constraints at a time are one job."""
        job = _job(params)
        answer = self._cached(job)
        if answer is not None:
            return _grammar(answer)
        for number in range(_NUM_TRIES):
            async with self._turn:
                answer = self._cache.get(job)
                if answer is not None:  # another request had the same constraint built meanwhile
                    break
                process = self._idle.pop()
                try:
                    data = await call(process, job)
                except SandboxError as error:
                    answer = self._refusal(job, error, is_last=number + 1 == _NUM_TRIES)
                else:
                    answer = msgspec.json.decode(data, type=GrammarAnswer)
                    self._keep(job, answer)
                finally:
                    self._idle.append(process)
            if answer is not None:
                break
        return _grammar(answer)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def _cached(self, job: bytes) -> GrammarAnswer | None:
        answer = self._cache.get(job)
        if answer is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._cache.move_to_end(job)
        return answer

    def _keep(self, job: bytes, answer: GrammarAnswer) -> None:
        if job in self._cache:
            return
        self._cache[job] = answer
        self._cached_bytes += len(job) + len(answer.grammar)
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            old, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= len(old) + len(dropped.grammar)

    def _refusal(self, job: bytes, error: SandboxError, *, is_last: bool) -> GrammarAnswer | None:
        """The error of a job without an answer; None = try again.

        Raises:
            HelperProcessError: it is not the job's fault, and this was the last try.
        """
        if error.reason.fault is not Fault.job:
            _LOG.warning("the process that checks structured_outputs %s", error.reason.text)
            if not is_last:
                return None
            raise HelperProcessError(
                "structured_outputs can not be checked now: the process for it "
                f"{error.reason.text}; try again later"
            )
        answer = GrammarAnswer(
            error="structured_outputs can not be used: to check it takes "
            f"{error.reason.text}; make it simpler",
            code="constraint_too_complex",
        )
        self._keep(job, answer)
        return answer


def _job(params: StructuredOutputsParams) -> bytes:
    try:
        job = msgspec.json.encode(params)  # not msgpack, which ends at 64 bits
    except ValueError as error:  # from Python: a number of more than 4300 digits
        raise InvalidRequestError(
            f"structured_outputs can not be written as JSON: {error}", param="structured_outputs"
        ) from error
    if len(job) > MAX_BYTES:
        raise InvalidRequestError(
            f"structured_outputs has {len(job)} bytes, at most {MAX_BYTES} are allowed; make it "
            "smaller",
            param="structured_outputs",
            code="constraint_too_complex",
        )
    return job


def _grammar(answer: GrammarAnswer | None) -> str:
    assert answer is not None, "the last try gives a grammar or a refusal"
    if answer.error:
        raise InvalidRequestError(answer.error, param="structured_outputs", code=answer.code)
    return answer.grammar
