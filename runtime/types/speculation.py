"""Counters of speculative decoding: of an engine for metrics, of one request for its reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

__all__ = ("SpeculationReport", "SpeculationStats", "sum_reports", "sum_speculation")


class SpeculationStats(msgspec.Struct, array_like=True, gc=False):
    """Counters of an engine since its start."""

    num_drafts: int = 0  # verified drafts; a draft is the draft tokens of one sequence in one step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # draft tokens that are in an answer
    accepted_per_position: list[int] = []  # accepted tokens by their index in the draft
    num_pauses: int = 0  # how often drafting paused because steps with drafts were slower
    drafting_seconds: float = 0.0  # time that a draft model took

    def copy(self) -> SpeculationStats:
        """A copy of the present counters."""
        counts = self.accepted_per_position[:]
        return msgspec.structs.replace(self, accepted_per_position=counts)

    def accept(self, num_accepted: int) -> None:
        """Count the first tokens of a draft as accepted."""
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1


class SpeculationReport(msgspec.Struct, array_like=True, gc=False):
    """Counters of one request, for one step or summed over steps."""

    num_drafts: int = 0  # steps that verified a draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_prediction_tokens: int = 0  # accepted draft tokens of the request's `prediction`
    num_rejected_prediction_tokens: int = 0  # refused draft tokens of the request's `prediction`

    def limited(self, num_returned: int) -> SpeculationReport:
        """The report of one step, of which only the first `num_returned` tokens are returned."""
        num_accepted = min(self.num_accepted_tokens, num_returned)
        is_predicted = self.num_accepted_prediction_tokens > 0
        num_dropped = self.num_accepted_tokens - num_accepted if is_predicted else 0
        return SpeculationReport(
            self.num_drafts,
            self.num_draft_tokens,
            num_accepted,
            self.num_accepted_prediction_tokens - num_dropped,
            self.num_rejected_prediction_tokens + num_dropped,
        )


def sum_reports(reports: Iterable[SpeculationReport | None]) -> SpeculationReport | None:
    """The sum of several reports; None if there is no report."""
    given = [one for one in reports if one is not None]
    if len(given) < 2:
        return given[0] if given else None
    names = SpeculationReport.__struct_fields__
    return SpeculationReport(*(sum(getattr(one, name) for one in given) for name in names))


def sum_speculation(stats: Sequence[SpeculationStats]) -> SpeculationStats | None:
    """The sum of the counters of several engines; None for an empty list."""
    if not stats:
        return None
    columns = zip_longest(*(one.accepted_per_position for one in stats), fillvalue=0)
    return SpeculationStats(
        sum(one.num_drafts for one in stats),
        sum(one.num_draft_tokens for one in stats),
        sum(one.num_accepted_tokens for one in stats),
        [sum(column) for column in columns],
        sum(one.num_pauses for one in stats),
        sum(one.drafting_seconds for one in stats),
    )
