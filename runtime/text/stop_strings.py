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

    Args:
        stop: the stop strings; none may be empty.
        include_stop: whether the released text contains the stop string that ended it.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Takes newly generated text and returns what can be shown now.

        Args:
            text: the new text; it is ignored once a stop string has been found.
            may_stop: False while `min_tokens` forbids stopping. Then a stop string that is complete
                within `text` is ordinary text.
        """
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        if may_stop:
            found = self._first_match(buffer, searched=len(self._held))
            if found is not None:
                start, self.matched = found
                self._held = ""
                return buffer[: start + len(self.matched)] if self._include_stop else buffer[:start]
        released = len(buffer) - num_held(buffer, self._stop)
        self._held = buffer[released:]
        return buffer[:released]

    def flush(self) -> str:
        """Release the text that is held back. Called when generation ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, *, searched: int) -> tuple[int, str] | None:
        """The match that ends first after the position `searched`: (position, stop string)."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = buffer.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]
