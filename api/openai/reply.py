"""The replies of `/v1/chat/completions` and `/v1/completions`: a stream of chunks or one answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from ostinato.api.base.request_context import RequestContext
from ostinato.api.base.timeline import Timeline
from ostinato.api.chat.chat_deltas import ChatDeltas, CollectedAnswer, collect_delta
from ostinato.api.http.sse import MANY_TOKENS, InParts
from ostinato.api.openai import chat, completions
from ostinato.api.openai.chunk_usage import ChunkUsage
from ostinato.api.openai.preparation import PreparedChat, PreparedCompletion
from ostinato.api.preparation.generation import Generation
from ostinato.api.preparation.prompt_report import PromptReport
from ostinato.api.schemas.chat_completions import ChatChunk, ChatResponse
from ostinato.api.schemas.client_fields import ServiceTier, tier_of
from ostinato.api.schemas.text_completions import Completion, CompletionLogprobs
from ostinato.api.service.reply_state import (
    CollectedCompletion,
    ReplyHead,
    Tally,
    collect,
)
from ostinato.api.service.service import Service
from ostinato.api.service.stream_interval import StreamInterval
from ostinato.runtime.client.completion import join_outputs
from ostinato.runtime.types.outputs import FinishReason, RequestOutput

__all__ = ("ChatReply", "CompletionReply")


class ChatReply:
    """The reply to one request of `/v1/chat/completions`. Call either `stream` or `whole`, once.

    Args:
        prepared: the request, which `RequestRunner.prepare` has accepted.
    """

    def __init__(self, service: Service, prepared: PreparedChat, context: RequestContext) -> None:
        ready = prepared.ready
        self._service = service
        self._ready = ready
        self._context = context
        self._head = _head(service, context, ready.generation.request_id, prepared.service_tier)
        self._metadata = msgspec.UNSET if prepared.metadata is None else prepared.metadata
        reasons = ready.form.reasoning is not None
        self._usage = ChunkUsage(prepared.stream_options, [ready.generation], reasons=reasons)
        self._options = prepared.options
        self._echo = prepared.echo
        self._stream_interval = prepared.stream_interval

    async def stream(self) -> AsyncGenerator[ChatChunk | InParts, None]:
        """The chunks."""
        report = self._ready.report  # goes into the first chunk of the stream
        deltas = ChatDeltas(self._ready, self._stream_interval)
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                if (delta := deltas.add(output)) is None:
                    continue
                index = delta.output.index
                self._usage.add(index, delta.output, delta.num_reasoning_tokens)
                for chunk in await chat.to_chunks(
                    self._head,
                    delta,
                    self._service.encoder.token_bytes,
                    options=self._options,
                    echo=self._echo,
                    first_usage=self._usage.of_first_chunk(0, index),
                    usage=self._usage.of_chunk(0, index),
                ):
                    yield _sized(report.added_to(chunk), len(delta.output.new_token_ids))
                    report = PromptReport()
        last = chat.to_chunk(self._head, [], deltas.tally.usage)
        if (timeline := self._context.report()) is not msgspec.UNSET:
            yield _trace_chunk(last, timeline, self._usage)
        if self._usage.at_end:
            yield last

    async def whole(self) -> ChatResponse:
        """The answer without a stream."""
        answers: dict[int, CollectedAnswer] = {}
        deltas = ChatDeltas(self._ready)
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                if (delta := deltas.add(output)) is not None:
                    collect_delta(answers, delta)
        response = await chat.to_response(
            self._head,
            self._ready.generation,
            answers,
            self._service.encoder.token_bytes,
            options=self._options,
            echo=self._echo,
            only_calls=self._ready.form.only_calls,
            usage=deltas.tally.usage,
        )
        response = self._ready.report.added_to(response)
        return msgspec.structs.replace(
            response, metadata=self._metadata, trace=self._context.report()
        )

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        generations = [self._ready.generation]
        return self._service.runner.generate(self._head.id, generations, self._context)


class CompletionReply:
    """The reply to one request of `/v1/completions`. Call either `stream` or `whole`, once.

    Args:
        prepared: the request.
        generations: the prompts of the request, which `RequestRunner.prepare` has accepted.
    """

    def __init__(
        self,
        service: Service,
        prepared: PreparedCompletion,
        generations: Sequence[Generation],
        context: RequestContext,
    ) -> None:
        self._service = service
        self._generations = generations
        self._context = context
        self._head = _head(service, context, prepared.request_id)
        self._usage = ChunkUsage(prepared.stream_options, generations)
        self._stream_interval = prepared.stream_interval
        self._options = prepared.options
        self._n = generations[0].sampling.n
        self._has_output = prepared.has_output
        self._tally = Tally.of(generations)
        self._echoes = prepared.echoes
        # Prompt index -> the log-probabilities of the echoed prompt, and its number of characters.
        self._echoed: dict[int, tuple[CompletionLogprobs, int] | None] = {}
        self._reports = [prompt.report for prompt in prepared.prompts]

    async def stream(self) -> AsyncGenerator[Completion | InParts, None]:
        """The chunks."""
        offsets = completions.TextOffsets(self._service.encoder.token_bytes)
        begun: set[int] = set()  # choices whose first chunk has been sent
        async with aclosing(self._outputs(self._stream_interval)) as outputs:
            async for prompt_index, output in outputs:
                choice = prompt_index * self._n + output.index
                self._usage.add(choice, output)
                for chunk in await self._chunks(prompt_index, choice, output, offsets):
                    logprobs = chunk.choices[0].logprobs
                    yield _sized(
                        self._with_report(chunk, prompt_index, begun),
                        0 if logprobs is None else len(logprobs.tokens),
                    )
        last = completions.to_completion(self._head, [], self._tally.usage)
        if (timeline := self._context.report()) is not msgspec.UNSET:
            yield _trace_chunk(last, timeline, self._usage)
        if self._usage.at_end:
            yield last

    async def whole(self) -> Completion:
        """The answer without a stream."""
        collected: dict[tuple[int, int], CollectedCompletion] = {}
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                collect(collected, prompt_index, output)
        response = await completions.to_response(
            self._head,
            self._generations,
            collected,
            self._service.encoder.token_bytes,
            options=self._options,
            echoes=self._echoes,
            usage=self._tally.usage,
        )
        choices = [
            self._reports[choice.index // self._n].added_to(choice) for choice in response.choices
        ]
        return msgspec.structs.replace(response, choices=choices, trace=self._context.report())

    async def _outputs(
        self, stream_interval: int = 1
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The (prompt index, output) that the reply shows. The tally has counted them."""
        runner, interval = self._service.runner, StreamInterval(stream_interval, join_outputs)
        outputs = runner.generate(self._head.id, self._generations, self._context)
        async with aclosing(outputs):
            async for prompt_index, output in outputs:
                shown = output if self._has_output else _without_output(output)
                paced = interval.add((prompt_index, output.index), shown, shown)
                if paced is not None:
                    self._tally.add(prompt_index, paced)
                    yield prompt_index, paced

    async def _chunks(
        self,
        prompt_index: int,
        choice: int,
        output: RequestOutput,
        offsets: completions.TextOffsets,
    ) -> list[Completion]:
        """The chunks of one output. Before the first chunk comes the chunk with the echoed prompt.

        There is no chunk while the text is held back.
        """
        token_bytes, options = self._service.encoder.token_bytes, self._options
        has_offsets = options.num_top_logprobs is not None
        chunks = []
        is_first = output.num_output_tokens == len(output.new_token_ids)
        if is_first and self._echoes:
            echo, logprobs = self._echoes[prompt_index], None
            # The completions of a prompt have the same scores of its tokens.
            if prompt_index not in self._echoed:
                self._echoed[prompt_index] = await echo.logprobs(
                    output.prompt_logprobs, token_bytes, options
                )
            if (echoed := self._echoed[prompt_index]) is not None:
                logprobs, num_characters = echoed
                offsets.begin(choice, num_characters)
            usage = self._usage.of_first_chunk(prompt_index, choice)
            chunks.append(completions.echo_chunk(self._head, choice, echo, logprobs, usage=usage))
        chunk = await completions.to_chunk(
            self._head,
            choice,
            output,
            token_bytes,
            options=options,
            text_offset=offsets.advance(choice, output.new_token_ids) if has_offsets else 0,
            usage=self._usage.of_chunk(prompt_index, choice),
        )
        return chunks if chunk is None else [*chunks, chunk]

    def _with_report(self, chunk: Completion, prompt_index: int, begun: set[int]) -> Completion:
        """Add the prompt's report, if the request asks for it, to the first chunk of a choice."""
        choice = chunk.choices[0]
        if choice.index in begun:
            return chunk
        begun.add(choice.index)
        choice = self._reports[prompt_index].added_to(choice)
        return msgspec.structs.replace(chunk, choices=[choice])


Chunk = TypeVar("Chunk", ChatChunk, Completion)


def _sized(chunk: Chunk, num_entries: int) -> Chunk | InParts:
    """The chunk, to be encoded in parts if it can have the entries of many tokens."""
    return InParts(chunk) if num_entries > MANY_TOKENS else chunk


def _trace_chunk(last: Chunk, timeline: Timeline, usage: ChunkUsage) -> Chunk:
    """The chunk with the timeline. It is the last chunk, except for the chunk with the usage.

    Args:
        last: the chunk with the usage. The two chunks differ only in the usage and the timeline.
        timeline: the request's timeline.
        usage: what the request's options say about usage.
    """
    none_yet = None if usage.at_end else msgspec.UNSET
    return msgspec.structs.replace(last, usage=none_yet, trace=timeline)


def _head(
    service: Service,
    context: RequestContext,
    request_id: str,
    service_tier: ServiceTier | None = None,
) -> ReplyHead:
    return ReplyHead(
        id=request_id,
        created=int(time.time()),
        model=service.model_name(context),
        system_fingerprint=service.system_fingerprint(context),
        service_tier=tier_of(service_tier),
    )


def _without_output(output: RequestOutput) -> RequestOutput:
    """Remove the token of an output. With `max_tokens=0` the engine generates one token."""
    return msgspec.structs.replace(
        output,
        text_delta="",
        new_token_ids=[],
        logprobs=None,
        num_output_tokens=0,
        finish_reason=output.finish_reason and FinishReason.length,
        stop_reason=None,
    )
