"""The reply of `/v1/messages`: a stream of events or one message."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ostinato.api.anthropic.convert import block_events, reply_blocks, stop_of
from ostinato.api.anthropic.message_events import (
    MessageBegins,
    MessageChanges,
    MessageEnds,
    MessageEvent,
    StopDelta,
)
from ostinato.api.anthropic.preparation import PreparedMessages
from ostinato.api.anthropic.schemas import MessagesUsage, Reply
from ostinato.api.base.request_context import RequestContext
from ostinato.api.chat.chat_deltas import ChatDeltas
from ostinato.api.chat.content_blocks import ContentBlocks
from ostinato.api.service.service import Service

__all__ = ("MessagesReply",)


class MessagesReply:
    """The reply to one request. Call either `stream` or `whole`, once.

    Args:
        prepared: the request, which `RequestRunner.prepare` has accepted.
    """

    def __init__(
        self,
        service: Service,
        prepared: PreparedMessages,
        context: RequestContext,
    ) -> None:
        ready = prepared.ready
        self._service = service
        self._generation = ready.generation
        self._report = ready.report
        self._shows_tier = prepared.shows_tier
        self._deltas = ChatDeltas(ready, prepared.stream_interval)
        self._context = context
        self._blocks = ContentBlocks()
        self._stop: tuple[str | None, str | None] = None, None

    async def stream(self) -> AsyncGenerator[MessageEvent, None]:
        """The events, from `message_start` to `message_stop`."""
        has_begun = cuts_call = False
        request_id, runner = self._generation.request_id, self._service.runner
        outputs = runner.generate(request_id, [self._generation], self._context)
        async with aclosing(outputs):
            async for _, output in outputs:
                if (delta := self._deltas.add(output)) is None:
                    continue
                if not has_begun:  # the number of cached tokens is known now
                    has_begun = True
                    yield MessageBegins(message=self._message())
                for change in self._blocks.feed(delta.events):
                    for event in block_events(change):
                        yield event
                if delta.finish_reason is not None:
                    cuts_call = delta.cuts_call
                    self._stop = stop_of(delta)
        for change in self._blocks.finish(cuts_call=cuts_call):
            for event in block_events(change):
                yield event
        reason, sequence = self._stop
        yield MessageChanges(
            delta=StopDelta(stop_reason=reason or "end_turn", stop_sequence=sequence),
            usage=self._usage(),
        )
        yield MessageEnds(trace=self._context.report())

    async def whole(self) -> Reply:
        """The whole message."""
        async with aclosing(self.stream()) as events:
            async for _ in events:
                pass
        return msgspec.structs.replace(self._message(), trace=self._context.report())

    def _message(self) -> Reply:
        reason, sequence = self._stop
        return Reply(
            id=self._generation.request_id,
            model=self._service.model_name(self._context),
            content=reply_blocks(self._blocks.blocks),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
            prompt_text=self._report.text,
            prompt_token_offsets=self._report.token_offsets,
        )

    def _usage(self) -> MessagesUsage:
        usage = self._deltas.tally.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            service_tier="standard" if self._shows_tier else msgspec.UNSET,
        )
