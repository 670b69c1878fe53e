"""The results of a simulation: times of requests, gaps between tokens, steps.

The columns are arrays of numbers, so that days of traffic fit into memory and can be sent to
another process quickly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

__all__ = ("SimulationResults",)


class SimulationResults:
    """Columns of numbers, and totals. `merge` adds the results of other parts of a fleet."""

    _COLUMNS = (
        *("keys", "sent_s", "first_s", "last_s", "longest_gap_s"),
        *("num_prompt", "num_output", "num_cached"),
    )

    def __init__(self) -> None:
        # One entry per request, in the order in which they ended.
        self.keys = array("q")
        self.sent_s = array("d")  # seconds since the beginning of the simulation
        self.first_s = array("d")  # the first token, in the same seconds
        self.last_s = array("d")  # the last token, in the same seconds
        self.longest_gap_s = array("d")  # between two of its tokens; 0 if it has only one
        self.num_prompt = array("q")  # tokens
        self.num_output = array("q")
        self.num_cached = array("q")  # prompt tokens that were found in the prefix cache
        # Lengths of gaps between two tokens of one request, and how often each length occurred.
        self._gap_s = array("d")
        self._gap_count = array("q")
        self.num_refused = 0
        self.num_steps = 0
        self.busy_s = 0.0  # seconds in steps, over all replicas
        self._seq_seconds = 0.0
        self._block_seconds = 0.0
        self.most_blocks = 0.0  # used at once by one replica
        self.counters: dict[str, int] = {}

    def add_request(
        self, key: int, times: tuple[float, float, float, float], counts: tuple[int, int, int]
    ) -> None:
        """Add a request that has ended.

        Args:
            key: the caller's key of the request.
            times: seconds of its sending, first token and last token, and its longest gap.
            counts: prompt, output and cached tokens.
        """
        self.keys.append(key)
        seconds = (self.sent_s, self.first_s, self.last_s, self.longest_gap_s)
        for column, value in zip(seconds, times, strict=True):
            column.append(value)
        columns = (self.num_prompt, self.num_output, self.num_cached)
        for column, value in zip(columns, counts, strict=True):
            column.append(value)

    def add_gaps(self, seconds: float, count: int) -> None:
        """Add `count` gaps of `seconds` between tokens."""
        self._gap_s.append(seconds)
        self._gap_count.append(count)

    def add_step(
        self, seconds: float, num_seqs: int, used_blocks: float, *, count: int = 1
    ) -> None:
        """Add `count` steps that took `seconds` together."""
        self.num_steps += count
        self.busy_s += seconds
        self._seq_seconds += seconds * num_seqs
        self._block_seconds += seconds * used_blocks
        self.most_blocks = max(self.most_blocks, used_blocks)

    def count(self, **counters: int) -> None:
        """Add to counters by name."""
        for name, value in counters.items():
            self.counters[name] = self.counters.get(name, 0) + value

    def merge(self, others: Iterable[SimulationResults]) -> None:
        """Add the results of other parts of the fleet."""
        for other in others:
            for name in (*self._COLUMNS, "_gap_s", "_gap_count"):
                getattr(self, name).extend(getattr(other, name))
            self.num_refused += other.num_refused
            self.num_steps += other.num_steps
            self.busy_s += other.busy_s
            self._seq_seconds += other._seq_seconds
            self._block_seconds += other._block_seconds
            self.most_blocks = max(self.most_blocks, other.most_blocks)
            self.count(**other.counters)

    @property
    def num_ended(self) -> int:
        return len(self.keys)

    @property
    def mean_seqs(self) -> float:
        """Mean sequences of a step, weighted by its time."""
        return self._seq_seconds / self.busy_s if self.busy_s else 0.0

    @property
    def mean_blocks(self) -> float:
        """Mean blocks that a replica uses while it works."""
        return self._block_seconds / self.busy_s if self.busy_s else 0.0

    @property
    def ttft_s(self) -> np.ndarray:
        """[requests] seconds from a request's sending to its first token."""
        return np.asarray(self.first_s) - np.asarray(self.sent_s)

    @property
    def e2e_s(self) -> np.ndarray:
        """[requests] seconds from a request's sending to its last token."""
        return np.asarray(self.last_s) - np.asarray(self.sent_s)

    @property
    def tpot_s(self) -> np.ndarray:
        """[requests with at least two tokens] mean seconds between a request's tokens."""
        counts = np.asarray(self.num_output)
        seconds = np.asarray(self.last_s) - np.asarray(self.first_s)
        return seconds[counts > 1] / (counts[counts > 1] - 1)

    @property
    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Inter-token latencies in seconds, and how often each occurred."""
        return np.asarray(self._gap_s), np.asarray(self._gap_count)
