"""The reply of `/v1/responses`: a stream of events or one response object."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ostinato.api.base.errors import error_body, status_of
from ostinato.api.base.request_context import RequestContext
from ostinato.api.chat.chat_deltas import ChatOutputParser
from ostinato.api.chat.chat_generation import ChatGeneration
from ostinato.api.chat.content_blocks import BlockDelta, BlockKind, ContentBlock, ContentBlocks
from ostinato.api.responses.event_writer import EventWriter
from ostinato.api.responses.response_events import ResponseEvent
from ostinato.api.responses.response_object import (
    ApiError,
    IncompleteDetails,
    InputUsage,
    OutputUsage,
    Response,
    Usage,
)
from ostinato.api.responses.schemas import (
    ItemStatus,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
)
from ostinato.api.schemas.conversation import CalledFunction, Message, MessageToolCall
from ostinato.api.service.reply_state import Tally
from ostinato.api.service.service import Service
from ostinato.runtime.types.outputs import FinishReason

__all__ = ("ResponsesReply",)

_LOG = logging.getLogger("ostinato.api")


class ResponsesReply:
    """The reply to one request; use `stream` or `whole`, once.

    Args:
        ready: the request for the engine; its id is the reply's.
        messages: the conversation without instructions, for the store.
        stores: whether the reply is stored.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        ready: ChatGeneration,
        *,
        messages: list[Message],
        stores: bool,
        context: RequestContext,
    ) -> None:
        self._service = service
        self._generation = ready.generation
        self._parser = ChatOutputParser(ready.form)
        self._messages = messages
        self._context = context
        self._tally = Tally.of([ready.generation])
        self._num_reasoning_tokens = 0
        self._blocks = ContentBlocks()
        self._is_incomplete = False
        self._writer = EventWriter(ready.generation.request_id)
        sampling = ready.generation.sampling
        self._begun = Response(
            id=ready.generation.request_id,
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=service.client.model.name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning or ReasoningConfig(),
            store=stores,
            temperature=sampling.temperature,
            text=body.text or TextConfig(),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=sampling.top_p,
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
        )

    async def whole(self) -> Response:
        """The response that the events add up to."""
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                pass
        return self._ended()

    async def stream(self) -> AsyncGenerator[ResponseEvent, None]:
        """From `response.created` to `response.completed`, `.incomplete` or `.failed`."""
        yield self._writer.created(self._begun)
        yield self._writer.of_status(self._begun)
        try:
            async with aclosing(self._changes()) as changes:
                async for change in changes:
                    for event in self._writer.of_change(change, self._status_of(change.block)):
                        yield event
        except Exception as error:  # the status line has been sent: the error becomes an event
            if status_of(error) == 500:
                _LOG.error("a stream failed", exc_info=error)
            yield self._writer.of_status(self._failed(error))
            return
        yield self._writer.of_status(self._ended())

    async def _changes(self) -> AsyncGenerator[BlockDelta, None]:
        outputs = self._service.runner.generate(self._begun.id, [self._generation], self._context)
        async with aclosing(outputs):
            async for _, output in outputs:
                delta = self._parser.feed(output)
                self._tally.add(0, output)
                self._num_reasoning_tokens += delta.num_reasoning_tokens
                self._is_incomplete = delta.finish_reason == FinishReason.length
                for change in self._blocks.feed(delta.events):
                    yield change
        for change in self._blocks.finish():
            yield change

    def _status_of(self, block: ContentBlock) -> ItemStatus:
        is_last = block.index == len(self._blocks.blocks) - 1
        return "incomplete" if self._is_incomplete and is_last else "completed"

    def _ended(self) -> Response:
        """The complete response; stores it."""
        details = IncompleteDetails("max_output_tokens") if self._is_incomplete else None
        response = msgspec.structs.replace(
            self._begun,
            status="incomplete" if self._is_incomplete else "completed",
            completed_at=None if self._is_incomplete else int(time.time()),
            incomplete_details=details,
            output=[
                self._writer.item(block, self._status_of(block)) for block in self._blocks.blocks
            ],
            usage=self._usage(),
        )
        if response.store:
            self._service.stored_responses.put(
                response.id,
                msgspec.json.encode(response),
                [*self._messages, _answer(self._blocks.blocks)],
            )
        return msgspec.structs.replace(response, trace=self._context.report())

    def _failed(self, error: Exception) -> Response:
        detail = error_body(error).error
        return msgspec.structs.replace(
            self._begun,
            status="failed",
            error=ApiError(detail.code or "server_error", detail.message),
            output=[self._writer.item(block, "incomplete") for block in self._blocks.blocks],
        )

    def _usage(self) -> Usage:
        usage = self._tally.usage
        return Usage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputUsage(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputUsage(self._num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


def _answer(blocks: list[ContentBlock]) -> Message:
    """The answer as a message, for the conversation of the next request."""

    def texts(kind: BlockKind) -> str:
        return "".join(block.text for block in blocks if block.kind is kind)

    calls = [
        MessageToolCall(
            id=block.call_id, function=CalledFunction(name=block.name, arguments=block.text)
        )
        for block in blocks
        if block.kind is BlockKind.call
    ]
    return Message(
        role="assistant",
        content=texts(BlockKind.text) or (None if calls else ""),
        reasoning=texts(BlockKind.reasoning) or None,
        tool_calls=calls or None,
    )
