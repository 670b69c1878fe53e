"""The tokens of a model as bytes, in the form in which llguidance takes a vocabulary.

llguidance can also read a whole tokenizer.json. It then builds the tokenizer with all of its
merges, which takes twice as long as the rest, and its time is quadratic in the number of added
tokens. With a table, llguidance calls back when a grammar forces a text, to encode the text
(runtime/text/forced_text.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ostinato.runtime.text.forced_text import ForcedText
from ostinato.runtime.text.token_bytes import (
    byte_fallback_bytes,
    byte_level_bytes,
    byte_of_unicode,
    steps,
)
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from ostinato.runtime.text.tokenizer_parts import TokenizerParts

__all__ = ("TokenTable", "read_token_table")

_NO_BYTE = 256  # stands for a character that stands for no byte


class TokenTable:
    """The bytes of all tokens. `llguidance.TokenizerWrapper` reads the attributes and calls it.

    Attributes:
        tokens: bytes of each id; no grammar allows a token without bytes.
        special_token_ids: tokens that no text of a grammar matches.
        eos_token_id: a token that ends an answer.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special_token_ids: list[int],
        eos_token_id: int,
        forced_text: ForcedText,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._forced_text = forced_text

    def __call__(self, text: str) -> list[int]:
        """The token ids of a text.

        Raises:
            TypeError: `text` is not a string. `TokenizerWrapper` tries bytes first.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text must be a string, got {type(text).__name__}")
        return self._forced_text.encode(text)


def read_token_table(
    files: TokenizerFiles, parts: TokenizerParts, vocab_size: int, eos_token_ids: Sequence[int]
) -> TokenTable | None:
    """The table of a tokenizer; None if llguidance must read the tokenizer.json itself.

    That is the case for models other than BPE, for settings of BPE that nearly no tokenizer has,
    and without an end-of-sequence token, which llguidance then finds by its name.

    Args:
        files: the files of the tokenizer. Its merges are read when a text is first encoded.
        parts: the parts of the tokenizer.
        vocab_size: V; ids without a token get a special one.
        eos_token_ids: tokens that end an answer.

    Raises:
        ValueError: the vocabulary is no map of ids, or has ids outside the model's vocabulary.
    """
    decoders = {step.get("type"): step for step in steps(parts.decoder, "decoders")}
    is_byte_fallback = "ByteFallback" in decoders
    if not eos_token_ids or not (is_byte_fallback or "ByteLevel" in decoders):
        return None
    if not parts.is_plain_bpe:
        return None
    vocab = parts.vocab
    added = parts.added_tokens or []
    largest = max([*vocab.values(), *(token.id for token in added)], default=0)
    if largest >= vocab_size:
        raise ValueError(f"vocab size too small; {vocab_size} vs {largest + 1}")
    tokens = [b""] * vocab_size
    known = bytearray(vocab_size)
    space, byte_of = _space(decoders), byte_of_unicode()
    pieces = (
        (byte_fallback_bytes(token, space) for token in vocab)
        if is_byte_fallback
        else _bytes_of_characters(vocab, byte_of)
    )
    for token_id, piece in zip(vocab.values(), pieces, strict=True):
        tokens[token_id] = piece
        known[token_id] = 1
    special: list[int] = []
    for token in added:
        known[token.id] = 1
        if token.special or (token.content.startswith("<") and token.content.endswith(">")):
            special.append(token.id)
            tokens[token.id] = token.content.encode()
        elif is_byte_fallback:
            tokens[token.id] = byte_fallback_bytes(token.content, space)
        else:
            tokens[token.id] = byte_level_bytes(token.content, byte_of)
    for token_id, is_known in enumerate(known):
        if is_known:
            continue
        tokens[token_id] = f".<[{token_id}]>".encode()  # a name that no other token has
        special.append(token_id)
    return TokenTable(tokens, special, eos_token_ids[0], ForcedText(files, parts))


def _space(decoders: dict[Any, dict[str, Any]]) -> str:
    """The character that stands for a space in a vocabulary with byte fallback."""
    replace = decoders.get("Replace", {})
    pattern = (replace.get("pattern") or {}).get("String", "")
    return pattern if replace.get("content") == " " and len(pattern) == 1 else " "


def _bytes_of_characters(tokens: Iterable[str], byte_of: Mapping[str, int]) -> Iterator[bytes]:
    """The bytes of byte-level tokens, whose characters each stand for a byte.

    A token with another character has no bytes. All tokens are converted at once, because there are
    100,000 and more.
    """
    import numpy as np  # the engine's first imports go without it

    table = np.full(1 << 16, _NO_BYTE, np.uint16)
    for character, byte in byte_of.items():
        table[ord(character)] = byte
    texts = list(tokens)
    # A character after U+FFFF becomes two numbers, so it needs care; no byte has such a character.
    texts = [text if text.isascii() or max(text) < "\U00010000" else "\uffff" for text in texts]
    units = table[np.frombuffer("".join(texts).encode("utf-16-le", "surrogatepass"), np.uint16)]
    data = units.astype(np.uint8).tobytes()
    wrong = set(np.flatnonzero(units == _NO_BYTE).tolist())
    begin = 0
    for text in texts:
        end = begin + len(text)
        has_wrong = bool(wrong) and not wrong.isdisjoint(range(begin, end))
        yield b"" if has_wrong else data[begin:end]
        begin = end
