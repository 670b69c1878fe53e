"""One engine step as data: what the scheduler hands to the runner and what comes back."""

from __future__ import annotations

import msgspec

from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.request import Request

__all__ = (
    "AdmittedSequence",
    "ScheduledSequence",
    "SchedulerOutput",
    "StepResult",
)


class AdmittedSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a row this step (new, or resumed after preemption)."""

    row: int  # index into the runner's persistent buffers
    request: Request
    output_token_ids: list[int]  # not empty when it resumes


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """What one row computes this step: positions [start, start + num_new_tokens)."""

    row: int
    start: int
    num_new_tokens: int
    token_ids: list[int]  # those positions' tokens; empty = the row's last sampled token
    new_block_ids: list[int]  # appended to the row's block table
    samples: bool  # True when the last position's logits give a token
    num_prompt_logits: int = 0  # leading positions whose next token, the prompt's, is scored
    is_pooled: bool = False  # the positions' hidden states go into a vector


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """The only message from scheduler to runner: plain integers, replayable in a test."""

    scheduled: list[ScheduledSequence]
    admitted: list[AdmittedSequence]
    num_tokens: int
    num_prompt_logits: int = 0  # of all entries
    # (from, to): blocks whose contents are copied before anything is written, all at once.
    block_copies: list[tuple[int, int]] = []
    num_pooled: int = 0  # entries with `is_pooled`

    @property
    def num_seqs(self) -> int:
        return len(self.scheduled)


class StepResult(msgspec.Struct, array_like=True):
    """What the runner gives back, one entry per scheduled row with `samples`, in that order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # None = nobody asked
    # One list per entry with `num_prompt_logits`, in that order.
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    pooled: list[bytes] | None = None  # one per entry that is the end of a pooled prompt
    # Sampling entries that end with this token: "" = the grammar is complete, or what is wrong with
    # it, and then the token is none.
    endings: dict[int, str] = {}
