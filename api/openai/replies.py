"""One reply from news to chunks or to a whole response: the impure shell around the dialects."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from ostinato.api.base.timeline import RequestContext, Timeline
from ostinato.api.openai import chat, completions
from ostinato.api.openai.chat_events import collect_answers, join_deltas
from ostinato.api.openai.chat_generation import ChatRun
from ostinato.api.openai.chat_prompt import ChatPrompt
from ostinato.api.openai.prompt_report import PromptReport, prompt_report
from ostinato.api.openai.stream_interval import StreamInterval
from ostinato.api.schemas.openai import (
    ChatChunk,
    ChatCompletionRequest,
    ChatResponse,
    Completion,
    CompletionRequest,
    GenerationFields,
    Usage,
)
from ostinato.api.service.generation import (
    CollectedCompletion,
    Generation,
    ReplyHead,
    Tally,
    collect,
    new_id,
)
from ostinato.api.service.service import IndexedOutput, Service
from ostinato.runtime.client.completion import join_outputs
from ostinato.runtime.types.outputs import FinishReason, RequestOutput

__all__ = ("ChatReply", "CompletionReply")


class ChatReply:
    """The answer to one `/v1/chat/completions`; use `chunks` or `response`, once.

    Raises:
        InvalidRequestError: a parameter is out of range, or the prompt does not fit.
    """

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        prompt: ChatPrompt,
        context: RequestContext | None = None,
    ) -> None:
        self._service = service
        self._body = body
        self._source = prompt.text
        self._prompt = PromptReport()
        self._context = context or RequestContext()
        self._head = _head(service, "chatcmpl", body, self._context)
        self._usage = _UsageOfChunks(body)
        self._options = chat.reply_options(body)
        self._reasons = prompt.form.reasoning is not None
        self._echo = chat.echo_text(body)
        self._interval = StreamInterval(body.stream_interval or 1, join_deltas)
        self._run = ChatRun(service, body, prompt, request_id=self._head.id, context=self._context)
        self._generations = self._run.generations

    async def prepare(self) -> None:
        """Call it first; raises InvalidRequestError for what only another process can tell."""
        await self._run.prepare()
        self._prompt = await prompt_report(
            self._service,
            self._body,
            self._source,
            self._generations[0],
            add_special_tokens=self._body.add_special_tokens,
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        tally = self._tally()
        prompt = self._prompt  # the first chunk of all has it
        async with aclosing(self._run.news()) as news:
            async for unpaced in news:
                output = unpaced.output
                if (one := self._interval.add(output.index, output, unpaced)) is None:
                    continue
                tally.add(0, one.output, one.num_reasoning_tokens)
                for chunk in chat.to_chunks(
                    self._head,
                    one,
                    self._service.token_bytes,
                    options=self._options,
                    echo=self._echo,
                    usage=self._usage.of_chunk(tally),
                ):
                    yield prompt.added_to(chunk)
                    prompt = PromptReport()
        if (timeline := self._context.report()) is not msgspec.UNSET:
            yield _trace_chunk(ChatChunk, self._head, timeline, self._usage)
        if self._usage.at_end:
            yield chat.usage_chunk(self._head, tally.usage)

    async def response(self) -> ChatResponse:
        tally = self._tally()
        answers = await collect_answers(self._run.news(), tally)
        response = chat.to_response(
            self._head,
            self._generations[0],
            answers,
            self._service.token_bytes,
            options=self._options,
            echo=self._echo,
            usage=tally.usage,
        )
        response = self._prompt.added_to(response)
        return msgspec.structs.replace(response, trace=self._context.report())

    def _tally(self) -> Tally:
        tally = Tally.of(self._generations)
        tally.num_reasoning_tokens = 0 if self._reasons else None
        return tally


class CompletionReply:
    """The answer to one `/v1/completions`; use `chunks` or `response`, once.

    Args:
        prompts: as the request gave them, texts or token ids; `echo` repeats texts as they are.
        prompts_token_ids: their token ids.

    Raises:
        InvalidRequestError: a parameter is out of range, or a prompt does not fit.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        prompts: Sequence[str | list[int]],
        prompts_token_ids: list[list[int]],
        context: RequestContext | None = None,
    ) -> None:
        self._service = service
        self._body = body
        self._sources = prompts
        self._prompts: list[PromptReport] = []
        self._context = context or RequestContext()
        self._head = _head(service, "cmpl", body, self._context)
        self._usage = _UsageOfChunks(body)
        self._interval = StreamInterval(body.stream_interval or 1, join_outputs)
        self._options = completions.reply_options(body)
        self._generations = completions.to_requests(
            body,
            prompts_token_ids,
            service.client.model,
            request_id=self._head.id,
            default_max_tokens=service.sampling.max_tokens,
        )
        self._n = self._generations[0].sampling.n
        self._gives_output = body.max_tokens != 0
        self._echoes = []
        if body.echo:
            tokenizer = service.tokenizer("echo")
            for prompt, one in zip(prompts, self._generations, strict=True):
                token_ids = one.prompt_token_ids
                text = tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens)
                if isinstance(prompt, str) and one.sampling.truncate_prompt_tokens is None:
                    text = prompt
                self._echoes.append(completions.Echo(text=text, token_ids=token_ids))

    async def prepare(self) -> None:
        """Call it first; raises InvalidRequestError for what only another process can tell."""
        await self._service.prepare(self._body, self._generations, self._context)
        self._prompts = [
            await prompt_report(
                self._service,
                self._body,
                source,
                generation,
                add_special_tokens=self._body.add_special_tokens,
            )
            for source, generation in zip(self._sources, self._generations, strict=True)
        ]

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        tally = Tally.of(self._generations)
        token_bytes, options = self._service.token_bytes, self._options
        offsets = completions.TextOffsets(token_bytes)
        begun: set[int] = set()  # choices whose first chunk is out
        async with aclosing(self._run()) as news:
            async for prompt_index, unpaced in news:
                choice = prompt_index * self._n + unpaced.index
                if (output := self._interval.add(choice, unpaced, unpaced)) is None:
                    continue
                tally.add(prompt_index, output)
                usage = self._usage.of_chunk(tally)
                new = []
                is_first = output.num_output_tokens == len(output.new_token_ids)
                if is_first and self._echoes:
                    echo = self._echoes[prompt_index]
                    if options.num_top_logprobs is not None:
                        offsets.advance(choice, echo.token_ids)
                    new.append(
                        completions.echo_chunk(
                            self._head,
                            choice,
                            echo,
                            output,
                            token_bytes,
                            options=options,
                            usage=usage,
                        )
                    )
                text_offset = 0
                if options.num_top_logprobs is not None:
                    text_offset = offsets.advance(choice, output.new_token_ids)
                new.append(
                    completions.to_chunk(
                        self._head,
                        choice,
                        output,
                        token_bytes,
                        options=options,
                        text_offset=text_offset,
                        usage=usage,
                    )
                )
                for chunk in new:
                    if chunk is not None:
                        yield self._with_prompt(chunk, prompt_index, begun)
        if (timeline := self._context.report()) is not msgspec.UNSET:
            yield _trace_chunk(Completion, self._head, timeline, self._usage)
        if self._usage.at_end:
            yield completions.usage_chunk(self._head, tally.usage)

    async def response(self) -> Completion:
        collected, tally = await _collect(self._run(), self._generations)
        response = completions.to_response(
            self._head,
            self._generations,
            collected,
            self._service.token_bytes,
            options=self._options,
            echoes=self._echoes,
            usage=tally.usage,
        )
        choices = [
            self._prompts[choice.index // self._n].added_to(choice) for choice in response.choices
        ]
        return msgspec.structs.replace(response, choices=choices, trace=self._context.report())

    async def _run(self) -> AsyncGenerator[IndexedOutput, None]:
        """The news; with `max_tokens=0` without the token that the engine had to be asked for."""
        running = self._service.run(self._head.id, self._generations, self._context)
        async with aclosing(running) as news:
            async for prompt_index, output in news:
                yield prompt_index, output if self._gives_output else _without_output(output)

    def _with_prompt(self, chunk: Completion, prompt_index: int, begun: set[int]) -> Completion:
        """The first chunk of each choice has what was asked for of the prompt."""
        choice = chunk.choices[0]
        if choice.index in begun:
            return chunk
        begun.add(choice.index)
        choice = self._prompts[prompt_index].added_to(choice)
        return msgspec.structs.replace(chunk, choices=[choice])


class _UsageOfChunks:
    """Which chunks of a stream tell the usage, by `stream_options`."""

    def __init__(self, body: GenerationFields) -> None:
        options = body.stream_options
        self._continuous = options is not None and options.continuous_usage_stats
        self.at_end = options is not None and options.include_usage

    def of_chunk(self, tally: Tally) -> Usage | msgspec.UnsetType | None:
        """The usage so far; None = it comes at the end; unset = nobody asked."""
        if self._continuous:
            return tally.usage
        return None if self.at_end else msgspec.UNSET


Chunk = TypeVar("Chunk", ChatChunk, Completion)


def _trace_chunk(
    kind: type[Chunk], head: ReplyHead, timeline: Timeline, usage: _UsageOfChunks
) -> Chunk:
    """The chunk with the timeline; the last one, or the one before the usage."""
    none_yet = None if usage.at_end else msgspec.UNSET
    return kind(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[],
        usage=none_yet,
        trace=timeline,
    )


def _head(
    service: Service, prefix: str, body: GenerationFields, context: RequestContext
) -> ReplyHead:
    return ReplyHead(
        id=new_id(prefix, body, context),
        created=int(time.time()),
        model=service.client.model.name,
    )


def _without_output(output: RequestOutput) -> RequestOutput:
    return msgspec.structs.replace(
        output,
        text_delta="",
        new_token_ids=[],
        logprobs=None,
        num_output_tokens=0,
        finish_reason=output.finish_reason and FinishReason.length,
        stop_reason=None,
    )


async def _collect(
    news: AsyncGenerator[IndexedOutput, None], generations: list[Generation]
) -> tuple[dict[tuple[int, int], CollectedCompletion], Tally]:
    tally = Tally.of(generations)
    collected: dict[tuple[int, int], CollectedCompletion] = {}
    async with aclosing(news):
        async for prompt_index, output in news:
            tally.add(prompt_index, output)
            collect(collected, prompt_index, output)
    return collected, tally
