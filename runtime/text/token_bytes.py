"""The bytes of each token, for tokenizers whose text is the joined bytes of its tokens.

Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-style vocabularies with byte fallback (Llama
1 and 2, Mistral, Gemma) have this property. These are nearly all models in use. With this table,
incremental detokenisation needs only look-ups and an incremental UTF-8 decoder. Log-probabilities
can show the bytes of a token that is a part of a character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

__all__ = ("TokenPieces", "byte_fallback_bytes", "byte_level_bytes", "byte_of_unicode", "steps")


def byte_of_unicode() -> dict[str, int]:
    """{character: byte}, the inverse of GPT-2's table of a printable character for each byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(byte): byte for byte in kept} | {
        chr(256 + index): byte for index, byte in enumerate(moved)
    }


def byte_level_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    """The bytes of a byte-level token, or its own if a character stands for no byte.

    Args:
        token: the token.
        byte_of: `byte_of_unicode()`.
    """
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()


def byte_fallback_bytes(token: str, space: str = "▁") -> bytes:
    """The bytes of a token of a vocabulary with byte fallback.

    Args:
        token: the token, such as "<0x0A>".
        space: the character that stands for a space.
    """
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(space, " ").encode()


def steps(part: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer.json, which is a step or a sequence of parts.

    Args:
        part: such as the `decoder`; None has no step.
        key: where a sequence has its parts.
    """
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part.get(key) or () for step in steps(inner, key)]


class TokenPieces:
    """The bytes of each token id, computed at first use; made by `from_tokenizer`.

    Attributes:
        strips_leading_space: whether decoding drops one space at the very beginning of a text.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_token_ids: frozenset[int],
        *,
        byte_level: bool,
        strips_leading_space: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_of = byte_of_unicode() if byte_level else None
        self._pieces: dict[int, bytes] = {}
        self._special = special_token_ids
        self.strips_leading_space = strips_leading_space

    @classmethod
    def from_tokenizer(
        cls, tokenizer: tokenizers.Tokenizer, special_token_ids: frozenset[int]
    ) -> TokenPieces | None:
        """The table for `tokenizer`, or None if its decoder does more than join bytes."""
        if tokenizer.decoder is None:
            return None
        decoders = steps(json.loads(tokenizer.decoder.__getstate__()), "decoders")
        kinds = [step["type"] for step in decoders]
        if kinds == ["ByteLevel"]:
            return cls(tokenizer, special_token_ids, byte_level=True, strips_leading_space=False)
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or not _replaces_underscore(
            decoders[0]
        ):
            return None
        if kinds[3:] == []:
            return cls(tokenizer, special_token_ids, byte_level=False, strips_leading_space=False)
        if kinds[3:] == ["Strip"] and _strips_one_space(decoders[3]):
            return cls(tokenizer, special_token_ids, byte_level=False, strips_leading_space=True)
        return None

    def piece(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that the tokenizer does not have."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id)
        return piece

    def shown_piece(self, token_id: int) -> bytes:
        """Like `piece`, but empty for special tokens."""
        return b"" if token_id in self._special else self.piece(token_id)

    def _make(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is not None:
            return byte_level_bytes(token, self._byte_of)
        return byte_fallback_bytes(token)


def _replaces_underscore(step: dict[str, Any]) -> bool:
    return step["pattern"] == {"String": "▁"} and step["content"] == " "


def _strips_one_space(step: dict[str, Any]) -> bool:
    return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
