"""The restart policy: when a dead engine is started again, and after how many deaths it is not.

The caller has the clock.

The first restart comes at once. Further ones within the window wait, twice as long each time.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from enum import StrEnum
from typing import NamedTuple

__all__ = ("Death", "DeathReason", "RestartPolicy", "death_of")

_LONGEST_DELAY_S = 30.0


class DeathReason(StrEnum):
    """Why an engine process ended; a label of the restart metric."""

    killed = "killed"  # SIGKILL from outside: an operator, or the system out of memory
    crash = "crash"  # another signal: a fault in native code
    error = "error"  # an exception in a step
    exit = "exit"  # it ended by itself
    hang = "hang"  # it made no progress and was killed for that
    start = "start"  # a restart that failed


class Death(NamedTuple):
    """How an engine ended."""

    reason: DeathReason
    text: str  # one line

    @property
    def num_allowed_crashes(self) -> int:
        """Deaths in a row, this one the last, that a running request survives.

        A kill from outside says less about the requests than a fault of the engine's own.
        """
        return 2 if self.reason is DeathReason.killed else 1


def death_of(return_code: int, last_words: str | None = None, hang: str | None = None) -> Death:
    """The reason for the end of a process.

    Args:
        return_code: as of subprocess: negative for a signal.
        last_words: what the engine said when it ended itself; None = nothing.
        hang: why it was killed by its own client; None = it was not.
    """
    if hang is not None:
        return Death(DeathReason.hang, hang)
    if last_words is not None:
        return Death(DeathReason.error, last_words)
    if return_code >= 0:
        return Death(DeathReason.exit, f"its process exited with code {return_code}")
    try:
        name = signal.Signals(-return_code).name
    except ValueError:
        name = f"signal {-return_code}"
    if -return_code == signal.SIGKILL:
        return Death(
            DeathReason.killed, f"its process was killed ({name}: by hand, or out of memory)"
        )
    return Death(DeathReason.crash, f"its process died of {name}")


class RestartPolicy:
    """Counts restarts.

    Args:
        max_restarts: within the window; 0 = none.
        window_s: seconds after which a restart is forgotten.
        backoff_s: seconds before the second restart within the window; doubled for each further.
    """

    def __init__(self, max_restarts: int, window_s: float, backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._recent: deque[float] = deque()
        self.counts: Counter[str] = Counter()  # of all restarts, by `DeathReason`

    def next_delay(self, reason: DeathReason, now: float) -> float | None:
        """Count one more restart.

        Args:
            reason: why it is needed.
            now: seconds, of a clock that only rises.

        Returns:
            Seconds to wait before it, or None when there were too many.
        """
        while self._recent and now - self._recent[0] >= self._window_s:
            self._recent.popleft()
        before = len(self._recent)
        if before >= self._max_restarts:
            return None
        self._recent.append(now)
        self.counts[reason.value] += 1
        return 0.0 if not before else min(_LONGEST_DELAY_S, self._backoff_s * 2 ** (before - 1))
