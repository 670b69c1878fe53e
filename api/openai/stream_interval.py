"""`stream_interval`: puts several tokens into one chunk of a stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ostinato.runtime.types.outputs import RequestOutput

__all__ = ("StreamInterval",)

T = TypeVar("T")


class StreamInterval(Generic[T]):
    """Holds the news of completions back until there are enough of them.

    A completion's first token goes out at once, and its last with all that is held back; between
    them, news of `num_tokens` tokens together.

    Args:
        num_tokens: 1 = everything goes out as it comes.
        join: several news of one completion as one.
    """

    def __init__(self, num_tokens: int, join: Callable[[list[T]], T]) -> None:
        self._num_tokens = num_tokens
        self._join = join
        self._held: dict[Hashable, list[T]] = {}  # by completion, from its first news on
        self._num_held_tokens: dict[Hashable, int] = {}

    def add(self, completion: Hashable, output: RequestOutput, news: T) -> T | None:
        """What goes out now that `news`, which tells of `output`, are there; None = nothing."""
        if self._num_tokens == 1:
            return news
        held = self._held.get(completion)
        if held is None:
            if output.new_token_ids:
                self._held[completion], self._num_held_tokens[completion] = [], 0
            return news
        held.append(news)
        count = self._num_held_tokens[completion] + len(output.new_token_ids)
        if count < self._num_tokens and output.finish_reason is None:
            self._num_held_tokens[completion] = count
            return None
        self._held[completion], self._num_held_tokens[completion] = [], 0
        return held[0] if len(held) == 1 else self._join(held)
