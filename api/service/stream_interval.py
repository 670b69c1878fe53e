"""`stream_interval`: joins the outputs of several tokens into one chunk, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ostinato.runtime.types.outputs import RequestOutput

__all__ = ("StreamInterval",)

T = TypeVar("T")


class StreamInterval(Generic[T]):
    """Holds outputs back until a chunk has enough tokens.

    The first token of a completion is sent at once. At the end of a completion, everything that is
    held back is sent. In between, each chunk has at least `num_tokens` tokens. It can have more
    if the last of its outputs has several tokens.

    Args:
        num_tokens: least number of tokens of a chunk; 1 = every output is sent at once.
        join: joins several items of one completion.
    """

    def __init__(self, num_tokens: int, join: Callable[[list[T]], T]) -> None:
        self._num_tokens = num_tokens
        self._join = join
        self._held: dict[Hashable, list[T]] = {}  # completions that have sent their first token
        self._num_held_tokens: dict[Hashable, int] = {}

    def add(self, completion: Hashable, output: RequestOutput, item: T) -> T | None:
        """The item to send now; None = the item is held back.

        Args:
            completion: identifies the completion.
            output: the output of the engine that `item` was made from.
            item: the item for this output.
        """
        if self._num_tokens == 1:
            return item
        held = self._held.get(completion)
        if held is None:
            if output.new_token_ids:
                self._held[completion], self._num_held_tokens[completion] = [], 0
            return item
        held.append(item)
        count = self._num_held_tokens[completion] + len(output.new_token_ids)
        if count < self._num_tokens and output.finish_reason is None:
            self._num_held_tokens[completion] = count
            return None
        self._held[completion], self._num_held_tokens[completion] = [], 0
        return held[0] if len(held) == 1 else self._join(held)
