"""An answer as a row of blocks: reasoning, text and calls, each begun, continued and ended once.

The responses and the messages dialects show answers so; the chat dialect has one flat message.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from ostinato.api.parsing.events import CallArguments, CallBegins, Event, Reasoning

__all__ = ("Block", "BlockKind", "BlockNews", "BlockRow")


class BlockKind(StrEnum):
    reasoning = "reasoning"
    text = "text"
    call = "call"


class Block(msgspec.Struct, kw_only=True):
    """One block; its `text` grows until it ends. A call's is its arguments."""

    index: int
    kind: BlockKind
    text: str = ""
    name: str = ""  # of the function that is called
    call_id: str = ""


class BlockNews(msgspec.Struct, frozen=True):
    """What happens to a block; it begins with nothing and ends with nothing new."""

    block: Block
    delta: str = ""
    begins: bool = False
    ends: bool = False


class BlockRow:
    """The blocks of one answer so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def feed(self, events: Iterable[Event]) -> list[BlockNews]:
        """What new events change."""
        news: list[BlockNews] = []
        for event in events:
            if isinstance(event, CallBegins):
                news += self._begin(BlockKind.call, event.name, event.id or "")
                continue
            kind = BlockKind.reasoning if isinstance(event, Reasoning) else BlockKind.text
            if isinstance(event, CallArguments):
                kind = BlockKind.call
            if not self._is_open or self.blocks[-1].kind is not kind:
                news += self._begin(kind)
            block = self.blocks[-1]
            block.text += event.text
            news.append(BlockNews(block, delta=event.text))
        return news

    def finish(self) -> list[BlockNews]:
        """The end of the last block."""
        if not self._is_open:
            return []
        self._is_open = False
        return [BlockNews(self.blocks[-1], ends=True)]

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> list[BlockNews]:
        news = self.finish()
        self.blocks.append(Block(index=len(self.blocks), kind=kind, name=name, call_id=call_id))
        self._is_open = True
        return [*news, BlockNews(self.blocks[-1], begins=True)]
