"""`StepPlan`: one step of the scheduler, from its planning until its result is processed."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listed

from ostinato.runtime.costs.cost_table import Chunk
from ostinato.runtime.scheduling.itl_bound import StepAllowance
from ostinato.runtime.scheduling.sequences.sequence import Sequence, SequenceStatus
from ostinato.runtime.speculation.depth import StepLoad
from ostinato.runtime.types.images import PromptImage
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
    """A step's entries, their sequences and the remaining token budget."""

    __slots__ = (
        "admitted",
        "allowance",
        "block_copies",
        "decodes_left",
        "is_closed",
        "is_stalled",
        "load",
        "num_accepted",
        "num_drafts",
        "num_further",
        "num_grown",
        "num_pooled",
        "num_prompt_logits",
        "num_repeats",
        "num_samples",
        "num_score_tokens",
        "num_tokens",
        "num_tokens_left",
        "output",
        "scheduled",
        "score_tokens",
        "sequences",
        "transfers",
        "whole_images",
    )

    def __init__(
        self,
        num_tokens: int,
        allowance: StepAllowance | None,
        score_tokens: float = 1.0,
        max_decodes: int | None = None,
        *,
        whole_images: bool = False,
    ) -> None:
        self.num_tokens = num_tokens  # the budget
        self.num_tokens_left = num_tokens  # negative if the first prompt exceeds the budget
        self.score_tokens = score_tokens  # budget tokens for one log-probability of a prompt token
        self.num_score_tokens = 0.0  # budget tokens for all log-probabilities of prompts so far
        self.whole_images = whole_images  # a chunk has all tokens of an image or none
        self.decodes_left = max_decodes  # decodes that the step may still take; None = all
        self.allowance = allowance  # limits prompt tokens beside decodes; None = no such limit
        self.num_grown = 0  # how many sequences of `running` are planned, from the first on
        self.num_samples = 0  # entries that sample
        self.num_drafts = 0
        self.num_further = 0  # admitted sequences besides the first of each HTTP request
        self.num_repeats = 0  # right drafts that are computed again
        self.num_accepted = 0  # drafts that the model confirmed; set with the result
        self.load: StepLoad | None = None  # the work without drafts; None = no cost is predicted
        self.num_prompt_logits = 0
        self.num_pooled = 0
        self.is_closed = False  # no further sequence is admitted
        self.is_stalled = False  # sequences wait for blocks of a step in flight or of a load
        self.scheduled: list[ScheduledSequence] = []
        self.sequences: list[Sequence] = []  # the sequences of `scheduled`, in its order
        self.admitted: list[AdmittedSequence] = []
        self.block_copies: list[tuple[int, int]] = []
        self.transfers: list[BlockTransfer] = []
        self.output: SchedulerOutput | None = None

    @property
    def takes_prompts(self) -> bool:
        """Whether there is room for a prompt token."""
        if self.allowance is not None and self.allowance.largest(1, 0) < 1:
            return False
        return self.budget_left > 0

    @property
    def budget_left(self) -> int:
        """Tokens left in the budget. It can be negative, because log-probabilities of prompts count
        as tokens."""
        return math.floor(self.num_tokens_left - self.num_score_tokens)

    def chunk_limit(
        self,
        num_reserved: int,
        num_tokens: int,
        start: int,
        *,
        has_scores: bool = False,
        images: Listed[PromptImage] = (),
    ) -> int:
        """The number of tokens that a sequence may compute; less than 1 if it must wait.

        Args:
            num_reserved: budget tokens that are kept for other sequences.
            num_tokens: tokens of the sequence that are left to compute.
            start: the position of the first of these tokens.
            has_scores: the tokens' log-probabilities are computed too, which takes time.
            images: those of the prompt, in their order. With `whole_images`, a chunk that would end
                within an image ends before it. If the image comes first, the chunk has all of it.
                The first chunk of a step has it also beyond the allowance for prompts.
        """
        room = self.budget_left - num_reserved
        if has_scores and room >= 1:
            room = max(1, math.floor(room / (1.0 + self.score_tokens)))
        limit = min(room, num_tokens)
        if self.allowance is not None:
            limit = self.allowance.largest(limit, start, has_scores=has_scores)
        if self.whole_images and limit >= 1:
            is_first = self.allowance is None or not self.allowance.num_chunks
            limit = _without_parts(limit, start, images, room if is_first else limit)
        return limit

    def limit_of(self, sequence: Sequence, start: int, num_left: int, num_reserved: int) -> int:
        """The tokens of a sequence's prompt that fit into the step; see `chunk_limit`."""
        return self.chunk_limit(
            num_reserved,
            num_left,
            start,
            has_scores=sequence.num_prompt_logits(start, start + 1) > 0,
            images=sequence.request.images,
        )

    def take_chunk(self, chunk: Chunk) -> None:
        """Subtract a chunk from the allowance, and its log-probabilities from the token budget."""
        self.num_score_tokens += chunk.num_scored * self.score_tokens
        if self.allowance is not None:
            self.allowance.take(chunk)

    def fitting_drafts(self, num_drafts: int, start: int) -> int:
        """The number of drafts from position `start` on that keep the step within its target."""
        if self.allowance is not None:
            while num_drafts and not self.allowance.fits(num_drafts, start):
                num_drafts -= 1
        return num_drafts

    def take_drafts(self, num_drafts: int, start: int) -> None:
        """Subtract the drafts of a decoding sequence from the budget and the allowance."""
        self.num_drafts += num_drafts
        self.num_tokens_left -= num_drafts
        if self.allowance is not None:
            self.allowance.take(Chunk(num_drafts, start))

    def return_drafts(self, num_drafts: int) -> None:
        """Return tokens to the token budget: those of drafts that the drafter did not propose.

        The allowance stays as it is: drafts are the last entries of a plan, and all are taken
        before the first is returned. So nothing asks the allowance afterwards.
        """
        self.num_drafts -= num_drafts
        self.num_tokens_left += num_drafts

    def take_repeats(self) -> set[int]:
        """The indices of entries that compute right drafts again. For the costs they are decodes.

        Their further tokens are counted in `num_repeats`.
        """
        found: set[int] = set()
        for index, (entry, sequence) in enumerate(zip(self.scheduled, self.sequences, strict=True)):
            if sequence.num_repeats and entry.num_logits:
                self.num_repeats += entry.num_new_tokens - 1
                sequence.num_repeats = 0
                found.add(index)
        return found

    def close(self) -> SchedulerOutput | None:
        """The plan as a `SchedulerOutput`; None if there is nothing to run."""
        if self.scheduled or self.transfers:
            self.output = SchedulerOutput(
                self.scheduled,
                self.admitted,
                self.num_tokens - self.num_tokens_left,
                self.num_prompt_logits,
                self.block_copies,
                self.num_pooled,
                self.num_drafts,
                self.transfers,
            )
        return self.output

    def check_tokens(self, result: StepResult) -> None:
        """Raises ValueError if the result has a wrong number of tokens or log-probabilities."""
        num_tokens, counts = len(result.token_ids), result.counts
        if counts is None:
            is_right = not self.num_drafts and num_tokens == self.num_samples
        else:
            most = [entry.num_logits for entry in self.scheduled if entry.num_logits]
            is_right = len(counts) == len(most) and sum(counts) == num_tokens
            is_right = is_right and all(0 <= n <= m for n, m in zip(counts, most, strict=True))
        if not is_right or len(result.logprobs or result.token_ids) != num_tokens:
            raise ValueError(
                f"the step samples {self.num_samples} tokens"
                f"{f' and verifies {self.num_drafts} drafts' if self.num_drafts else ''}, but its "
                f"result has {num_tokens} tokens and {len(result.logprobs or ())} log-probabilities"
            )

    def take_pooled(self, result: StepResult) -> list[SequenceOutput]:
        """End the pooled sequences whose prompts end in this step; returns their last outputs.

        Raises:
            ValueError: a vector is missing in `result`.
        """
        vectors = iter(result.pooled or ())
        outputs: list[SequenceOutput] = []
        for entry, sequence in zip(self.scheduled, self.sequences, strict=True):
            is_end = entry.start + entry.num_new_tokens == sequence.num_prompt_tokens
            if not (entry.is_pooled and is_end):
                continue
            vector = next(vectors, None)
            if vector is None:
                raise ValueError(
                    f"row {entry.row} ends a pooled prompt, but the result has no vector"
                )
            if sequence.status is not SequenceStatus.finished:
                # A sequence that was preempted meanwhile need not be computed again.
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
            ValueError: the number of log-probabilities in `result` is wrong.
        """
        lists = iter(result.prompt_logprobs or ())
        for entry, sequence in zip(self.scheduled, self.sequences, strict=True):
            if entry.num_prompt_logits:
                scores = next(lists, [])
                if len(scores) != entry.num_prompt_logits:
                    raise ValueError(
                        f"row {entry.row} has {entry.num_prompt_logits} prompt tokens to score, "
                        f"and the step's result has {len(scores)} scores"
                    )
                if sequence.prompt_logprobs is not None:
                    # After a preemption some scores arrive again and replace the earlier ones.
                    sequence.prompt_logprobs[entry.start :] = scores


def _without_parts(limit: int, start: int, images: Listed[PromptImage], room: int) -> int:
    """The tokens of a chunk that has no image in part; 0 = `room` is too small for the first one.

    Args:
        limit: tokens that the chunk may have.
        start: the position of the first of them.
        images: those of the prompt, in their order.
        room: tokens that are left in the step.
    """
    end = start + limit
    for image in images:
        if image.begin < end < image.end:
            if image.begin > start:
                return image.begin - start
            return image.end - start if image.end - start <= room else 0
    return limit
