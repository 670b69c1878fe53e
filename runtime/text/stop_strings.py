"""Finds stop strings in a growing text; holds back only text that can still become a stop string.

Only the longest suffix that is a proper prefix of a stop string is held back. The stop string that
is complete first ends the text. If two are complete at the same character, the longer one counts.
So the result does not depend on how the text is cut into pieces. The parsers of reasoning and tool
calls (`api/parsing`) work in the same way on the released text.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ("StopStringMatcher", "num_held")


def num_held(text: str, markers: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class StopStringMatcher:
    """Watches one completion's text for its stop strings.

    The time for a character is constant on average, whatever the text and the stop strings are.

    Args:
        stop: the stop strings; none may be empty.
        include_stop: whether the released text contains the stop string that ended it.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = [_StopString(text) for text in stop]
        self._first_characters = frozenset(text[0] for text in stop)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Take newly generated text; returns the text that can be shown now.

        Args:
            text: the new text; it is ignored once a stop string has been found.
            may_stop: False while `min_tokens` forbids stopping. Then a stop string that is complete
                within `text` is ordinary text.
        """
        if self.matched is not None or not text:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        buffer = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [stop.text for stop in self._stop if stop.takes(character)]
            if complete and may_stop:
                self.matched = max(complete, key=len)
                self._held = ""
                return buffer[: end if self._include_stop else end - len(self.matched)]
        released = len(buffer) - max(stop.num_matched for stop in self._stop)
        self._held = buffer[released:]
        return buffer[:released]

    def flush(self) -> str:
        """Release the text that is held back. Called when generation ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _StopString:
    """Finds one stop string by the algorithm of Knuth, Morris and Pratt (1977).

    A border of a string is a shorter string that it both begins and ends with. The longest borders
    of the beginnings of the stop string are computed when they are first needed: when a match of
    that length breaks off or is complete.

    Attributes:
        text: the stop string.
        num_matched: length of the longest end of the text so far that begins the stop string.
    """

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0]  # lengths of the longest borders of the first 1, 2, ... characters

    def takes(self, character: str) -> bool:
        """Take the next character of the text; returns whether it completes the stop string."""
        length = self._longer(self.num_matched, character)
        is_complete = length == len(self.text)
        self.num_matched = self._border(length) if is_complete else length
        return is_complete

    def _longer(self, length: int, character: str) -> int:
        """The length that matches after `character`, if the first `length` characters matched."""
        while self.text[length] != character:
            if not length:
                return 0
            length = self._border(length)
        return length + 1

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) < length:
            borders.append(self._longer(borders[-1], self.text[len(borders)]))
        return borders[length - 1]
