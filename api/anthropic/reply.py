"""One answer to `/v1/messages`: events, or a whole message."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ostinato.api.anthropic.convert import block_event, reply_blocks, stop_of
from ostinato.api.anthropic.schemas import Event, MessageDelta, Reply, Usage
from ostinato.api.base.timeline import RequestContext
from ostinato.api.openai.chat_generation import ChatRun
from ostinato.api.openai.chat_prompt import ChatPrompt
from ostinato.api.openai.content_blocks import ContentBlocks
from ostinato.api.schemas.openai import ChatCompletionRequest
from ostinato.api.service.generation import Tally
from ostinato.api.service.service import Service

__all__ = ("MessagesReply",)


class MessagesReply:
    """Call `prepare`, then `events` or `whole`, once each.

    Args:
        body: the request as a chat request.

    Raises:
        InvalidRequestError: a parameter is out of range, or the prompt does not fit.
    """

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        prompt: ChatPrompt,
        context: RequestContext,
    ) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = service.client.model.name
        self._run = ChatRun(service, body, prompt, request_id=self._id, context=context)
        self._context = context
        self._tally = Tally.of(self._run.generations)
        self._blocks = ContentBlocks()
        self._stop: tuple[str | None, str | None] = None, None

    async def prepare(self) -> None:
        """Raises InvalidRequestError for what only another process can tell."""
        await self._run.prepare()

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of a stream, from `message_start` to `message_stop`."""
        has_begun = False
        async with aclosing(self._run.news()) as news:
            async for one in news:
                self._tally.add(0, one.output)
                if not has_begun:  # the first news says what was in the cache
                    has_begun = True
                    yield Event(type="message_start", message=self._message())
                for change in self._blocks.feed(one.events):
                    for event in block_event(change):
                        yield event
                if one.finish_reason is not None:
                    self._stop = stop_of(one.finish_reason, one.output.stop_reason)
        for change in self._blocks.finish():
            for event in block_event(change):
                yield event
        reason, sequence = self._stop
        yield Event(
            type="message_delta",
            delta=MessageDelta(stop_reason=reason or "end_turn", stop_sequence=sequence),
            usage=self._usage(),
        )
        yield Event(type="message_stop", trace=self._context.report())

    async def whole(self) -> Reply:
        """The events of the stream, added up."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return msgspec.structs.replace(self._message(), trace=self._context.report())

    def _message(self) -> Reply:
        reason, sequence = self._stop
        return Reply(
            id=self._id,
            model=self._model,
            content=reply_blocks(self._blocks.blocks),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _usage(self) -> Usage:
        usage = self._tally.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return Usage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )
