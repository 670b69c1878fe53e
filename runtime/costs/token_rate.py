"""The seconds that a token takes in an encoder's steps, learned from the steps themselves.

An encoder computes a whole text in one step. A new text waits until the running step ends. So a
step takes only as many texts as it can compute within a target time. No steps are measured before
the first request.
"""

from __future__ import annotations

__all__ = ("TokenRate",)

_UNKNOWN_TOKENS = 256  # tokens of a step until the first step has been measured
_LEAST_TOKENS = 64  # in smaller steps much of the time does not depend on the number of tokens
_WEIGHT = 0.25  # weight of a new step in the moving average


class TokenRate:
    """A moving average of seconds per token. It gives the number of tokens that fit into a time.

    Args:
        target_s: seconds that a step should take at most.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._seconds: float | None = None  # seconds for one token

    @property
    def max_num_tokens(self) -> int:
        """The number of tokens that a step computes in the target time, but at least 64.

        It is 256 until the first step has been measured.
        """
        if self._seconds is None:
            return _UNKNOWN_TOKENS
        return max(_LEAST_TOKENS, int(self._target_s / self._seconds))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take a finished step into account.

        Args:
            num_tokens: tokens of the step; fewer than 64 are ignored.
            seconds: from its launch to its result.
        """
        if num_tokens < _LEAST_TOKENS:
            return
        new = max(seconds, 1e-9) / num_tokens
        self._seconds = (
            new if self._seconds is None else self._seconds + _WEIGHT * (new - self._seconds)
        )
