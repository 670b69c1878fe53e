"""The restart policy: when a dead engine is started again, and how many restarts are allowed.

The first restart comes at once, the second restart after `backoff_s`. Each further restart within
the window waits twice as long as the previous one, but at most 30 s. The caller passes the time, so
this module reads no clock.
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

    killed = "killed"  # SIGKILL (by an operator, or memory ran out), or its machine was lost
    crash = "crash"  # another signal: a fault in native code
    error = "error"  # an exception in a step
    exit = "exit"  # the process exited by itself
    hang = "hang"  # the watchdog killed it because it made no progress, or its ranks hung
    start = "start"  # a restart failed
    reload = "reload"  # it was asked to end, so that a new process loads the weights again


class Death(NamedTuple):
    """How an engine ended."""

    reason: DeathReason
    text: str  # one line

    @property
    def num_allowed_crashes(self) -> int:
        """Deaths in a row that a running request survives, this death included.

        The number is larger after SIGKILL, because a request is rarely the cause of a SIGKILL.
        """
        return 2 if self.reason is DeathReason.killed else 1

    @property
    def num_unsuspicious_crashes(self) -> int:
        """Deaths in a row, with this one, that do not make a running request a suspect yet."""
        return 1 if self.reason is DeathReason.killed else 0


def death_of(
    return_code: int,
    reported_error: str | None = None,
    hang: str | None = None,
    reason: DeathReason = DeathReason.error,
) -> Death:
    """The reason for the end of an engine process.

    Args:
        return_code: the exit status of the process, as in `subprocess`: negative for a signal.
        reported_error: the error that the engine reported before it ended; None = none.
        hang: why the watchdog killed the process; None = the watchdog did not kill it.
        reason: the reason that belongs to `reported_error`.
    """
    if hang is not None:
        return Death(DeathReason.hang, hang)
    if reported_error is not None:
        return Death(reason, reported_error)
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
        max_restarts: restarts allowed within the window; 0 = none.
        window_s: seconds after which a restart is forgotten.
        backoff_s: seconds before the second restart within the window. Each further restart waits
            twice as long, but at most 30 s.
    """

    def __init__(self, max_restarts: int, window_s: float, backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._recent: deque[float] = deque()
        self.counts: Counter[str] = Counter()  # all restarts, by `DeathReason`

    @property
    def limit_text(self) -> str:
        """Why there is no further restart, for an error message."""
        if not self._max_restarts:
            return "it is not started again because of server.max_restarts=0"
        return (
            "it is not started again: the limit is server.max_restarts="
            f"{self._max_restarts} within server.restart_window_s={self._window_s:g} s"
        )

    def next_delay(self, reason: DeathReason, now: float) -> float | None:
        """Count one more restart.

        Args:
            reason: why the engine ended.
            now: seconds of a monotonic clock.

        Returns:
            Seconds to wait before the restart, or None if there were too many restarts.
        """
        while self._recent and now - self._recent[0] >= self._window_s:
            self._recent.popleft()
        if reason is DeathReason.reload:  # not a failure, so it does not count towards the limit
            self.counts[reason.value] += 1
            return 0.0
        before = len(self._recent)
        if before >= self._max_restarts:
            return None
        self._recent.append(now)
        self.counts[reason.value] += 1
        return 0.0 if not before else min(_LONGEST_DELAY_S, self._backoff_s * 2 ** (before - 1))
