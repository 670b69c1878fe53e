"""Tokenisation of prompts for all endpoints: in a thread where a text is long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.tokenizer import Tokenizer

__all__ = ("PromptEncoder", "TokenizerSource")

_INLINE_CHARACTERS = 4096  # a longer text is tokenised in a thread


class TokenizerSource(Protocol):
    """Has the tokenizer, once the engine has started."""

    tokenizer: Tokenizer | None


class PromptEncoder:
    """The model's tokenizer, with errors for a model that was loaded without one.

    Args:
        source: read at each call.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source

    def tokenizer(self, param: str) -> Tokenizer:
        """The model's tokenizer; raises InvalidRequestError naming `param` when it has none."""
        if self._source.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer: send token ids as the prompt of"
                " /v1/completions, or start the server with model.tokenizer=DIRECTORY",
                param=param,
                code="no_tokenizer",
            )
        return self._source.tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; `token_id:N` for a model without a tokenizer."""
        if self._source.tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._source.tokenizer.token_bytes(token_id)

    async def encode(
        self, texts: Sequence[str], *, param: str, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of each text."""
        tokenizer = self.tokenizer(param)
        # One by one: a batch would use several threads, and the cores are for the engine.
        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [
            await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
            for text in texts
        ]

    async def token_offsets(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Per token that `encode` gives: its characters [begin, end) in the text."""
        tokenizer = self.tokenizer("return_token_offsets")
        if len(text) <= _INLINE_CHARACTERS:
            return tokenizer.token_offsets(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            tokenizer.token_offsets, text, add_special_tokens=add_special_tokens
        )
