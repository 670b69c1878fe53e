"""Converts content blocks to output items and stream events of `/v1/responses`."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from ostinato.api.chat.content_blocks import BlockDelta, BlockKind, ContentBlock
from ostinato.api.responses.convert import encoded_reasoning
from ostinato.api.responses.response_events import (
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    CustomCallInputDelta,
    CustomCallInputDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from ostinato.api.responses.response_object import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Response,
)
from ostinato.api.responses.schemas import ItemStatus
from ostinato.api.responses.text_logprobs import TextLogprobs

__all__ = ("EventWriter",)

_PREFIXES = {BlockKind.text: "msg", BlockKind.reasoning: "rs", BlockKind.call: "fc"}
_LIFECYCLE = {
    "queued": ResponseQueued,
    "in_progress": ResponseInProgress,
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
}


class EventWriter:
    """Makes the output items and the events of one response. It numbers the events.

    Args:
        response_id: the response's id. The ids of its items are made from it.
        logprobs: the log-probabilities of the response's texts.
        encodes_reasoning: whether reasoning items have `encrypted_content`.
    """

    def __init__(
        self, response_id: str, logprobs: TextLogprobs, *, encodes_reasoning: bool
    ) -> None:
        self._logprobs = logprobs
        self._encodes_reasoning = encodes_reasoning
        self._stem = response_id.removeprefix("resp_")
        self._num_events = 0

    def created(self, response: Response) -> ResponseEvent:
        """The first event."""
        return ResponseCreated(sequence_number=self._next(), response=response)

    def of_status(self, response: Response) -> ResponseEvent:
        """The event for the response's present status."""
        return _LIFECYCLE[response.status](sequence_number=self._next(), response=response)

    def of_change(self, change: BlockDelta, status: ItemStatus) -> list[ResponseEvent]:
        """The events of one change of a block.

        Args:
            change: a block's beginning, its new text, or its end.
            status: the status of the block's item. Only used if the change ends the block.
        """
        block = change.block
        entries = self._logprobs.of_change(change)  # the beginning of a call has tokens too
        if change.begins:
            return self._begin(block)
        if change.ends:
            return self._end(block, status)
        place = self._place(block)
        if block.kind is BlockKind.text:
            return [OutputTextDelta(**place, delta=change.delta, logprobs=entries)]
        if block.kind is BlockKind.reasoning:
            return [ReasoningTextDelta(**place, delta=change.delta)]
        if block.is_custom:
            return [CustomCallInputDelta(**place, delta=change.delta)]
        return [CallArgumentsDelta(**place, delta=change.delta)]

    def item(
        self, block: ContentBlock, status: ItemStatus, *, is_empty: bool = False
    ) -> OutputItem:
        """The output item of a block.

        Args:
            block: the block.
            status: the status of the item.
            is_empty: leave the text out. The event that begins an item has no text.
        """
        item_id, text = self._item_id(block), "" if is_empty else block.text
        if block.is_custom:
            return OutputCustomCall(
                id=item_id, status=status, call_id=block.call_id, name=block.name, input=text
            )
        if block.kind is BlockKind.call:
            return OutputCall(
                id=item_id, status=status, call_id=block.call_id, name=block.name, arguments=text
            )
        if block.kind is BlockKind.reasoning:
            return OutputReasoning(
                id=item_id,
                status=status,
                content=[] if is_empty else [ReasoningText(text=text)],
                encrypted_content=encoded_reasoning(text) if self._encodes_reasoning else UNSET,
            )
        content = [] if is_empty else [self._output_text(block, text)]
        return OutputMessage(id=item_id, status=status, content=content)

    def empty_message(self) -> OutputItem:
        """The only item of an answer that ended before its first text."""
        return OutputMessage(
            id=f"{_PREFIXES[BlockKind.text]}_{self._stem}_0",
            status="incomplete",
            content=[OutputText(text="")],
        )

    def _begin(self, block: ContentBlock) -> list[ResponseEvent]:
        begun = self.item(block, "in_progress", is_empty=True)
        events: list[ResponseEvent] = [
            OutputItemAdded(sequence_number=self._next(), output_index=block.index, item=begun)
        ]
        if block.kind is not BlockKind.call:
            events.append(ContentPartAdded(**self._place(block), part=self._part(block, "")))
        return events

    def _end(self, block: ContentBlock, status: ItemStatus) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if block.is_custom:
            events.append(CustomCallInputDone(**self._place(block), input=block.text))
        elif block.kind is BlockKind.call:
            events.append(
                CallArgumentsDone(**self._place(block), name=block.name, arguments=block.text)
            )
        else:
            place: dict[str, Any] = {**self._place(block), "text": block.text}
            if block.kind is BlockKind.text:
                entries = self._logprobs.of_block(block.index)
                events.append(OutputTextDone(**place, logprobs=entries))
            else:
                events.append(ReasoningTextDone(**place))
            part = self._part(block, block.text)
            events.append(ContentPartDone(**self._place(block), part=part))
        item = self.item(block, status)
        events.append(
            OutputItemDone(sequence_number=self._next(), output_index=block.index, item=item)
        )
        return events

    def _part(self, block: ContentBlock, text: str) -> OutputText | ReasoningText:
        if block.kind is BlockKind.text:
            return self._output_text(block, text)
        return ReasoningText(text=text)

    def _output_text(self, block: ContentBlock, text: str) -> OutputText:
        # A copy, because the block of an unfinished reply grows while the reply is sent.
        return OutputText(text=text, logprobs=list(self._logprobs.of_block(block.index)))

    def _place(self, block: ContentBlock) -> dict[str, Any]:
        return {
            "sequence_number": self._next(),
            "output_index": block.index,
            "item_id": self._item_id(block),
        }

    def _item_id(self, block: ContentBlock) -> str:
        prefix = "ctc" if block.is_custom else _PREFIXES[block.kind]
        return f"{prefix}_{self._stem}_{block.index}"

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1
