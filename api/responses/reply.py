"""The reply of `/v1/responses`: a stream of events or one response object."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from ostinato.api.base.errors import error_body, status_of
from ostinato.api.base.request_context import RequestContext
from ostinato.api.chat.chat_deltas import ChatOutputParser
from ostinato.api.chat.chat_generation import ChatGeneration
from ostinato.api.chat.content_blocks import BlockDelta, BlockKind, ContentBlock, ContentBlocks
from ostinato.api.responses.schemas import (
    ApiError,
    Event,
    IncompleteDetails,
    InputUsage,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputUsage,
    ReasoningConfig,
    ReasoningText,
    Response,
    ResponsesRequest,
    TextConfig,
    Usage,
)
from ostinato.api.schemas.conversation import CalledFunction, Message, MessageToolCall
from ostinato.api.service.reply_state import Tally
from ostinato.api.service.service import Service
from ostinato.runtime.types.outputs import FinishReason

__all__ = ("ResponsesReply",)

_LOG = logging.getLogger("ostinato.api")
_PREFIXES = {BlockKind.text: "msg", BlockKind.reasoning: "rs", BlockKind.call: "fc"}


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
        self._num_events = 0
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

    async def stream(self) -> AsyncGenerator[Event, None]:
        """From `response.created` to `response.completed`, `.incomplete` or `.failed`."""
        yield self._event("response.created", response=self._begun)
        yield self._event("response.in_progress", response=self._begun)
        try:
            async with aclosing(self._changes()) as changes:
                async for change in changes:
                    for event in self._events_of(change):
                        yield event
        except Exception as error:  # the status line has been sent: the error becomes an event
            if status_of(error) == 500:
                _LOG.error("a stream failed", exc_info=error)
            yield self._event("response.failed", response=self._failed(error))
            return
        response = self._ended()
        yield self._event(f"response.{response.status}", response=response)

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

    def _events_of(self, change: BlockDelta) -> list[Event]:
        block = change.block
        item_id, place = self._item_id(block), {"output_index": block.index}
        if change.begins:
            begun = self._item(block, "in_progress", is_empty=True)
            events = [self._event("response.output_item.added", item=begun, **place)]
            if block.kind is not BlockKind.call:
                events.append(self._part_event("added", block, ""))
            return events
        of_item: dict[str, Any] = {"item_id": item_id, **place}
        text = of_item | {"content_index": 0}
        if not change.ends:
            if block.kind is BlockKind.text:
                kind, fields = "output_text", text | {"logprobs": []}
            elif block.kind is BlockKind.reasoning:
                kind, fields = "reasoning_text", text
            else:
                kind, fields = "function_call_arguments", of_item
            return [self._event(f"response.{kind}.delta", delta=change.delta, **fields)]
        if block.kind is BlockKind.call:
            fields = of_item | {"name": block.name, "arguments": block.text}
            events = [self._event("response.function_call_arguments.done", **fields)]
        else:
            is_text = block.kind is BlockKind.text
            kind = "output_text" if is_text else "reasoning_text"
            fields = text | {"text": block.text} | ({"logprobs": []} if is_text else {})
            events = [
                self._event(f"response.{kind}.done", **fields),
                self._part_event("done", block, block.text),
            ]
        item = self._item(block, self._status_of(block))
        return [*events, self._event("response.output_item.done", item=item, **place)]

    def _part_event(self, what: str, block: ContentBlock, text: str) -> Event:
        is_text = block.kind is BlockKind.text
        return self._event(
            f"response.content_part.{what}",
            item_id=self._item_id(block),
            output_index=block.index,
            content_index=0,
            part=OutputText(text=text) if is_text else ReasoningText(text=text),
        )

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return Event(type=kind, sequence_number=self._num_events - 1, **fields)

    def _item_id(self, block: ContentBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._begun.id.removeprefix('resp_')}_{block.index}"

    def _status_of(self, block: ContentBlock) -> Any:
        is_last = block.index == len(self._blocks.blocks) - 1
        return "incomplete" if self._is_incomplete and is_last else "completed"

    def _item(self, block: ContentBlock, status: Any, *, is_empty: bool = False) -> OutputItem:
        item_id, text = self._item_id(block), "" if is_empty else block.text
        if block.kind is BlockKind.call:
            return OutputCall(
                id=item_id,
                status=status,
                call_id=block.call_id,
                name=block.name,
                arguments=text,
            )
        if block.kind is BlockKind.reasoning:
            thoughts = [] if is_empty else [ReasoningText(text=text)]
            return OutputReasoning(id=item_id, status=status, content=thoughts)
        content = [] if is_empty else [OutputText(text=text)]
        return OutputMessage(id=item_id, status=status, content=content)

    def _ended(self) -> Response:
        """The complete response; stores it."""
        details = IncompleteDetails("max_output_tokens") if self._is_incomplete else None
        response = msgspec.structs.replace(
            self._begun,
            status="incomplete" if self._is_incomplete else "completed",
            completed_at=None if self._is_incomplete else int(time.time()),
            incomplete_details=details,
            output=[self._item(block, self._status_of(block)) for block in self._blocks.blocks],
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
            output=[self._item(block, "incomplete") for block in self._blocks.blocks],
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
