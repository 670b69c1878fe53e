"""One step while it is planned, and while it is out: what the scheduler spends its budget on."""

from __future__ import annotations

import math

from ostinato.runtime.costs.cost_table import Chunk
from ostinato.runtime.scheduling.itl_bound import StepAllowance
from ostinato.runtime.scheduling.sequence import Sequence, SequenceStatus
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.step import (
    AdmittedSequence,
    BlockTransfer,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)

__all__ = ("StepPlan",)


class StepPlan:
    """One step while it is planned: what is left of its budget, its entries and their sequences."""

    __slots__ = (
        "admitted",
        "allowance",
        "block_copies",
        "is_closed",
        "is_stalled",
        "num_drafts",
        "num_grown",
        "num_pooled",
        "num_prompt_logits",
        "num_samples",
        "num_score_tokens",
        "num_tokens_left",
        "output",
        "scheduled",
        "score_tokens",
        "sequences",
        "transfers",
    )

    def __init__(
        self, num_tokens: int, allowance: StepAllowance | None, score_tokens: float = 1.0
    ) -> None:
        self.num_tokens_left = num_tokens
        self.score_tokens = score_tokens  # of the budget, for one log-probability of a prompt
        self.num_score_tokens = 0.0  # of the budget, for all log-probabilities so far
        self.allowance = allowance  # of prompts, next to decodes; None = the tokens alone count
        self.num_grown = 0  # leading running sequences that have had their turn
        self.num_samples = 0  # entries that sample
        self.num_drafts = 0
        self.num_prompt_logits = 0
        self.num_pooled = 0
        self.is_closed = False  # no other sequence is admitted
        self.is_stalled = False  # what lacks a block waits for those that come back by themselves
        self.scheduled: list[ScheduledSequence] = []
        self.sequences: list[Sequence] = []  # of `scheduled`, in its order
        self.admitted: list[AdmittedSequence] = []
        self.block_copies: list[tuple[int, int]] = []
        self.transfers: list[BlockTransfer] = []
        self.output: SchedulerOutput | None = None

    @property
    def takes_prompts(self) -> bool:
        """Whether there is room for a token of a prompt."""
        if self.allowance is not None and self.allowance.largest(1, 0) < 1:
            return False
        return self.budget_left > 0

    @property
    def budget_left(self) -> int:
        """Tokens that the step may still compute; at most 0 when scores have taken the rest."""
        return math.floor(self.num_tokens_left - self.num_score_tokens)

    def chunk_limit(
        self, num_reserved: int, num_tokens: int, start: int, *, has_scores: bool = False
    ) -> int:
        """Tokens that a sequence may get from position `start` on, of `num_tokens` that it has
        left, with `num_reserved` kept for others; less than 1 when it must wait.

        Args:
            has_scores: the log-probabilities of the tokens are wanted, which take time as well.
        """
        room = self.budget_left - num_reserved
        if has_scores and room >= 1:
            room = max(1, math.floor(room / (1.0 + self.score_tokens)))
        limit = min(room, num_tokens)
        if self.allowance is None:
            return limit
        return self.allowance.largest(limit, start, has_scores=has_scores)

    def take_chunk(self, chunk: Chunk) -> None:
        """Count a part of a prompt against what the decodes leave, and its scores as tokens."""
        self.num_score_tokens += chunk.num_scored * self.score_tokens
        if self.allowance is not None:
            self.allowance.take(chunk)

    def fitting_drafts(self, num_drafts: int, start: int) -> int:
        """How many of so many guesses from position `start` on keep the step within its target."""
        if self.allowance is not None:
            while num_drafts and not self.allowance.fits(num_drafts, start):
                num_drafts -= 1
        return num_drafts

    def take_drafts(self, num_drafts: int, start: int) -> None:
        """Count guesses of a sequence that has its token of the step already."""
        self.num_drafts += num_drafts
        self.num_tokens_left -= num_drafts
        if self.allowance is not None:
            self.allowance.take(Chunk(num_drafts, start))

    def close(self, max_num_tokens: int) -> SchedulerOutput | None:
        """The plan as the runner gets it; None when there is nothing to run.

        Args:
            max_num_tokens: what the step began with.
        """
        if self.scheduled or self.transfers:
            self.output = SchedulerOutput(
                self.scheduled,
                self.admitted,
                max_num_tokens - self.num_tokens_left,
                self.num_prompt_logits,
                self.block_copies,
                self.num_pooled,
                self.num_drafts,
                self.transfers,
            )
        return self.output

    def check_tokens(self, result: StepResult) -> None:
        """Raises ValueError unless the result has the tokens that the entries sample."""
        num_tokens, counts = len(result.token_ids), result.counts
        if counts is None:
            is_right = not self.num_drafts and num_tokens == self.num_samples
        else:
            most = [entry.num_logits for entry in self.scheduled if entry.num_logits]
            is_right = len(counts) == len(most) and sum(counts) == num_tokens
            is_right = is_right and all(1 <= n <= m for n, m in zip(counts, most, strict=True))
        if not is_right or len(result.logprobs or result.token_ids) != num_tokens:
            raise ValueError(
                f"the step samples {self.num_samples} tokens"
                f"{f' and verifies {self.num_drafts} drafts' if self.num_drafts else ''}, its "
                f"result has {num_tokens} tokens and {len(result.logprobs or ())} log-probabilities"
            )

    def take_pooled(self, result: StepResult) -> list[SequenceOutput]:
        """End the sequences whose vectors are there; their terminal outputs.

        Raises:
            ValueError: `result` has not one for each prompt that ends in this step.
        """
        vectors = iter(result.pooled or ())
        outputs: list[SequenceOutput] = []
        for entry, sequence in zip(self.scheduled, self.sequences, strict=True):
            is_end = entry.start + entry.num_new_tokens == sequence.num_prompt_tokens
            if not (entry.is_pooled and is_end):
                continue
            vector = next(vectors, None)
            if vector is None:
                raise ValueError(f"row {entry.row} ends a pooled prompt, the result has no vector")
            if sequence.status is SequenceStatus.running:
                sequence.status = SequenceStatus.finished
                outputs.append(
                    SequenceOutput(
                        sequence.request.request_id,
                        [],
                        FinishReason.stop,
                        num_cached_tokens=sequence.num_cached_tokens or 0,
                        pooled=vector,
                    )
                )
        return outputs

    def take_prompt_logprobs(self, result: StepResult) -> None:
        """Hand log-probabilities of prompt tokens to their sequences.

        Raises:
            ValueError: `result` has not one for each that was to be scored.
        """
        lists = iter(result.prompt_logprobs or ())
        for entry, sequence in zip(self.scheduled, self.sequences, strict=True):
            if entry.num_prompt_logits:
                scores = next(lists, [])
                if len(scores) != entry.num_prompt_logits:
                    raise ValueError(
                        f"row {entry.row} has {entry.num_prompt_logits} prompt tokens to score, "
                        f"the step's result {len(scores)}"
                    )
                if sequence.prompt_logprobs is not None:
                    # From `start` on: after a preemption some may come a second time.
                    sequence.prompt_logprobs[entry.start :] = scores
