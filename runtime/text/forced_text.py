"""Encodes the texts that grammars force, with the few tokens that can occur in them.

If a grammar allows only one text, llguidance allows only the tokens into which the model's
tokenizer encodes this text. To build the whole tokenizer takes 0.3 s or more with 151,936 tokens,
and holds the interpreter's lock. Each token of an encoding is a part of the text. So a tokenizer
with only the tokens that occur in the text, and with the merges that make these tokens, encodes it
as the whole tokenizer does. It is built in about a millisecond.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from ostinato.runtime.text.tokenizer_parts import AddedToken, TokenizerParts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ("ForcedText",)

# All parts of a text up to this length are looked up. Longer tokens are few; each of them is
# searched in the text.
_SHORT = 16
# Tokens are kept for texts of this many characters together.
_MAX_CHARACTERS = 1 << 18
_COPIED = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")


class ForcedText:
    """Encodes texts. Safe to call from several threads at once.

    Args:
        files: has the merges, which are read at the first call.
        parts: a tokenizer whose `is_plain_bpe` is true.
    """

    def __init__(self, files: TokenizerFiles, parts: TokenizerParts) -> None:
        self._files = files
        self._parts = parts
        self._lock = threading.Lock()
        self._texts: dict[str, None] = {}  # the encoder has all tokens that occur in them
        self._num_characters = 0
        self._vocab: dict[str, int] = {}
        self._merges: dict[tuple[str, str], int] = {}  # to their ranks
        self._added: dict[str, AddedToken] = {}
        self._encoder: Tokenizer | None = None

    def encode(self, text: str) -> list[int]:
        """The ids of a text's tokens, as the whole tokenizer gives them.

        As llguidance does, this leaves out a space that the tokenizer adds before a text.
        """
        with self._lock:
            if self._encoder is None or not self._is_known(text):
                self._encoder = self._learn(text)
            return self._encoder.encode(text, add_special_tokens=False).ids

    def _is_known(self, text: str) -> bool:
        return text in self._texts or any(text in known for known in self._texts)

    def _learn(self, text: str) -> Tokenizer:
        """Make an encoder that also has the tokens that occur in `text`."""
        if not self._texts or self._num_characters + len(text) > _MAX_CHARACTERS:
            self._texts, self._num_characters = {}, 0
            self._vocab, self._merges, self._added = self._always(), {}, {}
        ranks = self._ranks  # read by the first call, whatever its text is
        self._texts[text] = None
        self._num_characters += len(text)
        normalizer, pre_tokenizer = self._splitter.normalizer, self._splitter.pre_tokenizer
        # Added tokens divide a text before it is normalised, so its other parts can differ from the
        # whole normalised text at their ends.
        forms = {text} if normalizer is None else {text, normalizer.normalize_str(text)}
        for form in forms:
            for first in self._added_by_character.keys() & set(form):
                self._added.update(
                    (each.content, each)
                    for each in self._added_by_character[first]
                    if each.content in form
                )
            if pre_tokenizer is not None:
                form = "".join(word for word, _ in pre_tokenizer.pre_tokenize_str(form))
            self._find(form, ranks)
        return self._make(
            self._vocab,
            sorted(self._merges, key=self._merges.__getitem__),
            list(self._added.values()),
        )

    def _find(self, text: str, ranks: Mapping[tuple[str, str], int]) -> None:
        """Add the tokens that occur in a text, and the merges that make them."""
        vocab = self._parts.vocab
        found = {
            part
            for length in range(1, _SHORT + 1)
            for begin in range(len(text) - length + 1)
            if (part := text[begin : begin + length]) in vocab
        }
        found.update(token for token in self._long_tokens if token in text)
        for token in found - self._vocab.keys():
            self._vocab[token] = vocab[token]
            for place in range(1, len(token)):
                pair = token[:place], token[place:]
                rank = ranks.get(pair)
                if rank is not None:
                    self._merges[pair] = rank

    def _make(
        self,
        vocab: dict[str, int],
        merges: list[tuple[str, str]],
        added: list[AddedToken],
    ) -> Tokenizer:
        """The tokenizer with some of its tokens and merges."""
        from tokenizers import Tokenizer

        parts = self._parts
        model = {name: getattr(parts.model, name) for name in _COPIED}
        model |= {"type": "BPE", "merges": merges}
        # An added token has the id that the model gives it.
        model["vocab"] = vocab | {token.content: token.id for token in added}
        file = {
            "version": "1.0",
            "added_tokens": sorted(added, key=lambda token: token.id),
            "normalizer": _without_prefix(parts.normalizer),
            "pre_tokenizer": _without_prefix(parts.pre_tokenizer),
            "model": model,
        }
        return Tokenizer.from_str(msgspec.json.encode(file).decode())

    def _always(self) -> dict[str, int]:
        """The tokens for characters that are no tokens."""
        vocab, model = self._parts.vocab, self._parts.model
        names = [model.unk_token or ""]
        if model.byte_fallback:
            names += [f"<0x{byte:02X}>" for byte in range(256)]
        return {name: vocab[name] for name in names if name in vocab}

    @cached_property
    def _splitter(self) -> Tokenizer:
        """The tokenizer without tokens. It normalises and divides texts."""
        return self._make(self._always(), [], [])

    @cached_property
    def _long_tokens(self) -> list[str]:
        return [token for token in self._parts.vocab if len(token) > _SHORT]

    @cached_property
    def _added_by_character(self) -> dict[str, list[AddedToken]]:
        """The added tokens by their first characters."""
        found: dict[str, list[AddedToken]] = {}
        for token in self._parts.added_tokens or ():
            found.setdefault(token.content[:1], []).append(token)
        return found

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        merges = self._files.merges()
        return dict(zip(merges, range(len(merges)), strict=True))


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer that adds no space before a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        return {
            key: [one for each in value if (one := _without_prefix(each)) is not None]
            if isinstance(value, list)
            else value
            for key, value in part.items()
        }
    if part.get("type") == "Prepend":
        return None
    return part | {"prepend_scheme": "never"} if part.get("type") == "Metaspace" else part
