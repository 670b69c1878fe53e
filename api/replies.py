"""One reply from news to chunks or to a whole response: the impure shell around the dialects."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ostinato.api import chat, completions
from ostinato.api.generation import (
    CollectedCompletion,
    Generation,
    ReplyHead,
    Tally,
    collect,
    new_id,
)
from ostinato.api.schemas import (
    ChatChunk,
    ChatCompletionRequest,
    ChatResponse,
    Completion,
    CompletionRequest,
    GenerationFields,
    Usage,
)
from ostinato.api.service import Service

__all__ = ("ChatReply", "CompletionReply")


class ChatReply:
    """The answer to one `/v1/chat/completions`; use `chunks` or `response`, once.

    Raises:
        InvalidRequestError: a parameter is out of range, or the prompt does not fit.
    """

    def __init__(
        self, service: Service, body: ChatCompletionRequest, prompt_token_ids: list[int]
    ) -> None:
        self._service = service
        self._head = _head(service, "chatcmpl", body)
        self._usage = _UsageOfChunks(body)
        self._generations = [
            chat.to_request(
                body,
                prompt_token_ids,
                service.client.model,
                request_id=self._head.id,
                default_max_tokens=service.sampling.max_tokens,
            )
        ]
        self._num_top = self._generations[0].sampling.logprobs

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        tally = Tally(self._generations)
        async with aclosing(self._service.run(self._head.id, self._generations)) as news:
            async for prompt_index, output in news:
                tally.add(prompt_index, output)
                for chunk in chat.to_chunks(
                    self._head,
                    output,
                    self._service.token_bytes,
                    num_top_logprobs=self._num_top,
                    usage=self._usage.of_chunk(tally),
                ):
                    yield chunk
        if self._usage.at_end:
            yield chat.usage_chunk(self._head, tally.usage)

    async def response(self) -> ChatResponse:
        collected, tally = await _collect(self._service, self._head, self._generations)
        return chat.to_response(
            self._head,
            collected,
            self._service.token_bytes,
            num_top_logprobs=self._num_top,
            usage=tally.usage,
        )


class CompletionReply:
    """The answer to one `/v1/completions`; use `chunks` or `response`, once.

    Raises:
        InvalidRequestError: a parameter is out of range, or a prompt does not fit.
    """

    def __init__(
        self, service: Service, body: CompletionRequest, prompts_token_ids: list[list[int]]
    ) -> None:
        self._service = service
        self._head = _head(service, "cmpl", body)
        self._usage = _UsageOfChunks(body)
        self._generations = completions.to_requests(
            body,
            prompts_token_ids,
            service.client.model,
            request_id=self._head.id,
            default_max_tokens=service.sampling.max_tokens,
        )
        self._n = self._generations[0].sampling.n
        self._num_top = self._generations[0].sampling.logprobs

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        tally = Tally(self._generations)
        offsets = completions.TextOffsets(self._service.token_bytes)
        async with aclosing(self._service.run(self._head.id, self._generations)) as news:
            async for prompt_index, output in news:
                tally.add(prompt_index, output)
                choice = prompt_index * self._n + output.index
                reports = self._num_top is not None
                chunk = completions.to_chunk(
                    self._head,
                    choice,
                    output,
                    self._service.token_bytes,
                    num_top_logprobs=self._num_top,
                    text_offset=offsets.advance(choice, output.new_token_ids) if reports else 0,
                    usage=self._usage.of_chunk(tally),
                )
                if chunk is not None:
                    yield chunk
        if self._usage.at_end:
            yield completions.usage_chunk(self._head, tally.usage)

    async def response(self) -> Completion:
        collected, tally = await _collect(self._service, self._head, self._generations)
        return completions.to_response(
            self._head,
            collected,
            self._service.token_bytes,
            n=self._n,
            num_top_logprobs=self._num_top,
            usage=tally.usage,
        )


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


def _head(service: Service, prefix: str, body: GenerationFields) -> ReplyHead:
    return ReplyHead(
        id=new_id(prefix, body), created=int(time.time()), model=service.client.model.name
    )


async def _collect(
    service: Service, head: ReplyHead, generations: list[Generation]
) -> tuple[dict[tuple[int, int], CollectedCompletion], Tally]:
    tally = Tally(generations)
    collected: dict[tuple[int, int], CollectedCompletion] = {}
    async with aclosing(service.run(head.id, generations)) as news:
        async for prompt_index, output in news:
            tally.add(prompt_index, output)
            collect(collected, prompt_index, output)
    return collected, tally
