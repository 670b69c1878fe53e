"""Assigns the log-probabilities of a response's tokens to its content blocks."""

from __future__ import annotations

from ostinato.api.chat.content_blocks import BlockDelta, BlockKind
from ostinato.api.openai.logprobs import TokenBytes, all_chat_logprobs
from ostinato.api.schemas.chat_completions import ChatTokenLogprob
from ostinato.runtime.types.outputs import RequestOutput

__all__ = ("TextLogprobs",)


class TextLogprobs:
    """Assigns log-probabilities of tokens to the text of content blocks.

    Text can be held back. So an entry waits until the change with the text of its token arrives.
    Entries of reasoning, of calls and of markers between blocks are dropped. A token that also
    holds a part of a marker or of white space around the text keeps its entry.

    Args:
        num_top: alternatives per token; None = the request asks for no log-probabilities.
    """

    def __init__(self, token_bytes: TokenBytes, num_top: int | None) -> None:
        self._token_bytes = token_bytes
        self._num_top = num_top
        self._waiting: list[ChatTokenLogprob] = []
        self._of_block: dict[int, list[ChatTokenLogprob]] = {}

    async def add(self, output: RequestOutput) -> None:
        """Add the entries of an output's tokens. Called before `of_change`.

        Other tasks run while those of many tokens are made.
        """
        if self._num_top is None or not output.new_token_ids:
            return
        assert output.logprobs is not None, "the engine reports what the request asked for"
        logprobs = await all_chat_logprobs(
            output.new_token_ids,
            output.logprobs.__getitem__,
            self._token_bytes,
            num_top=self._num_top,
        )
        self._waiting += logprobs.content

    def of_change(self, change: BlockDelta) -> list[ChatTokenLogprob]:
        """The entries of new text; none for other changes."""
        entries = self._waiting[change.num_unseen : change.num_tokens]
        del self._waiting[: change.num_tokens]
        if change.block.kind is not BlockKind.text or not entries:
            return []
        self._of_block.setdefault(change.block.index, []).extend(entries)
        return entries

    def of_block(self, index: int) -> list[ChatTokenLogprob]:
        """All entries of a block so far."""
        return self._of_block.get(index, [])
