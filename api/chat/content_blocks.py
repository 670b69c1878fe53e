"""Converts parsed events to content blocks (reasoning, text, tool calls).

The Responses and Anthropic APIs have content blocks. A block begins, grows by deltas and ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from io import StringIO

import msgspec

from ostinato.api.parsing.events import CallArguments, CallBegins, Event, Reasoning

__all__ = ("BlockDelta", "BlockKind", "ContentBlock", "ContentBlocks")


class BlockKind(StrEnum):
    reasoning = "reasoning"
    text = "text"
    call = "call"


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block. Its `text` grows until the block ends. The text of a call is its arguments."""

    index: int
    kind: BlockKind
    written: StringIO = msgspec.field(default_factory=StringIO)
    name: str = ""  # name of the called function
    is_custom: bool = False  # the call is of a custom tool; the text is the tool's input
    call_id: str = ""
    is_cut: bool = False  # the answer ended within this call

    @property
    def text(self) -> str:
        return self.written.getvalue()


class BlockDelta(msgspec.Struct, frozen=True):
    """One change of a block: its beginning, new text, or its end. Only new text has a `delta`."""

    block: ContentBlock
    delta: str = ""
    num_tokens: int = 0  # the output tokens of the change, see api/parsing/events.py
    # The first `num_unseen` of these tokens have no text in `delta`. It is always 0 for a call.
    num_unseen: int = 0
    begins: bool = False
    ends: bool = False


class ContentBlocks:
    """The blocks of one answer so far."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._is_open = False

    def feed(self, events: Iterable[Event]) -> list[BlockDelta]:
        """The changes that new events make."""
        changes: list[BlockDelta] = []
        for event in events:
            if isinstance(event, CallBegins):
                changes += self._begin(BlockKind.call, event)
                continue
            kind = BlockKind.reasoning if isinstance(event, Reasoning) else BlockKind.text
            if isinstance(event, CallArguments):
                kind = BlockKind.call
            if not self._is_open or self.blocks[-1].kind is not kind:
                changes += self._begin(kind)
            block = self.blocks[-1]
            block.written.write(event.text)
            num_unseen = 0 if isinstance(event, CallArguments) else event.num_unseen
            changes.append(BlockDelta(block, event.text, event.num_tokens, num_unseen))
        return changes

    def finish(self, *, cuts_call: bool = False) -> list[BlockDelta]:
        """The change that ends the last block, if one is open.

        Args:
            cuts_call: the last block is a call, and its arguments are not complete.
        """
        if not self._is_open:
            return []
        self.blocks[-1].is_cut = cuts_call
        self._is_open = False
        return [BlockDelta(self.blocks[-1], ends=True)]

    def _begin(self, kind: BlockKind, call: CallBegins | None = None) -> list[BlockDelta]:
        changes = self.finish()
        block = ContentBlock(index=len(self.blocks), kind=kind)
        if call is not None:
            block.name, block.call_id, block.is_custom = call.name, call.id or "", call.is_custom
        self.blocks.append(block)
        self._is_open = True
        num_tokens = 0 if call is None else call.num_tokens
        return [*changes, BlockDelta(self.blocks[-1], begins=True, num_tokens=num_tokens)]
