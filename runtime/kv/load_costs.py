"""Whether it is faster to load KV blocks from a slower tier than to compute them again.

The time of a load is predicted from the loads before. The time of computing is predicted from the
step-cost table. On equal terms the blocks are computed, because a load makes its sequence wait.
"""

from __future__ import annotations

from ostinato.runtime.costs.cost_table import Chunk, CostTable

__all__ = ("LoadCosts",)

_LEAST_S = 1e-6  # of a block
# A load takes at least this long, besides its copies: a step begins it, and another sees its end.
_LATENCY_S = 0.002
_BYTES_PER_S = 1e9  # assumed before the first load: a common disk
_WEIGHT = 0.3  # of the newest load in the mean
# A load that is refused as too slow lowers the predicted time a little. So after some refusals the
# tier is tried again, in case it was slow for a short time only.
_FORGETTING = 0.99
# The next load begins after the one before has ended, so a load makes the next ones wait.
_LONGEST_LOAD_S = 0.1
_LATE_FACTOR = 4.0
_LEAST_LATE_S = 1.0


class LoadCosts:
    """Predicts the seconds of loads.

    Args:
        costs: the step-cost table; None = not measured, and every load counts as faster.
        block_bytes: bytes of a block.
        block_size: tokens of a block.

    Attributes:
        num_loads: loads that have ended.
        num_refused: loads that would have taken longer than computing.
        load_seconds: the sum of the seconds of all loads.
    """

    def __init__(self, costs: CostTable | None, block_bytes: int, block_size: int) -> None:
        self._costs = costs
        self._block_size = block_size
        self._seconds_per_block = block_bytes / _BYTES_PER_S
        self.num_loads = 0
        self.num_refused = 0
        self.load_seconds = 0.0

    @property
    def most_blocks(self) -> int:
        """Blocks of the longest load."""
        return max(1, int(_LONGEST_LOAD_S / self._seconds_per_block))

    def predict(self, num_blocks: int) -> float:
        """Seconds of a load of `num_blocks` blocks."""
        return _LATENCY_S + num_blocks * self._seconds_per_block

    def is_faster(self, num_blocks: int, start: int, num_ahead: int = 0) -> bool:
        """Whether loading is predicted to be faster than computing.

        Args:
            num_blocks: consecutive blocks of a sequence.
            start: the position of the first token of these blocks.
            num_ahead: blocks of the loads that come before.
        """
        if self._costs is None:
            return True
        chunk = Chunk(num_blocks * self._block_size, start)
        if self.predict(num_ahead + num_blocks) < self._costs.mixed_seconds(0, 0, [chunk]):
            return True
        self._seconds_per_block *= _FORGETTING
        self.num_refused += 1
        return False

    def late_after(self, num_blocks: int) -> float:
        """Seconds after which a load counts as late: its sequences stop waiting for it."""
        return max(_LEAST_LATE_S, _LATE_FACTOR * self.predict(num_blocks))

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Note the time of the copies of a load that has ended."""
        self.num_loads += 1
        self.load_seconds += seconds
        if num_blocks:
            measured = seconds / num_blocks
            mean = self._seconds_per_block + _WEIGHT * (measured - self._seconds_per_block)
            self._seconds_per_block = max(_LEAST_S, mean)
