"""Finds where the last tokens of a sequence occurred before, in its own or in another text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ("MAX_MATCH", "Match", "TextIndex", "key_of", "match_length")

MAX_MATCH = 32  # longer matches are not told apart
_MAX_CANDIDATES = 6  # places of one key that are compared, the latest first
_MAX_TOKENS = 16384  # tokens of the initial text that are indexed, counted from its end
_MOST_AT_ONCE = 1024  # tokens that one call indexes, at about half a microsecond each


class Match(NamedTuple):
    """A place in a text. The tokens before it equal the last tokens of a sequence."""

    place: int  # index of the token that followed
    length: int  # number of equal tokens before it, up to MAX_MATCH


def key_of(token_ids: Sequence[int], size: int) -> int:
    """The key of the last `size` tokens, by which they are looked up; for fewer tokens 0."""
    num_tokens = len(token_ids)
    return hash(tuple(token_ids[num_tokens - size :])) if num_tokens >= size else 0


class TextIndex:
    """Finds the places in a text that follow the last `min_match` or more tokens of a sequence.

    The text can grow. It is indexed piece by piece, so no call takes longer than a millisecond. The
    index takes about 150 bytes per token.

    Args:
        text: token ids; the caller may append tokens. Only the last 16,384 tokens of the initial
            text are indexed.
        min_match: tokens of a key.
    """

    def __init__(self, text: Sequence[int], min_match: int) -> None:
        self._text = text
        self._min_match = min_match
        self._latest: dict[int, int] = {}  # hash of a key -> the latest place after it
        self._first = max(min_match, len(text) - _MAX_TOKENS)  # the first place that is indexed
        self._next = self._first  # the next place to index
        # For each place from `_first` on: the previous place with the same hash; 0 = none.
        self._earlier: list[int] = []

    def take(self, end: int) -> bool:
        """Index the next places before `end`, at most 1024; returns whether none is left."""
        text, size, latest, earlier = self._text, self._min_match, self._latest, self._earlier
        last = min(end, len(text))
        end = min(last, self._next + _MOST_AT_ONCE)
        for place in range(self._next, end):
            key = hash(tuple(text[place - size : place]))
            earlier.append(latest.get(key, 0))
            latest[key] = place
        self._next = max(self._next, end)
        return self._next >= last

    def find(
        self, token_ids: Sequence[int], key: int, *, near: int = 0, most: int = MAX_MATCH
    ) -> Match | None:
        """The place with the longest match; None without a match.

        Args:
            token_ids: the sequence whose last tokens are looked up.
            key: `key_of` these tokens and `min_match`.
            near: among equally long matches, the first place at or after `near` is taken, or the
                latest place if there is none. 0 = always the latest.
            most: how many of the last tokens may match.
        """
        place = self._latest.get(key, 0)
        if not place:
            return None
        size = self._min_match
        best: Match | None = None
        for _ in range(_MAX_CANDIDATES):
            if not place:
                break
            length = match_length(self._text, place, token_ids, most)
            if length >= size and (
                best is None
                or length > best.length
                or (length == best.length and place >= near > 0)
            ):
                best = Match(place, length)
            place = self._earlier[place - self._first]
        return best


def match_length(text: Sequence[int], place: int, token_ids: Sequence[int], most: int) -> int:
    """Number of tokens before `place` that equal the end of `token_ids`, up to `most`."""
    end = len(token_ids)
    most = min(place, end, most)
    length = 0
    while length < most and text[place - 1 - length] == token_ids[end - 1 - length]:
        length += 1
    return length
