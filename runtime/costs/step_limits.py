"""Chooses max_num_seqs and max_num_batched_tokens: upper bounds first, limits after measuring.

Step costs are measured with the static buffers, the memory plan and the captured buckets. Their
sizes depend on the limits. So a limit that is not configured starts as an upper bound, and buffers
are sized for this bound. Then the scheduler's limit is chosen from the measured costs. It can be
lower than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.cost_table import CostTable

__all__ = (
    "DecidedLimits",
    "StepLimits",
    "decide_limits",
    "redundant_sizes",
    "seqs_with_states",
    "upper_limits",
)

# Upper bounds of limits that are not set. Batches that speed up a GPU can slow down a CPU.
_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}

# Draft tokens of one step on a CPU, at most. More rows of logits rarely save time there, because
# a step of so many tokens is limited by arithmetic. The rows would also need much memory: each row
# takes up to 16 bytes per vocabulary entry.
_MAX_STEP_DRAFTS = 128

# A larger step is chosen only if it gives more tokens a second by more than this share.
_WORTH = 0.03
# Chosen limits are at least this, in case a measurement was disturbed.
_LEAST_SEQS = 32
_LEAST_TOKENS = 256
# The context of each decode, in tokens, when the limits are chosen.
_TYPICAL_CONTEXT = 512


class StepLimits(NamedTuple):
    """The sizes of the largest step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    rows_per_seq: int = 1  # rows of logits that a sequence can have: 1 + its draft tokens
    max_step_drafts: int | None = None  # draft tokens of one step; None = no limit for the step
    # Tokens of the largest image that a step must have as a whole; 0 = a step may have any part.
    image_tokens: int = 0
    # scheduler.max_num_seqs is not set: `max_num_seqs` is an upper bound, which memory can lower.
    chooses_seqs: bool = False

    @property
    def max_num_rows(self) -> int:
        """The largest number of rows of logits, R.

        It is at least `max_num_seqs`, because padded buckets have a row for each sequence.
        """
        rows = min(self.max_num_seqs * self.rows_per_seq, self.max_num_batched_tokens)
        if self.max_step_drafts is not None:
            rows = min(rows, self.max_num_seqs + self.max_step_drafts)
        return max(rows, self.max_num_seqs)


def seqs_with_states(most: int, num_states: int) -> int:
    """Sequences that run at once, so that each has a slot for its states and one is left.

    Args:
        most: the limit without states.
        num_states: slots for states, slot 0 included; 0 = no layer is recurrent.
    """
    return min(most, max(1, num_states - 2)) if num_states else most


class DecidedLimits(NamedTuple):
    """Limits, and the reason for each in words, for the log."""

    limits: StepLimits
    seqs_origin: str
    tokens_origin: str


def upper_limits(
    config: SchedulerConfig, *, is_cpu: bool = True, max_drafts: int = 0
) -> StepLimits:
    """The limits that buffers, memory plan and buckets are sized for.

    These are the configured limits. A limit that is not configured is an upper bound.

    Args:
        config: the limits that are set.
        is_cpu: the device is a CPU.
        max_drafts: draft tokens that a step verifies for one sequence; 0 = there is no drafter.
    """
    device = "cpu" if is_cpu else "cuda"
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if tokens is None:
        tokens = max(_MAX_NUM_BATCHED_TOKENS[device], seqs or 0)
    if seqs is None:
        seqs = min(_MAX_NUM_SEQS[device], tokens)
    return StepLimits(
        seqs,
        tokens,
        1 + max_drafts,
        _MAX_STEP_DRAFTS if is_cpu and max_drafts else None,
        chooses_seqs=config.max_num_seqs is None,
    )


def decide_limits(
    config: SchedulerConfig, upper: StepLimits, costs: CostTable | None
) -> DecidedLimits:
    """The scheduler's limits: as set, else chosen from the measured step costs.

    A chosen limit is the smallest measured size whose tokens a second are nearly the best of all
    sizes, but at least 32 sequences or 256 tokens. The limit of tokens is this size plus one token
    for each sequence. If throughput rises up to the upper bound, the upper bound is the limit.

    Args:
        config: the limits that are set.
        upper: from `upper_limits`.
        costs: the measured table. None = not measured; then the upper bounds are the limits.
    """
    context = _TYPICAL_CONTEXT
    seqs, seqs_origin = upper.max_num_seqs, "set"
    if config.max_num_seqs is None:
        rates = (
            {} if costs is None else {s: s / costs.decode_seconds(s, context) for s in costs.seqs}
        )
        seqs, seqs_origin = _decide(rates, seqs, _LEAST_SEQS)
    tokens, tokens_origin = upper.max_num_batched_tokens, "set"
    if config.max_num_batched_tokens is None:
        rates = {}
        if costs is not None:
            rates = {size: _rate(size, costs.step_seconds(size, 1, 0)) for size in costs.tokens}
        tokens, tokens_origin = _decide(rates, tokens, _LEAST_TOKENS)
        tokens = max(tokens, upper.image_tokens)
        # Decodes come first, and prompts get the remaining tokens.
        tokens = min(tokens + seqs, upper.max_num_batched_tokens)
    elif seqs > tokens:
        seqs = tokens
    limits = upper._replace(max_num_seqs=seqs, max_num_batched_tokens=tokens, chooses_seqs=False)
    return DecidedLimits(limits, seqs_origin, tokens_origin)


def redundant_sizes(sizes: Sequence[int], costs: CostTable) -> list[int]:
    """Decode buckets that are as slow as a larger bucket. Their steps can use the larger bucket.

    Args:
        sizes: numbers of sequences, rising.
        costs: measured at those sizes.
    """
    redundant: list[int] = []
    larger: float | None = None  # seconds of the next larger bucket that is kept
    for size in reversed(sizes):
        seconds = costs.decode_seconds(size, 0)
        if larger is not None and seconds > (1.0 - _WORTH) * larger:
            redundant.insert(0, size)
        else:
            larger = seconds
    return redundant


def _rate(size: int, seconds: float) -> float:
    return size / max(seconds, 1e-9)


def _decide(rates: dict[int, float], upper: int, least: int) -> tuple[int, str]:
    """The smallest size with nearly the best rate, and the reason in words."""
    rates = {size: rate for size, rate in rates.items() if size <= upper}
    if not rates:
        return upper, "the upper bound: not measured"
    best = max(rates.values())
    size = min(size for size, rate in rates.items() if rate >= (1.0 - _WORTH) * best)
    # If one larger size is no better, its measurement was perhaps disturbed. Two larger sizes show
    # that throughput does not rise any more.
    if sum(larger > size for larger in rates) < 2:
        return upper, f"the upper bound: throughput rises up to {max(rates)}, the most measured"
    if size < least:
        return min(least, upper), f"the least: throughput rises only up to {size}"
    gain = best / rates[size] - 1.0
    return size, f"chosen: larger sizes give at most {gain:.0%} more tokens a second"
