"""The reply of `/v1/responses`: a stream of events or one response object."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec

from ostinato.api.base.errors import error_body, status_of
from ostinato.api.base.request_context import RequestContext
from ostinato.api.chat.chat_deltas import ChatDeltas
from ostinato.api.chat.chat_generation import ChatGeneration
from ostinato.api.chat.content_blocks import BlockDelta, BlockKind, ContentBlock, ContentBlocks
from ostinato.api.http.json_parts import joined_parts, json_parts, json_pieces
from ostinato.api.http.sse import MANY_TOKENS, NAMED_EVENTS, InParts
from ostinato.api.responses.event_writer import EventWriter
from ostinato.api.responses.preparation import PreparedResponse
from ostinato.api.responses.response_events import ResponseEvent
from ostinato.api.responses.response_object import (
    ApiError,
    IncompleteDetails,
    InputUsage,
    OutputUsage,
    ReasoningShown,
    Response,
    ResponsesUsage,
)
from ostinato.api.responses.schemas import (
    ItemStatus,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
)
from ostinato.api.responses.text_logprobs import TextLogprobs
from ostinato.api.schemas.conversation import (
    CalledCustomTool,
    CalledFunction,
    Message,
    MessageToolCall,
)
from ostinato.api.service.background import BackgroundReply
from ostinato.api.service.service import Service

__all__ = ("ResponsesReply",)

_LOG = logging.getLogger("ostinato.api")


class ResponsesReply:
    """The reply to one request. Call either `stream` or `whole`, once.

    Args:
        prepared: the request, which `RequestRunner.prepare` has accepted.
        stores: whether the reply is stored under its id.

    Attributes:
        input_items: the input items of the request, a JSON list; empty if the reply is not stored.
    """

    def __init__(
        self,
        service: Service,
        prepared: PreparedResponse,
        *,
        stores: bool,
        context: RequestContext,
    ) -> None:
        body, ready = prepared.body, prepared.ready
        self._service = service
        self._generation = ready.generation
        self._deltas = ChatDeltas(ready, body.stream_interval or 1)
        self._messages = prepared.messages
        self._context = context
        self._blocks = ContentBlocks()
        self._incomplete_reason: str | None = None
        self._has_output = False
        self._logprobs = TextLogprobs(service.encoder.token_bytes, prepared.num_top_logprobs)
        self._writer = EventWriter(
            ready.generation.request_id,
            self._logprobs,
            encodes_reasoning="reasoning.encrypted_content" in (body.include or ()),
        )
        self._begun = _begun(service, body, ready, context, stores=stores)
        self.input_items = bytes(prepared.input_items) if stores else b"[]"
        self._end: Response | None = None

    async def whole(self) -> Response:
        """The whole response. A call that was cut off is left out."""
        async with aclosing(self._changes()) as changes:
            async for change in changes:
                self._logprobs.of_change(change)
        return await self._ended(with_cut_call=False)

    async def stream(self) -> AsyncGenerator[ResponseEvent | InParts, None]:
        """The events, from `response.created` to `.completed`, `.incomplete` or `.failed`."""
        yield self._writer.created(self._begun)
        yield self._writer.of_status(self._begun)
        is_queued = self._begun.status == "queued"
        try:
            async with aclosing(self._changes()) as changes:
                async for change in changes:
                    if is_queued:
                        is_queued = False
                        started = msgspec.structs.replace(self._begun, status="in_progress")
                        yield self._writer.of_status(started)
                    # The events at the end of a block have the whole block.
                    is_large = change.ends or change.num_tokens > MANY_TOKENS
                    for event in self._writer.of_change(change, self._status_of(change.block)):
                        yield InParts(event) if is_large else event
        except Exception as error:  # the status line has been sent, so the error becomes an event
            yield InParts(self._writer.of_status(self._failed(error)))
            return
        yield InParts(self._writer.of_status(await self._ended()))

    async def in_background(self, record: BackgroundReply, *, streams: bool) -> None:
        """Generate the reply without an open connection. Cancelling the call cancels the reply.

        Args:
            record: gets the events.
            streams: whether the request asked for events.
        """
        try:
            if streams:
                async with aclosing(self.stream()) as events:
                    async for event in events:
                        record.add(await _encoded(event))
            else:
                await self.whole()
        except asyncio.CancelledError:
            self._blocks.finish(cuts_call=True)  # a later request must not get half of a call
            self._end = self._with_output("cancelled")
            raise
        except Exception as error:
            self._blocks.finish(cuts_call=True)
            self._failed(error)
        finally:
            # A second cancellation does not stop it.
            await asyncio.shield(self._store(record.events))

    def present(self) -> Response:
        """The response in its present state."""
        if self._end is not None:
            return self._end
        return self._with_output("in_progress") if self._has_output else self._begun

    async def _changes(self) -> AsyncGenerator[BlockDelta, None]:
        cuts_call = False
        outputs = self._service.runner.generate(self._begun.id, [self._generation], self._context)
        async with aclosing(outputs):
            async for _, output in outputs:
                self._has_output = True
                if (delta := self._deltas.add(output)) is None:
                    continue
                await self._logprobs.add(delta.output)
                self._incomplete_reason = delta.incomplete_reason("max_output_tokens")
                cuts_call = delta.cuts_call
                for change in self._blocks.feed(delta.events):
                    yield change
        for change in self._blocks.finish(cuts_call=cuts_call):
            yield change

    def _status_of(self, block: ContentBlock) -> ItemStatus:
        is_last = block.index == len(self._blocks.blocks) - 1
        return "incomplete" if self._incomplete_reason and is_last else "completed"

    async def _ended(self, *, with_cut_call: bool = True) -> Response:
        """Make the complete response, and store it."""
        reason = self._incomplete_reason
        blocks = [one for one in self._blocks.blocks if with_cut_call or not one.is_cut]
        items = [self._writer.item(block, self._status_of(block)) for block in blocks]
        if not items and reason and not with_cut_call:
            items = [self._writer.empty_message()]
        response = msgspec.structs.replace(
            self._begun,
            status="incomplete" if reason else "completed",
            completed_at=None if reason else int(time.time()),
            incomplete_details=IncompleteDetails(reason) if reason else None,
            output=items,
            usage=self._usage(),
        )
        self._end = response
        if not self._begun.background:  # a reply in the background is stored with its events
            await self._store(())
        return msgspec.structs.replace(response, trace=self._context.report())

    def _failed(self, error: Exception) -> Response:
        if status_of(error) == 500:
            _LOG.error("a reply of /v1/responses failed", exc_info=error)
        detail = error_body(error).error
        error_shown = ApiError(detail.code or "server_error", detail.message)
        self._end = msgspec.structs.replace(self._with_output("failed"), error=error_shown)
        return self._end

    def _with_output(self, status: Literal["in_progress", "failed", "cancelled"]) -> Response:
        """The response with the items so far, all marked as not complete."""
        of_items = "in_progress" if status == "in_progress" else "incomplete"
        items = [self._writer.item(block, of_items) for block in self._blocks.blocks]
        return msgspec.structs.replace(self._begun, status=status, output=items)

    async def _store(self, events: Sequence[bytes]) -> None:
        """Store the reply. One above the limit of the store is not encoded to its end."""
        if not self._begun.store or self._end is None:
            return
        store = self._service.stored_responses
        most = store.limit - sum(map(len, events))
        response = await joined_parts(json_parts(self._end), most)
        if response is not None:
            store.put(
                self._begun.id,
                response,
                self._messages,
                _answer(self._blocks.blocks),
                events,
                input_items=self.input_items,
            )

    def _usage(self) -> ResponsesUsage:
        tally = self._deltas.tally
        usage = tally.usage
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputUsage(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputUsage(tally.num_reasoning_tokens or 0),
            total_tokens=usage.total_tokens,
        )


async def _encoded(event: ResponseEvent | InParts) -> bytes:
    """An event of a stream, encoded. Other tasks run while a large one is."""
    if not isinstance(event, InParts):
        return NAMED_EVENTS.of_chunk(event)
    return b"".join([piece async for piece in json_pieces(NAMED_EVENTS.parts(event))])


def _begun(
    service: Service,
    body: ResponsesRequest,
    ready: ChatGeneration,
    context: RequestContext,
    *,
    stores: bool,
) -> Response:
    """The response before its first output."""
    sampling, report = ready.generation.sampling, ready.report
    reasoning = body.reasoning or ReasoningConfig()
    return Response(
        id=ready.generation.request_id,
        created_at=int(time.time()),
        background=bool(body.background),
        status="queued" if body.background else "in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=service.model_name(context),
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=ReasoningShown(
            effort=reasoning.effort, summary=reasoning.summary or reasoning.generate_summary
        ),
        store=stores,
        temperature=sampling.temperature,
        text=body.text or TextConfig(),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        max_tool_calls=body.max_tool_calls,
        safety_identifier=body.safety_identifier,
        service_tier=None if body.service_tier is None else "default",
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_retention=body.prompt_cache_retention,
        top_logprobs=body.top_logprobs,
        prompt_text=report.text,
        prompt_token_offsets=report.token_offsets,
    )


def _answer(blocks: list[ContentBlock]) -> Message:
    """The answer as a message, for the conversation of the next request."""

    def texts(kind: BlockKind) -> str:
        return "".join(block.text for block in blocks if block.kind is kind)

    calls = [
        MessageToolCall(
            id=block.call_id,
            type="custom",
            custom=CalledCustomTool(name=block.name, input=block.text),
        )
        if block.is_custom
        else MessageToolCall(
            id=block.call_id, function=CalledFunction(name=block.name, arguments=block.text)
        )
        for block in blocks
        if block.kind is BlockKind.call and not block.is_cut
    ]
    return Message(
        role="assistant",
        content=texts(BlockKind.text) or (None if calls else ""),
        reasoning=texts(BlockKind.reasoning) or None,
        tool_calls=calls or None,
    )
