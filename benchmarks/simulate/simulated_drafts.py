"""Drafts of a simulated engine: each token is right with an assumed probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.speculation.proposer import Draft, DraftJob, DraftSource
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = ("OUTPUT_TOKEN_ID", "DraftSpec", "simulated_result")

# The token that every simulated step samples. Only prefix hits depend on it.
OUTPUT_TOKEN_ID = (1 << 32) - 1
_WRONG_TOKEN_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The drafts of a simulated engine."""

    max_drafts: int  # draft tokens of one sequence in one step, at most
    acceptance: float  # probability that a draft token is right if those before it are
    adaptive: bool = True  # the number of drafts is chosen by step costs
    model_costs: CostTable | None = None  # step costs of the draft model; None = there is none

    def proposer(self) -> SimulatedProposer:
        """A new drafter."""
        if self.model_costs is None:
            return SimulatedProposer(self)
        return SimulatedDraftModel(self, self.model_costs)


class SimulatedProposer:
    """Implements `Proposer`. A hash decides which tokens are right, so runs can be repeated."""

    def __init__(self, spec: DraftSpec) -> None:
        self._spec = spec

    @property
    def max_drafts(self) -> int:
        return self._spec.max_drafts

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        return Draft(self._guess(request, len(token_ids), most), DraftSource.ngram)

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass

    def take_seconds(self) -> float:
        """Seconds of drafting since the last call."""
        return 0.0

    def _guess(self, request: Request, begin: int, count: int) -> list[int]:
        return [
            OUTPUT_TOKEN_ID
            if crc32(f"{request.request_id}/{place}".encode()) < self._spec.acceptance * (1 << 32)
            else _WRONG_TOKEN_ID
            for place in range(begin, begin + count)
        ]


class SimulatedDraftModel(SimulatedProposer):
    """Implements `BatchProposer`: a draft model with the same acceptance, which takes time."""

    is_queued = False

    def __init__(self, spec: DraftSpec, costs: CostTable) -> None:
        super().__init__(spec)
        self.costs: CostTable | None = costs
        self._table = costs
        self._num_computed: dict[str, int] = {}  # tokens of each request in the draft model's cache
        self._seconds = 0.0

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        return self.guess(request, token_ids, most)

    def guess(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        return Draft([_WRONG_TOKEN_ID] * most, DraftSource.model)

    def forget(self, request_id: str) -> None:
        self._num_computed.pop(request_id, None)

    def admit(self, row: int, request: Request) -> None:
        pass

    def follow(self, jobs: Sequence[DraftJob]) -> None:
        pass

    def draw(self, jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
        missing = 0
        for job in jobs:
            count, request_id = len(job.token_ids), job.request.request_id
            missing += count - min(self._num_computed.get(request_id, 0), count - 1)
            self._num_computed[request_id] = count
        context = sum(len(job.token_ids) for job in jobs) / max(1, len(jobs))
        for place in range(max((job.count for job in jobs), default=0)):
            num_seqs = sum(job.count > place for job in jobs)
            if place or missing == num_seqs:
                self._seconds += self._table.decode_seconds(num_seqs, context)
            else:
                self._seconds += self._table.step_seconds(missing, num_seqs, context)
        return [self._guess(job.request, len(job.token_ids), job.count) for job in jobs]

    def settle(self, row: int, num_right: int) -> None:
        pass

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def simulated_result(output: SchedulerOutput) -> StepResult:
    """The result of a simulated step: each sequence keeps its drafts up to the first wrong one."""
    counts: list[int] = []
    for entry in output.scheduled:
        if entry.num_logits:
            count = 1
            for token in entry.token_ids[1 : entry.num_logits] if entry.num_drafts else ():
                if token != OUTPUT_TOKEN_ID:
                    break
                count += 1
            counts.append(count)
    tokens = [OUTPUT_TOKEN_ID] * sum(counts)
    return StepResult(tokens, counts=counts if output.num_drafts else None)
