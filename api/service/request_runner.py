"""Runs requests in the engine: merges the outputs of all prompts, measures and logs requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, cast

from ostinato.api.base.errors import UnavailableError, status_of
from ostinato.api.base.request_context import RequestContext
from ostinato.api.observability.trace_recorder import TraceRecorder
from ostinato.api.preparation.generation import Generation, num_media_bytes
from ostinato.api.schemas.response_format import refusing_by_field
from ostinato.api.service.admission import Admission
from ostinato.api.service.concurrent_prompts import (
    IndexedOutput,
    Outputs,
    all_in_time,
    merged_outputs,
)
from ostinato.api.service.request_stats import RequestStats, StatsSinks
from ostinato.runtime.client.requests import ALONE, PreparedParts, RequestShare
from ostinato.runtime.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
)
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.outputs import (
    DEADLINE_REASON,
    GRAMMAR_REFUSAL,
    FinishReason,
    PooledOutput,
    RequestOutput,
)
from ostinato.runtime.types.params import PoolingParams, SamplingParams
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("Generator", "RequestRunner")

_MAX_GRAMMAR_CHARACTERS = 64 << 20  # summed over the sequences of a request
_LEAST_WINDOW = 256  # one request may always have this many sequences in the engines


class Generator(Protocol):
    """The part of `EngineClient` (runtime/client/client.py) that requests need."""

    @property
    def stats(self) -> EngineStats: ...

    async def compile_grammar(self, constraint: StructuredOutputsParams) -> str: ...

    def generate(  # noqa: PLR0913 - the parts of a request
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        share: RequestShare = ...,
        trace: bool = False,
        deadline: float | None = None,
        prepared: PreparedParts | None = None,
        adapter: ServedAdapter | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    async def pool(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        place: int = 0,
        trace: bool = False,
        adapter: ServedAdapter | None = None,
    ) -> PooledOutput: ...


class RequestRunner:
    """Sends requests to the engine and measures their outputs.

    Args:
        client: generates and pools.
        admission: checks prompts against the limits.
        sinks: the receivers of the stats of each request.

    Attributes:
        num_open: number of requests in progress.
        trace: records each completion (`server.record_trace`); None = off.
    """

    def __init__(self, client: Generator, admission: Admission, sinks: StatsSinks) -> None:
        self._client = client
        self._admission = admission
        self._sinks = sinks
        self._groups = itertools.count(1)
        self.num_open = 0
        self.trace: TraceRecorder | None = None

    async def prepare(
        self,
        constraint_field: str,
        generations: Sequence[Generation],
        context: RequestContext,
    ) -> None:
        """Check the limits and compile the grammar. Called before the response begins.

        Args:
            constraint_field: the field of the request that has the constraint.
            generations: one per prompt. All have the same constraint, or none.
            context: the request's context. Its `grammar`, `grammar_seconds` and `constraint_field`
                are set.

        Raises:
            InvalidRequestError: the constraint is not valid or too complex, or a prompt is longer
                than the server allows.
            OverloadedError: the queue is full, or requests in progress have too many images,
                videos or audio.
            HelperProcessError: no process could check the constraint.
        """
        self._admission.check_prompts([len(one.prompt_token_ids) for one in generations])
        if generations[0].sampling.structured_outputs is not None:
            await self._compile_grammar(constraint_field, generations, context)
        # After the wait, because other requests can have begun meanwhile.
        self._admission.check_media(num_media_bytes(generations))

    async def _compile_grammar(
        self,
        constraint_field: str,
        generations: Sequence[Generation],
        context: RequestContext,
    ) -> None:
        """Compile the grammar of a request; see `prepare`."""
        sampling = generations[0].sampling
        assert sampling.structured_outputs is not None, "the caller has checked it"
        context.constraint_field = constraint_field
        begin = time.monotonic()
        compiling = self._client.compile_grammar(sampling.structured_outputs)
        context.grammar = await refusing_by_field(constraint_field, compiling)
        context.grammar_seconds += time.monotonic() - begin
        num_sequences = sum(one.sampling.num_candidates for one in generations)
        if num_sequences > 1 and num_sequences * len(context.grammar) > _MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequestError(
                f"{constraint_field}: its grammar has {len(context.grammar)} characters, and "
                f"{num_sequences} sequences of one request may have {_MAX_GRAMMAR_CHARACTERS}"
                " together; make it simpler or ask for fewer completions at a time",
                param=constraint_field,
                code="constraint_too_complex",
            )

    async def generate(
        self,
        reply_id: str,
        generations: Sequence[Generation],
        context: RequestContext,
        *,
        at_once: int | None = None,
    ) -> AsyncGenerator[IndexedOutput, None]:
        """Outputs of all completions of all prompts. Closing the iterator aborts the rest.

        Args:
            reply_id: the id that the client sees.
            generations: one per prompt.
            context: the context of the HTTP request.
            at_once: most prompts in the engines at once; None = as many as the engines can run.

        Raises:
            InvalidRequestError: the grammar of a completion cannot be continued.
            DeadlineError: the time limit of the request passed before its first output.
            EngineError: the engine failed, or gave a completion up.
        """
        stats = RequestStats(
            self._sinks,
            reply_id,
            [one.prompt_token_ids for one in generations],
            context,
            [one.sampling for one in generations],
        )
        group = next(self._groups)
        size = sum(one.sampling.num_candidates for one in generations)

        def arguments(index: int) -> dict[str, Any]:
            place = index * generations[index].sampling.num_candidates
            return _arguments(generations[index], context, RequestShare(place, group, size))

        try:
            with (
                self._measured(stats),
                self._admission.holding_media(num_media_bytes(generations)),
            ):
                if len(generations) == 1:  # one prompt needs no queue that merges outputs
                    outputs = self._client.generate(**arguments(0))
                    async with aclosing(cast("Outputs", outputs)) as outputs:
                        async for output in outputs:
                            stats.add(0, output)
                            _raise_for_failure(output, context)
                            yield 0, output
                else:
                    window = _window(self._client, generations[0].sampling.num_candidates)
                    if at_once is not None:
                        window = asyncio.Semaphore(at_once)
                    merged = merged_outputs(
                        lambda index: self._client.generate(**arguments(index)),
                        lambda index: _cut(generations[index]),
                        len(generations),
                        window,
                    )
                    async with aclosing(merged):
                        async for prompt_index, output in merged:
                            stats.add(prompt_index, output)
                            _raise_for_failure(output, context)
                            yield prompt_index, output
        finally:
            if self.trace is not None:
                digest = "" if context.adapter is None else context.adapter.digest
                for prompt_index, lengths in stats.output_lengths().items():
                    one = generations[prompt_index]
                    # Only equal adapters, media and audio share prefixes.
                    media = "".join(each.cache_key.hex() for each in (*one.images, *one.sounds))
                    audio = "" if one.audio is None else one.audio.digest.hex()
                    salt = one.cache_salt + digest + media + audio
                    self.trace.add(stats.begin, one.prompt_token_ids, lengths, salt)

    async def probe(
        self, reply_id: str, generation: Generation, context: RequestContext
    ) -> RequestOutput:
        """The output of a prompt of one output token, on which the prompts of a request depend.

        Such a prompt has no metrics, and no log line unless it fails. Cancelling the call aborts
        it. For the arguments and the errors see `generate`.
        """
        self.num_open += 1
        try:
            return await self._output(generation, context)
        except BaseException:
            prompts, sampling = [generation.prompt_token_ids], [generation.sampling]
            stats = RequestStats(self._sinks, reply_id, prompts, context, sampling)
            with self._measured(stats):
                raise
        finally:
            self.num_open -= 1

    async def pool(
        self,
        reply_id: str,
        batch: Sequence[list[int]],
        params: PoolingParams,
        context: RequestContext,
        *,
        priority: int,
        cache_salt: str,
    ) -> list[PooledOutput]:
        """The pooled outputs of several prompts. Cancelling the call aborts all of them.

        Raises:
            DeadlineError: the time limit of the request passed.
            EngineError: the engine failed, or gave a prompt up. The other prompts are aborted.
        """
        stats = RequestStats(self._sinks, reply_id, batch, context)
        window = _window(self._client)

        async def one(index: int, token_ids: list[int]) -> PooledOutput:
            async with window:
                output = await self._client.pool(
                    f"{reply_id}:{index}",
                    token_ids,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    place=index,
                    trace=context.timeline is not None,
                    adapter=context.adapter,
                )
            stats.add_vector(index, output)
            _raise_for_failure(output, context)
            return output

        with self._measured(stats):
            return await all_in_time(
                [one(index, token_ids) for index, token_ids in enumerate(batch)], context
            )

    async def _output(self, generation: Generation, context: RequestContext) -> RequestOutput:
        """The output of a prompt that has its token, or the last output if none has one."""
        found: RequestOutput | None = None
        outputs = self._client.generate(**_arguments(generation, context, ALONE))
        async with aclosing(cast("Outputs", outputs)) as outputs:
            async for output in outputs:
                _raise_for_failure(output, context)
                if found is None or not found.new_token_ids:
                    found = output
        assert found is not None, "every request ends with an output"
        return found

    @contextmanager
    def _measured(self, stats: RequestStats) -> Iterator[None]:
        """A context in which the request counts as open. At its end, the stats get the outcome."""
        self.num_open += 1
        try:
            yield
            stats.close("done")
        except EngineDeadError as error:
            stats.close("error 503")
            if self._admission.is_draining:
                raise UnavailableError(
                    "the server is shutting down", code="shutting_down"
                ) from error
            raise
        except Exception as error:
            stats.close(f"error {status_of(error)}")
            raise
        except BaseException:
            stats.close("disconnected")
            raise
        finally:
            self.num_open -= 1


def _raise_for_failure(output: RequestOutput | PooledOutput, context: RequestContext) -> None:
    refusal = output.refusal
    if output.finish_reason is FinishReason.error and refusal is not None:
        raise InvalidRequestError(
            output.error or "the grammar cannot be continued",
            param=context.constraint_field if refusal == GRAMMAR_REFUSAL else refusal.param,
            code=refusal.code,
            status=refusal.status,
        )
    if output.finish_reason is FinishReason.error:
        raise EngineError(output.error or "the engine gave this request up")
    if output.finish_reason is FinishReason.abort:
        raise UnavailableError("the request was aborted by the server", code="aborted")


def _window(client: Generator, num_candidates: int = 1) -> asyncio.Semaphore:
    """Limits how many prompts of one HTTP request are in the engines at once.

    An engine reads its messages in their order, and for a limited time between two steps. Without
    this limit, a request would wait until the engine has read all prompts of an earlier request.

    Args:
        client: has the number of sequences that the engines run.
        num_candidates: number of sequences of each prompt.
    """
    num_sequences = max(_LEAST_WINDOW, client.stats.max_num_seqs)
    return asyncio.Semaphore(max(1, num_sequences // num_candidates))


def _cut(one: Generation) -> list[RequestOutput]:
    """Outputs that end all completions of a prompt at the deadline, before their first token."""
    return [
        RequestOutput(
            request_id=one.request_id,
            index=index,
            text_delta="",
            new_token_ids=[],
            finish_reason=FinishReason.length,
            stop_reason=DEADLINE_REASON,
            num_prompt_tokens=len(one.prompt_token_ids),
        )
        for index in range(one.sampling.n)
    ]


def _arguments(one: Generation, context: RequestContext, share: RequestShare) -> dict[str, Any]:
    """The arguments of `Generator.generate` for one prompt."""
    times_ms = [ms for ms in (one.deadline_ms, context.timeout_ms) if ms is not None]
    return {
        "request_id": one.request_id,
        "prompt_token_ids": one.prompt_token_ids,
        "sampling": one.sampling,
        "priority": one.priority,
        "cache_salt": one.cache_salt,
        "share": share,
        "trace": context.timeline is not None,
        "adapter": context.adapter,
        "prepared": PreparedParts(
            context.grammar,
            one.bad_words_token_ids,
            one.prediction_token_ids,
            one.images,
            one.audio,
            one.sounds,
        ),
        "deadline": context.arrived_at + min(times_ms) / 1e3 if times_ms else None,
    }
