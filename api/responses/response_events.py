"""The events of a stream of `/v1/responses`, one struct for each type."""

from __future__ import annotations

import msgspec

from ostinato.api.responses.response_object import (
    OutputItem,
    OutputText,
    ReasoningText,
    Response,
)
from ostinato.api.schemas.chat_completions import ChatTokenLogprob

__all__ = (
    "CallArgumentsDelta",
    "CallArgumentsDone",
    "ContentPartAdded",
    "ContentPartDone",
    "CustomCallInputDelta",
    "CustomCallInputDone",
    "OutputItemAdded",
    "OutputItemDone",
    "OutputTextDelta",
    "OutputTextDone",
    "ReasoningTextDelta",
    "ReasoningTextDone",
    "ResponseCompleted",
    "ResponseCreated",
    "ResponseEvent",
    "ResponseFailed",
    "ResponseInProgress",
    "ResponseIncomplete",
    "ResponseQueued",
)


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int  # from 0


class _OfResponse(_Event, frozen=True, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    pass


class ResponseQueued(_OfResponse, frozen=True, kw_only=True, tag="response.queued"):
    pass


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    pass


class _OfItem(_Event, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    pass


class OutputItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    pass


class _WithinItem(_Event, frozen=True, kw_only=True):
    output_index: int
    item_id: str


class _WithinContent(_WithinItem, frozen=True, kw_only=True):
    content_index: int = 0  # an item has one part


class _OfPart(_WithinContent, frozen=True, kw_only=True):
    part: OutputText | ReasoningText


class ContentPartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    pass


class ContentPartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    pass


class OutputTextDelta(_WithinContent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(_WithinContent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(
    _WithinContent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"
):
    delta: str


class ReasoningTextDone(
    _WithinContent, frozen=True, kw_only=True, tag="response.reasoning_text.done"
):
    text: str


class CallArgumentsDelta(
    _WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class CallArgumentsDone(
    _WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class CustomCallInputDelta(
    _WithinItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    delta: str


class CustomCallInputDone(
    _WithinItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    input: str


ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | CustomCallInputDelta
    | CustomCallInputDone
)
