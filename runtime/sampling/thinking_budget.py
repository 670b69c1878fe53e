"""Thinking budgets: decide when the reasoning of an answer must end.

When it must end, the row's mask (grammar_rows.py) allows only the end token.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.runtime.types.params import ThinkingLimit

__all__ = ("ThinkingBudget",)


class ThinkingBudget:
    """Counts the reasoning tokens of one answer.

    Args:
        limit: the limit of the reasoning.
        token_ids: output tokens so far, if a sequence resumes.

    Attributes:
        is_over: whether the reasoning has ended, or there was none.
    """

    __slots__ = ("_has_begun", "_limit", "_num_tokens", "is_over")

    def __init__(self, limit: ThinkingLimit, token_ids: Iterable[int] = ()) -> None:
        self._limit = limit
        self._has_begun = limit.is_open
        self._num_tokens = 0
        self.is_over = False
        for token_id in token_ids:
            self.take(token_id)

    @property
    def end_token_id(self) -> int:
        """The token that ends the reasoning."""
        return self._limit.end_token_id

    @property
    def is_spent(self) -> bool:
        """Whether the next token must be the end of the reasoning."""
        return self._has_begun and not self.is_over and self._num_tokens >= self._limit.max_tokens

    def take(self, token_id: int) -> None:
        """Count the answer's next token."""
        if self.is_over:
            return
        if not self._has_begun:
            self._has_begun = token_id == self._limit.begin_token_id
            self.is_over = not self._has_begun
        elif token_id == self._limit.end_token_id:
            self.is_over = True
        else:
            self._num_tokens += 1
