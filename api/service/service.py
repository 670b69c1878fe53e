"""What the handlers share: the engine's client, whether requests are admitted, and each request's
timing and log line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, cast

from ostinato.api.base.admission import EngineQueue, check_prompts, queue_refusal
from ostinato.api.base.errors import OverloadedError, UnavailableError, status_of
from ostinato.api.base.timeline import RequestContext
from ostinato.api.observability.metrics import EngineView, Metrics
from ostinato.api.observability.trace_recorder import TraceRecorder
from ostinato.api.observability.tracing import Tracer
from ostinato.api.schemas.response_format import ConstraintFields, refusing_by_field
from ostinato.api.service import health
from ostinato.api.service.generation import Generation
from ostinato.api.service.health import EngineSigns
from ostinato.api.service.request_stats import RequestStats, StatsSinks
from ostinato.api.service.response_store import ResponseStore
from ostinato.conf.schema import SamplingSection, ServerConfig
from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.engine.flight_recorder import StepRecord
from ostinato.runtime.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
)
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import FinishReason, PooledOutput, RequestOutput
from ostinato.runtime.types.params import PoolingParams, SamplingParams

__all__ = ("Client", "IndexedOutput", "Service")

_INLINE_CHARACTERS = 4096  # a longer text is tokenised in a thread

IndexedOutput = tuple[int, RequestOutput]  # (prompt index, what is new)


class Client(EngineView, EngineSigns, EngineQueue, Protocol):
    """What the API needs of `runtime.client.EngineClient`."""

    model: ServedModel
    tokenizer: Tokenizer | None

    async def prepare(self, sampling: SamplingParams) -> None: ...

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        trace: bool = False,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    async def inspect(self, timeout_s: float = ...) -> EngineState: ...

    def flight_records(self) -> list[StepRecord]: ...

    async def pool(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        trace: bool = False,
    ) -> PooledOutput: ...

    async def reset_prefix_cache(self) -> None: ...

    async def start_profile(self) -> str: ...

    async def stop_profile(self) -> str: ...


class Service:
    """One server's state.

    Args:
        client: not necessarily started yet.
        server: limits and time-outs.
        sampling: defaults for what a request leaves out.

    Attributes:
        phase: what the engine's start is busy with; None once it has started.
        is_draining: whether the server is shutting down and admits nothing new.
        stored_responses: replies that later requests may go on from.
        template_turn: held while a template that came with a request is rendered.
        trace: told of each completion that ended; None = nothing is recorded.
        num_open: replies that the engine works for.
    """

    def __init__(self, client: Client, server: ServerConfig, sampling: SamplingSection) -> None:
        self.client = client
        self.server = server
        self.sampling = sampling
        self.phase: str | None = "starting"
        self.metrics = Metrics(client, self._model_name, vllm_names=server.vllm_metrics)
        tracer = Tracer(server.otlp_endpoint) if server.otlp_endpoint else None
        self._sinks = StatsSinks(self.metrics, tracer, server.log_prompts)
        self.is_draining = False
        self.template_turn = asyncio.Semaphore(1)
        self.stored_responses = ResponseStore(server.response_store_mib)
        self.trace: TraceRecorder | None = None
        self.num_open = 0

    def close(self) -> None:
        """Send what is left of traces; nothing may run afterwards."""
        if self._sinks.tracer is not None:
            self._sinks.tracer.close()

    def _model_name(self) -> str | None:
        return self.client.model.name if self.phase is None else None

    def health_problem(self) -> str | None:
        """Why the engine does not work, or None."""
        if self.phase is not None:
            return f"the engine is starting: {self.phase}"
        return health.engine_problem(self.client, self.server)

    def liveness_problem(self) -> str | None:
        """Why this process should be ended and started anew, or None."""
        return None if self.phase else health.liveness_problem(self.client, self.server)

    def refusal(self) -> UnavailableError | None:
        """Why a new request would not be admitted, or None."""
        if self.is_draining:
            return UnavailableError("the server is shutting down", code="shutting_down")
        if self.phase is not None:
            return self._starting()
        return health.death(self.client)

    def unreadiness(self) -> UnavailableError | OverloadedError | None:
        """Why a new request would not be admitted and served now, or None."""
        return (
            self.refusal()
            or health.unreadiness(self.client, self.server)
            or queue_refusal(self.client, self.server)
        )

    def check_started(self) -> None:
        """Raises UnavailableError while it is not known which model there is."""
        if self.phase is not None:
            raise self._starting()

    def admit(self) -> None:
        """Raises UnavailableError or OverloadedError when nothing new is admitted."""
        refusal = self.refusal() or queue_refusal(self.client, self.server)
        if refusal is not None:
            raise refusal

    def tokenizer(self, param: str) -> Tokenizer:
        """The model's tokenizer; raises InvalidRequestError naming `param` when it has none."""
        if self.client.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer: send token ids as the prompt of"
                " /v1/completions, or start the server with model.tokenizer=DIRECTORY",
                param=param,
                code="no_tokenizer",
            )
        return self.client.tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes; its id in words for a model without a tokenizer."""
        if self.client.tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self.client.tokenizer.token_bytes(token_id)

    async def encode(
        self, texts: Sequence[str], *, param: str, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of each text; off the event loop when that takes long."""
        tokenizer = self.tokenizer(param)
        # One by one: a batch would be spread over threads, and the cores are the engine's.
        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [
            await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
            for text in texts
        ]

    async def token_offsets(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Characters of each token that `encode` gives; off the event loop when it takes long."""
        tokenizer = self.tokenizer("return_token_offsets")
        if len(text) <= _INLINE_CHARACTERS:
            return tokenizer.token_offsets(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            tokenizer.token_offsets, text, add_special_tokens=add_special_tokens
        )

    def _starting(self) -> UnavailableError:
        return UnavailableError(f"the engine is starting: {self.phase}", code="starting")

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raises InvalidRequestError for a prompt that is longer than the server allows, and
        OverloadedError when too much is waiting.
        """
        check_prompts(lengths, self.server)
        full = queue_refusal(self.client, self.server, sum(lengths))
        if full is not None:
            raise full

    async def prepare(
        self,
        fields: ConstraintFields,
        generations: Sequence[Generation],
        context: RequestContext,
    ) -> None:
        """What can still be refused of a request, before its reply begins.

        Args:
            fields: what the answer must look like, as the request says it.
            generations: the prompts.
            context: told how long a grammar took.

        Raises:
            InvalidRequestError: what the answer must look like is not valid, or takes too much; or
                a prompt is longer than the server allows.
            OverloadedError: too much is waiting.
        """
        self.check_room([len(one.prompt_token_ids) for one in generations])
        for sampling in {id(one.sampling): one.sampling for one in generations}.values():
            if sampling.structured_outputs is not None:
                begin = time.monotonic()
                await refusing_by_field(fields, self.client.prepare(sampling))
                context.grammar_seconds += time.monotonic() - begin

    async def run(
        self,
        reply_id: str,
        generations: Sequence[Generation],
        context: RequestContext | None = None,
    ) -> AsyncGenerator[IndexedOutput, None]:
        """IndexedOutput of all completions of all prompts, timed, counted and logged.

        Closing the iterator aborts what has not ended.

        Args:
            reply_id: as the client sees it.
            generations: the prompts.
            context: of the HTTP request; None = one that came this moment and asks for nothing.

        Raises:
            EngineError: the engine failed, or gave a completion up.
        """
        context = context or RequestContext()
        stats = RequestStats(
            self._sinks,
            reply_id,
            [one.prompt_token_ids for one in generations],
            context,
            [one.sampling for one in generations],
        )
        try:
            with self._measured(stats):
                async with aclosing(_merge(self.client, generations, context)) as news:
                    async for prompt_index, output in news:
                        stats.add(prompt_index, output)
                        _raise_for_failure(output)
                        yield prompt_index, output
        finally:
            if self.trace is not None:
                for prompt_index, num_tokens in stats.num_tokens():
                    one = generations[prompt_index]
                    self.trace.add(stats.begin, one.prompt_token_ids, num_tokens, one.cache_salt)

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
        """The vectors of several texts, timed, counted and logged. Cancelling it aborts all.

        Raises:
            DeadlineError: the request's time is over.
            EngineError: the engine failed, or gave one up; the others are aborted.
        """
        stats = RequestStats(self._sinks, reply_id, batch, context)

        async def one(index: int, token_ids: list[int]) -> PooledOutput:
            output = await self.client.pool(
                f"{reply_id}:{index}",
                token_ids,
                params,
                priority=priority,
                cache_salt=cache_salt,
                trace=context.timeline is not None,
            )
            stats.add_vector(index, output)
            _raise_for_failure(output)
            return output

        with self._measured(stats):
            return await _all_in_time(
                [one(index, token_ids) for index, token_ids in enumerate(batch)], context
            )

    @contextmanager
    def _measured(self, stats: RequestStats) -> Iterator[None]:
        """Work for a reply: counted while it is open, and its stats closed with how it ended."""
        self.num_open += 1
        try:
            yield
            stats.close("done")
        except EngineDeadError as error:
            stats.close("error 503")
            if self.is_draining:
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


def _raise_for_failure(output: RequestOutput | PooledOutput) -> None:
    is_refusal = isinstance(output, RequestOutput) and output.is_refusal
    if output.finish_reason is FinishReason.error and is_refusal:
        raise InvalidRequestError(
            output.error or "the grammar can not go on",
            param="structured_outputs",
            code="constraint_too_complex",
        )
    if output.finish_reason is FinishReason.error:
        raise EngineError(output.error or "the engine gave this request up")
    if output.finish_reason is FinishReason.abort:
        raise UnavailableError("the request was aborted by the server", code="aborted")


async def _all_in_time(
    work: Sequence[Coroutine[Any, Any, PooledOutput]], context: RequestContext
) -> list[PooledOutput]:
    """All results, or the first failure; what is not done then is cancelled."""
    remaining_s = None
    if context.timeout_ms is not None:
        remaining_s = context.arrived_at + context.timeout_ms / 1e3 - time.monotonic()
    tasks = [asyncio.create_task(one) for one in work]
    try:
        async with asyncio.timeout(remaining_s):
            return await asyncio.gather(*tasks)
    except TimeoutError as error:
        raise DeadlineError("the request's deadline was over before its answer") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merge(
    client: Client, generations: Sequence[Generation], context: RequestContext
) -> AsyncGenerator[IndexedOutput, None]:
    """IndexedOutput of several prompts as they come; one prompt takes the direct way."""
    if len(generations) == 1:
        async with aclosing(_generate(client, generations[0], context)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[IndexedOutput | int | Exception] = asyncio.Queue()

    async def pump(prompt_index: int) -> None:
        try:
            running = _generate(client, generations[prompt_index], context)
            async with aclosing(running) as outputs:
                async for output in outputs:
                    queue.put_nowait((prompt_index, output))
            queue.put_nowait(prompt_index)
        except Exception as error:  # handed over to the reader, who raises it
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(generations))]
    try:
        num_running = len(tasks)
        while num_running:
            news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, int):
                num_running -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _generate(
    client: Client, one: Generation, context: RequestContext
) -> AsyncGenerator[RequestOutput, None]:
    times_ms = [ms for ms in (one.deadline_ms, context.timeout_ms) if ms is not None]
    outputs = client.generate(
        one.request_id,
        one.prompt_token_ids,
        one.sampling,
        priority=one.priority,
        cache_salt=one.cache_salt,
        trace=context.timeline is not None,
        deadline=context.arrived_at + min(times_ms) / 1e3 if times_ms else None,
    )
    # Closing it aborts the request: a client's `generate` is a generator.
    return cast("AsyncGenerator[RequestOutput, None]", outputs)
