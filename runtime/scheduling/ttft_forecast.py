"""Predicts the time to first token of a request that is queued now, from the step-cost table."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import NamedTuple

from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.scheduling.itl_bound import ItlBound
from ostinato.runtime.scheduling.sequences.sequence import Sequence

__all__ = ("QueueLoad", "predict_ttft", "queue_load")


class QueueLoad(NamedTuple):
    """The work ahead of a request that is added now."""

    num_decodes: int  # running sequences that decode
    context: float  # mean number of cached tokens of these decodes
    num_prefill_tokens: int  # known tokens of running sequences that are not computed yet
    num_waiting: int  # sequences without a row
    num_waiting_tokens: int  # tokens of the sequences without a row
    num_free_rows: int  # rows that the request can take
    expected_steps: list[int]  # for each running sequence, the steps until it ends


def queue_load(
    running: Many[Sequence], waiting: Many[Sequence], num_free_rows: int, mean_output: float | None
) -> QueueLoad:
    """Sum up the work of a scheduler's sequences.

    Args:
        running: sequences with a row.
        waiting: sequences without a row that come before the request.
        num_free_rows: rows that the request can take: those that no sequence has, and those of
            running sequences that come after the request in the policy's order.
        mean_output: mean number of output tokens of ended requests. None = no request has ended.
            Then each sequence is expected to generate `max_tokens` tokens.
    """
    contexts = [s.num_computed_tokens for s in running if s.is_decoding]
    mean = math.inf if mean_output is None else mean_output
    return QueueLoad(
        num_decodes=len(contexts),
        context=sum(contexts) / max(1, len(contexts)),
        num_prefill_tokens=sum(
            max(0, s.num_prefill_tokens - s.num_computed_tokens) for s in running
        ),
        num_waiting=len(waiting),
        num_waiting_tokens=sum(s.num_tokens for s in waiting),
        num_free_rows=num_free_rows,
        expected_steps=[
            max(1, math.ceil(min(s.max_num_tokens - s.num_tokens, mean - s.num_output_tokens)))
            for s in running
        ],
    )


def predict_ttft(
    load: QueueLoad,
    num_prompt_tokens: int,
    *,
    costs: CostTable,
    limits: StepLimits,
    bound: ItlBound | None = None,
) -> float:
    """Seconds until the first token of a request that is queued behind all others.

    The prompts ahead and the request's own prompt are computed in chunks beside the current
    decodes. If no row is free, the request also waits until enough sequences have ended. The
    prediction ignores prefix hits, which shorten the time. It also ignores a shortage of blocks,
    which lengthens the time. A longer queue or a longer prompt never gives a smaller result.

    Args:
        load: the work ahead.
        num_prompt_tokens: prompt tokens of the request.
        costs: the step-cost table.
        limits: the largest step.
        bound: the inter-token-latency target; None = no target.
    """
    num_decodes = load.num_decodes
    context = load.context if num_decodes else 0.0
    num_tokens = load.num_prefill_tokens + load.num_waiting_tokens + max(1, num_prompt_tokens)
    part = max(1, limits.max_num_batched_tokens - num_decodes)
    if bound is not None and num_decodes:
        part = bound.allowance(num_decodes, context).largest(part, 0)
    decode_s = costs.decode_seconds(max(1, num_decodes), context)

    def seconds(num_tokens: int) -> float:
        mixed_s = costs.mixed_seconds(num_decodes, context, [Chunk(num_tokens, 0)])
        return max(mixed_s, decode_s)  # a separate measurement of decodes can be larger

    num_full, rest = divmod(num_tokens, part)
    num_steps = _steps_until_row(load) - num_full - bool(rest)
    ttft = num_full * seconds(part) + max(0, num_steps) * decode_s
    return ttft + (seconds(rest) if rest else 0.0)


def _steps_until_row(load: QueueLoad) -> int:
    """Steps until a row is free for a request that is queued behind all waiting ones."""
    num_missing = load.num_waiting + 1 - load.num_free_rows
    if num_missing <= 0 or not load.expected_steps:
        return 0
    steps = sorted(load.expected_steps)
    rounds, index = divmod(num_missing - 1, len(steps))
    # Each waiting sequence ahead is expected to take as many steps as the longest running one.
    return rounds * steps[-1] + steps[index]
