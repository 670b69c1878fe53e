"""The events of a stream of `/v1/messages`, one struct for each type."""

from __future__ import annotations

import msgspec

from ostinato.api.anthropic.schemas import (
    MessagesUsage,
    Reply,
    ReplyText,
    ReplyThinking,
    ReplyToolUse,
)
from ostinato.api.base.timeline import Timeline

__all__ = (
    "BlockBegins",
    "BlockChanges",
    "BlockEnds",
    "InputJsonDelta",
    "MessageBegins",
    "MessageChanges",
    "MessageEnds",
    "MessageEvent",
    "SignatureDelta",
    "StopDelta",
    "TextDelta",
    "ThinkingDelta",
)


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of events and deltas. In JSON, the field `type` has the tag."""


class TextDelta(_Tagged, frozen=True, kw_only=True, tag="text_delta"):
    text: str


class ThinkingDelta(_Tagged, frozen=True, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(_Tagged, frozen=True, kw_only=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(_Tagged, frozen=True, kw_only=True, tag="input_json_delta"):
    partial_json: str


class MessageBegins(_Tagged, frozen=True, kw_only=True, tag="message_start"):
    message: Reply


class BlockBegins(_Tagged, frozen=True, kw_only=True, tag="content_block_start"):
    index: int
    content_block: ReplyText | ReplyThinking | ReplyToolUse


class BlockChanges(_Tagged, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockEnds(_Tagged, frozen=True, kw_only=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: str
    stop_sequence: str | None


class MessageChanges(_Tagged, frozen=True, kw_only=True, tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageEnds(_Tagged, frozen=True, kw_only=True, tag="message_stop"):
    trace: Timeline | msgspec.UnsetType = msgspec.UNSET  # with the header x-trace: 1


MessageEvent = MessageBegins | BlockBegins | BlockChanges | BlockEnds | MessageChanges | MessageEnds
