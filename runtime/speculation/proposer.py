"""The protocol of drafters, which guess the tokens that follow a sequence's last one.

A step computes the last token and the guesses after it together. The sampler draws a token for each
position, as decoding without drafts does. It keeps the tokens up to and including the first that
differs from its draft. So a drafter can guess anything: drafts do not change the distribution
of the output. On some devices they do not change the output at all (docs/speculation.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.kv.block_table import BlockTable
from ostinato.runtime.types.request import Request

__all__ = ("BatchProposer", "Draft", "DraftJob", "DraftSource", "Proposer")


class DraftSource(StrEnum):
    """The source of a draft."""

    # That of an Enum is written in Python. A source is looked up several times a step.
    __hash__ = str.__hash__

    grammar = "grammar"  # forced by the request's grammar
    prediction = "prediction"  # the request's `prediction`
    ngram = "ngram"  # the sequence's own text
    history = "history"  # earlier answers
    model = "model"  # a draft model or a draft head


class Draft(NamedTuple):
    """Guesses of the next tokens.

    Attributes:
        token_ids: ids of the vocabulary, in order.
        source: the source of the guesses.
        strength: length of the match before the guesses; 0 = no match, or a source without one.
            Drafts of one source and strength are expected to be right equally often.
    """

    token_ids: Sequence[int]
    source: DraftSource
    strength: int = 0


class Proposer(Protocol):
    """A drafter. It proposes drafts when a step is planned."""

    @property
    def max_drafts(self) -> int:
        """The largest number of draft tokens for one sequence in one step, at least 1.

        Memory for additional rows of logits is planned by this number (`StepLimits.max_num_rows`).
        """
        ...

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        """Guess the next tokens of a sequence.

        Args:
            request: the sequence's request.
            token_ids: its prompt and the output so far; must not be changed.
            most: largest number of draft tokens that can be used, at least 1.

        Returns:
            Up to `most` tokens; further tokens are ignored. None = no guess.
        """
        ...

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        """Learn from the prompt and output of a request that ended without an error or abort.

        A stop string ends a request by an abort.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended for any reason."""
        ...

    def reset(self) -> None:
        """Drop everything that was learned from requests that have ended."""
        ...


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A sequence that `follow` or `draw` gets.

    Attributes:
        row: its row in the runner's persistent buffers.
        request: its request.
        token_ids: its prompt and the output so far; must not be changed.
        table: its block table; for `draw` with room for the drafts.
        count: for `draw` the number of draft tokens, at least 1; `follow` ignores it.
    """

    row: int
    request: Request
    token_ids: Sequence[int]
    table: BlockTable
    count: int


@runtime_checkable
class BatchProposer(Proposer, Protocol):
    """A drafter that computes the drafts of all sequences of a step at once.

    A draft of `DraftSource.model` from `propose` has placeholders as tokens. The planner chooses
    how many draft tokens the step verifies. `draw` then computes the tokens that replace the
    placeholders.
    """

    @property
    def is_queued(self) -> bool:
        """Whether `draw` only queues the work, so that a step's time includes its drafts."""
        ...

    @property
    def costs(self) -> CostTable | None:
        """The step costs of the draft model or of the draft head; None = not measured.

        One draft token for each of S sequences costs a decode step of S sequences.
        """
        ...

    def admit(self, row: int, request: Request) -> None:
        """Note that a sequence, new or resumed after a preemption, takes this row."""
        ...

    def follow(self, jobs: Sequence[DraftJob]) -> None:
        """Called while a step is planned, before drafts are chosen, with all sequences of the step.

        A draft head computes the sequences with many waiting positions here. The target's hidden
        states of these positions are kept until then. A draft model does nothing.
        """
        ...

    def guess(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        """Like `propose`, but without drafts from text."""
        ...

    def draw(self, jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
        """Compute drafts.

        Args:
            jobs: sequences in different rows.
            most_tokens: a budget of tokens for this call. Sequences of which the drafter's cache
                lacks only a few tokens go first and may exceed it. Sequences of which it lacks
                many, such as a whole prompt, get what is left.

        Returns:
            The draft of each job, with at most `count` tokens. A negative number stands for a token
            that only the device has.
        """
        ...

    def settle(self, row: int, num_right: int) -> None:
        """Note that the last draft that was drawn for a row has been verified.

        Args:
            row: the row of the sequence.
            num_right: how many of its tokens were right, counted from the first.
        """
        ...

    def idle(self) -> None:
        """Allow background work to use the processors until the next `follow` or `draw`."""
        ...

    def close(self) -> None:
        """Free the drafter's memory and threads."""
        ...
