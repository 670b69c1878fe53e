"""The replies of `/v1/chat/completions` and `/v1/completions`: a stream of chunks or one answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from ostinato.api.base.request_context import RequestContext
from ostinato.api.base.timeline import Timeline
from ostinato.api.chat.chat_deltas import (
    ChatOutputParser,
    CollectedAnswer,
    collect_delta,
    join_deltas,
)
from ostinato.api.chat.chat_generation import ChatGeneration, prepare_chat
from ostinato.api.openai import chat, completions
from ostinato.api.openai.chunk_usage import ChunkUsage
from ostinato.api.schemas.chat_completions import ChatChunk, ChatCompletionRequest, ChatResponse
from ostinato.api.schemas.client_fields import ServiceTier, tier_of
from ostinato.api.schemas.text_completions import Completion, CompletionRequest
from ostinato.api.service.generation import Generation
from ostinato.api.service.prompt_report import PromptReport, prompt_report
from ostinato.api.service.reply_state import (
    CollectedCompletion,
    ReplyHead,
    Tally,
    collect,
    new_id,
)
from ostinato.api.service.service import Service
from ostinato.api.service.stream_interval import StreamInterval
from ostinato.runtime.client.completion import join_outputs
from ostinato.runtime.types.outputs import FinishReason, RequestOutput

__all__ = ("ChatReply", "CompletionReply", "prepare_chat_reply", "prepare_completion_reply")


async def prepare_chat_reply(
    service: Service, body: ChatCompletionRequest, context: RequestContext
) -> ChatReply:
    """Check a request of `/v1/chat/completions` completely.

    Raises:
        InvalidRequestError: a parameter is out of range, or the prompt does not fit.
        OverloadedError: the queue is full.
    """
    chat.check(body)
    request_id = new_id("chatcmpl", body, context)
    ready = await prepare_chat(service, body, request_id=request_id, context=context)
    report = await prompt_report(
        service.encoder,
        body,
        ready.prompt_text,
        ready.generation,
        add_special_tokens=body.add_special_tokens,
    )
    return ChatReply(service, body, ready, report, context)


class ChatReply:
    """The reply to one request of `/v1/chat/completions`; use `stream` or `whole`, once.

    Args:
        ready: the request for the engine.
        report: what the reply shows of the prompt.
    """

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        ready: ChatGeneration,
        report: PromptReport,
        context: RequestContext,
    ) -> None:
        self._service = service
        self._generation = ready.generation
        self._parser = ChatOutputParser(ready.form)
        self._only_calls = ready.form.only_calls
        self._report = report
        self._context = context
        self._head = _head(service, ready.generation.request_id, body.service_tier)
        self._metadata = msgspec.UNSET if body.metadata is None else body.metadata
        reasons = ready.form.reasoning is not None
        self._usage = ChunkUsage(body, [ready.generation], reasons=reasons)
        self._options = chat.reply_options(body)
        self._echo = chat.echo_text(body)
        self._interval = StreamInterval(body.stream_interval or 1, join_deltas)
        self._tally = Tally.of([ready.generation])
        self._tally.num_reasoning_tokens = 0 if reasons else None

    async def stream(self) -> AsyncGenerator[ChatChunk, None]:
        """The chunks."""
        report = self._report  # shown by the first chunk of all
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                parsed = self._parser.feed(output)
                if (delta := self._interval.add(output.index, output, parsed)) is None:
                    continue
                self._tally.add(0, delta.output, delta.num_reasoning_tokens)
                self._usage.add(output.index, delta.output, delta.num_reasoning_tokens)
                for chunk in chat.to_chunks(
                    self._head,
                    delta,
                    self._service.encoder.token_bytes,
                    options=self._options,
                    echo=self._echo,
                    first_usage=self._usage.of_first_chunk(0, output.index),
                    usage=self._usage.of_chunk(0, output.index),
                ):
                    yield report.added_to(chunk)
                    report = PromptReport()
        if (timeline := self._context.report()) is not msgspec.UNSET:
            yield _trace_chunk(ChatChunk, self._head, timeline, self._usage)
        if self._usage.at_end:
            yield chat.usage_chunk(self._head, self._tally.usage)

    async def whole(self) -> ChatResponse:
        """The answer without a stream."""
        answers: dict[int, CollectedAnswer] = {}
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                delta = self._parser.feed(output)
                self._tally.add(0, output, delta.num_reasoning_tokens)
                collect_delta(answers, delta)
        response = chat.to_response(
            self._head,
            self._generation,
            answers,
            self._service.encoder.token_bytes,
            options=self._options,
            echo=self._echo,
            only_calls=self._only_calls,
            usage=self._tally.usage,
        )
        response = self._report.added_to(response)
        return msgspec.structs.replace(
            response, metadata=self._metadata, trace=self._context.report()
        )

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self._service.runner.generate(self._head.id, [self._generation], self._context)


async def prepare_completion_reply(
    service: Service, body: CompletionRequest, context: RequestContext
) -> CompletionReply:
    """Check a request of `/v1/completions` completely.

    Raises:
        InvalidRequestError: a parameter is out of range, or a prompt does not fit.
        OverloadedError: the queue is full.
    """
    completions.check(body)
    prompts = completions.prompts(body)
    token_ids = await _encode_prompts(service, body, prompts)
    request_id = new_id("cmpl", body, context)
    generations = completions.to_generations(
        body,
        token_ids,
        service.client.model,
        request_id=request_id,
        default_max_tokens=service.sampling.max_tokens,
    )
    echoes = _echoes(service, body, prompts, generations) if body.echo else []
    await service.runner.prepare(body, generations, context)
    reports = [
        await prompt_report(
            service.encoder,
            body,
            prompt,
            generation,
            add_special_tokens=body.add_special_tokens,
        )
        for prompt, generation in zip(prompts, generations, strict=True)
    ]
    return CompletionReply(
        service, body, generations, echoes, reports, request_id=request_id, context=context
    )


class CompletionReply:
    """The reply to one request of `/v1/completions`; use `stream` or `whole`, once.

    Args:
        generations: one per prompt.
        echoes: each prompt as `echo` repeats it; empty without `echo`.
        reports: what the reply shows of each prompt.
        request_id: the id of the whole reply.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        generations: Sequence[Generation],
        echoes: Sequence[completions.Echo],
        reports: Sequence[PromptReport],
        *,
        request_id: str,
        context: RequestContext,
    ) -> None:
        self._service = service
        self._generations = generations
        self._context = context
        self._head = _head(service, request_id)
        self._usage = ChunkUsage(body, generations)
        self._interval = StreamInterval(body.stream_interval or 1, join_outputs)
        self._options = completions.reply_options(body)
        self._n = generations[0].sampling.n
        self._has_output = body.max_tokens != 0
        self._tally = Tally.of(generations)
        self._echoes = echoes
        self._reports = reports

    async def stream(self) -> AsyncGenerator[Completion, None]:
        """The chunks."""
        offsets = completions.TextOffsets(self._service.encoder.token_bytes)
        begun: set[int] = set()  # choices whose first chunk has been sent
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, unpaced in outputs:
                choice = prompt_index * self._n + unpaced.index
                output = unpaced if self._has_output else _without_output(unpaced)
                if (output := self._interval.add(choice, output, output)) is None:
                    continue
                self._tally.add(prompt_index, output)
                self._usage.add(choice, output)
                for chunk in self._chunks(prompt_index, choice, output, offsets):
                    yield self._with_report(chunk, prompt_index, begun)
        if (timeline := self._context.report()) is not msgspec.UNSET:
            yield _trace_chunk(Completion, self._head, timeline, self._usage)
        if self._usage.at_end:
            yield completions.usage_chunk(self._head, self._tally.usage)

    async def whole(self) -> Completion:
        """The answer without a stream."""
        collected: dict[tuple[int, int], CollectedCompletion] = {}
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                shown = output if self._has_output else _without_output(output)
                self._tally.add(prompt_index, shown)
                collect(collected, prompt_index, shown)
        response = completions.to_response(
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

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self._service.runner.generate(self._head.id, self._generations, self._context)

    def _chunks(
        self,
        prompt_index: int,
        choice: int,
        output: RequestOutput,
        offsets: completions.TextOffsets,
    ) -> list[Completion]:
        """The chunks of one output: the echoed prompt before the first, none for held text."""
        token_bytes, options = self._service.encoder.token_bytes, self._options
        has_offsets = options.num_top_logprobs is not None
        chunks = []
        is_first = output.num_output_tokens == len(output.new_token_ids)
        if is_first and self._echoes:
            echo = self._echoes[prompt_index]
            if has_offsets:
                offsets.advance(choice, echo.token_ids)
            chunks.append(
                completions.echo_chunk(
                    self._head,
                    choice,
                    echo,
                    output,
                    token_bytes,
                    options=options,
                    usage=self._usage.of_first_chunk(prompt_index, choice),
                )
            )
        chunk = completions.to_chunk(
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
        """The first chunk of each choice shows what the request asked for of the prompt."""
        choice = chunk.choices[0]
        if choice.index in begun:
            return chunk
        begun.add(choice.index)
        choice = self._reports[prompt_index].added_to(choice)
        return msgspec.structs.replace(chunk, choices=[choice])


Chunk = TypeVar("Chunk", ChatChunk, Completion)


def _trace_chunk(
    kind: type[Chunk], head: ReplyHead, timeline: Timeline, usage: ChunkUsage
) -> Chunk:
    """The chunk with the timeline: the last one, or the one before the usage."""
    none_yet = None if usage.at_end else msgspec.UNSET
    return kind(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[],
        usage=none_yet,
        trace=timeline,
    )


def _head(service: Service, request_id: str, service_tier: ServiceTier | None = None) -> ReplyHead:
    return ReplyHead(
        id=request_id,
        created=int(time.time()),
        model=service.client.model.name,
        service_tier=tier_of(service_tier),
    )


async def _encode_prompts(
    service: Service, body: CompletionRequest, prompts: list[str] | list[list[int]]
) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if body.bad_words:
        service.encoder.tokenizer("bad_words")
    if not texts:
        return [prompt for prompt in prompts if isinstance(prompt, list)]
    return await service.encoder.encode(
        texts, param="prompt", add_special_tokens=body.add_special_tokens
    )


def _echoes(
    service: Service,
    body: CompletionRequest,
    prompts: Sequence[str | list[int]],
    generations: Sequence[Generation],
) -> list[completions.Echo]:
    """The prompts as `echo` repeats them: a text as it came, unless it was truncated."""
    tokenizer = service.encoder.tokenizer("echo")
    echoes = []
    for prompt, one in zip(prompts, generations, strict=True):
        token_ids = one.prompt_token_ids
        text = tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens)
        if isinstance(prompt, str) and one.sampling.truncate_prompt_tokens is None:
            text = prompt
        echoes.append(completions.Echo(text=text, token_ids=token_ids))
    return echoes


def _without_output(output: RequestOutput) -> RequestOutput:
    """The output without its token: `max_tokens=0` asks the engine for one."""
    return msgspec.structs.replace(
        output,
        text_delta="",
        new_token_ids=[],
        logprobs=None,
        num_output_tokens=0,
        finish_reason=output.finish_reason and FinishReason.length,
        stop_reason=None,
    )
