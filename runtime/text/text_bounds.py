"""Bounds the number of tokens of a text, and cuts long texts, before they are tokenised.

Tokenising takes about a microsecond a character. With these bounds, a text that cannot fit into
the context is refused by its length alone. If a text is to be truncated, only a part of it is
tokenised. The results are the same as without the bounds. The bounds exist only for the kinds of
tokenizers that this module supports.

- `max_token_characters` is the largest number of characters that one token stands for. It exists if
  the tokenizer drops no text and turns each unknown character into tokens of its own.
- `TextCutter` cuts a text only at a letter boundary: after an ASCII letter, before a space and
  another ASCII letter. No token spans such a place, and the tokens on each side do not depend on
  the other side. This holds if the pre-tokenizer splits there, or if no token of the vocabulary
  spans such a place. So each word between two such places is at least one token.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any, Literal, NamedTuple

import tokenizers

__all__ = ("TextCutter", "Window", "max_token_characters")

# Unicode normalisation composes at most this many code points into one.
_MOST_COMPOSED = 4
_NORMAL_FORMS = {"NFC": _MOST_COMPOSED, "NFKC": _MOST_COMPOSED, "NFD": 1, "NFKD": 1}
# A place to cut: after a letter that a space and a letter follow.
_PLACE = re.compile(r"[A-Za-z](?= [A-Za-z])")
_STRETCH = 1 << 16  # the search from the end of a text reads this many characters at a time

# Alternatives in patterns of pre-tokenizers that match letters, with at most one space before them.
_WORDS = frozenset(
    (
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    )
)
# Alternatives that never match a letter and a space after it, and have no look-behind.
_OTHERS = frozenset(
    (
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"'(?:[sdmt]|ll|ve|re)",
        *(r" ?\p{N}+", r" ?\p{N}", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        r" ?[\p{P}\p{S}]+[\r\n]*",
        *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    )
)


class Window(NamedTuple):
    """The characters [begin, end) of a text."""

    begin: int
    end: int


class TextCutter:
    """Finds the part of a text that its first or last tokens come from.

    Args:
        backend: the tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # Whether the part after a cut begins with the space; None = the text cannot be cut.
        self._keeps_space = _keeps_space(backend)

    def window(self, text: str, num_tokens: int, side: Literal["left", "right"]) -> Window:
        """Find a part of `text` that has all tokens that truncation keeps.

        Args:
            text: the text that is to be truncated.
            num_tokens: tokens that are kept.
            side: where tokens are cut off. With `right` the part is at the beginning of the text,
                and has the same first `num_tokens` tokens as the text. With `left` it is at the end
                of the text, and has the same last `num_tokens` tokens.

        Returns:
            The part; the whole text if no shorter part is known to have these tokens.
        """
        whole = Window(0, len(text))
        if self._keeps_space is None:
            return whole
        if side == "right":
            places = (match.end() for match in _PLACE.finditer(text))
            cut = next(islice(places, num_tokens - 1, None), None) if num_tokens else 0
            return whole if cut is None else Window(0, cut)
        cut = self._last_place(text, num_tokens)
        return whole if cut is None else Window(cut if self._keeps_space else cut + 1, len(text))

    def _last_place(self, text: str, number: int) -> int | None:
        """The `number`-th place to cut, counted from the end; None if there are fewer."""
        if not number:
            return None
        end = len(text)
        while end > 0:
            begin = max(0, end - _STRETCH)
            stretch = text[begin : end + 2]  # the pattern looks two characters ahead
            places = [
                match.end() for match in _PLACE.finditer(stretch) if match.end() <= end - begin
            ]
            if number <= len(places):
                return begin + places[-number]
            number -= len(places)
            end = begin
        return None


def max_token_characters(backend: tokenizers.Tokenizer) -> int | None:
    """The largest number of characters that one token stands for; None = no bound is known."""
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    shrinkage = _shrinkage(normalizer)
    if shrinkage is None or not all(map(_keeps_text, _flat(pre_tokenizer, "pretokenizers"))):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such tokens also match any amount of white space around them
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not _knows_every_character(backend, vocabulary):
        return None
    return shrinkage * max(map(len, vocabulary))


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters can become one in normalisation, at most; None = text can vanish."""
    result = 1
    for step in _flat(normalizer, "normalizers"):
        kind = step["type"]
        if kind in _NORMAL_FORMS:
            result *= _NORMAL_FORMS[kind]
        elif kind == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            if not pattern or not content:
                return None
            result *= -(-len(pattern) // len(content))
        elif kind not in ("Lowercase", "Prepend", "ByteLevel"):
            return None
    return result


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a step of a pre-tokenizer keeps the whole text."""
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


def _knows_every_character(backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Whether each character without a token becomes at least one token of its own."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    return _knows_every_byte(backend, vocabulary) or (
        model.unk_token in vocabulary and not model.fuse_unk
    )


def _knows_every_byte(backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Whether a BPE turns an unknown character into tokens of its bytes."""
    if backend.model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return _is_byte_level(backend) and all(map(vocabulary.__contains__, alphabet))


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    steps = _flat(_state(backend.pre_tokenizer), "pretokenizers")
    steps += _flat(_state(backend.normalizer), "normalizers")
    return any(step["type"] == "ByteLevel" for step in steps)


def _keeps_space(backend: tokenizers.Tokenizer) -> bool | None:
    """Whether the part after a cut begins with the space; None = the text cannot be cut.

    A text cannot be cut if tokens can span a place to cut, or depend on the text beyond it.
    """
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        if re.search(r"\s", text) or not text:
            return None
        # Such tokens match spaces around them, which a cut would assign to the other side.
        if (token.lstrip and text[0].isalpha()) or (token.rstrip and text[-1].isalpha()):
            return None
    model = backend.model
    if isinstance(model, tokenizers.models.BPE) and model.dropout:
        return None
    adds_space = _adds_space(_state(backend.normalizer))
    if adds_space is None:
        return None
    splits = False
    for step in _flat(_state(backend.pre_tokenizer), "pretokenizers"):
        kind = step["type"]
        if kind == "ByteLevel":
            splits |= step["use_regex"]
            adds_space |= step["add_prefix_space"]
        elif kind == "Metaspace":
            splits |= step["split"]
            adds_space |= step["prepend_scheme"] != "never"
        elif kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit"):
            splits = True
        elif kind == "Split":
            has_words = _has_words(step)
            if has_words is None:
                return None
            splits |= has_words
        elif kind != "Digits":
            return None
    if not splits and not _no_token_spans(backend):
        return None
    return not adds_space


def _adds_space(normalizer: dict[str, Any] | None) -> bool | None:
    """Whether a normalizer puts a space before a text; None for a normalizer that is not known.

    The known normalizers treat the text on each side of a cut by itself.
    """
    adds_space = False
    for step in _flat(normalizer, "normalizers"):
        kind = step["type"]
        if kind == "Prepend":
            if step["prepend"] != "▁":
                return None
            adds_space = True
        elif kind == "Replace":
            if (step["pattern"].get("String"), step["content"]) != (" ", "▁"):
                return None
        elif kind not in (*_NORMAL_FORMS, "Lowercase", "BertNormalizer"):
            return None
    return adds_space


def _has_words(split: dict[str, Any]) -> bool | None:
    """Whether a pattern splits before each word; None for a pattern that is not known."""
    if split["behavior"] != "Isolated" or split["invert"]:
        return None
    pattern = split["pattern"]
    if "String" in pattern:
        return None
    parts = set(_alternatives(pattern["Regex"]))
    if parts - _WORDS - _OTHERS:
        return None
    return bool(parts & _WORDS)


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between its outermost `|`."""
    parts = [""]
    depth, is_escaped, is_class = 0, False, False
    for character in pattern:
        if character == "|" and not (depth or is_escaped or is_class):
            parts.append("")
            continue
        parts[-1] += character
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif is_class:
            is_class = character != "]"
        elif character == "[":
            is_class = True
        else:
            depth += (character == "(") - (character == ")")
    return parts


def _no_token_spans(backend: tokenizers.Tokenizer) -> bool:
    """Whether no token of a BPE has a letter before a space. Then no merge spans a cut."""
    if not isinstance(backend.model, tokenizers.models.BPE):
        return False
    vocabulary = backend.get_vocab()
    if not _knows_every_byte(backend, vocabulary):
        return False  # adjacent unknown characters can become one token
    return not any(re.search("[A-Za-z][▁Ġ ]", token) for token in vocabulary)


def _state(part: Any) -> dict[str, Any] | None:
    """The settings of one component of a tokenizer; None if the tokenizer does not have it."""
    return None if part is None else json.loads(part.__getstate__())


def _flat(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a component, which can be a sequence of sequences."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state[name] for step in _flat(inner, name)]
