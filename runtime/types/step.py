"""One engine step as data: what the scheduler hands to the executor and what comes back.

A step has S sequences, T tokens and R rows of logits. R is the number of sequences that sample when
no tokens are guessed, and more with drafts.
"""

from __future__ import annotations

import msgspec

from ostinato.runtime.types.outputs import TokenLogprobs
from ostinato.runtime.types.request import Request

__all__ = (
    "AdmittedSequence",
    "BlockTransfer",
    "ScheduledSequence",
    "SchedulerOutput",
    "StepResult",
)


class AdmittedSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a row this step (new, or resumed after preemption)."""

    row: int  # index into the runner's persistent buffers
    request: Request
    output_token_ids: list[int]  # not empty when it resumes
    # The whole block table of each KV cache group after the first; the first one's blocks come with
    # the row's `ScheduledSequence`.
    other_block_ids: list[list[int]] = []


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """What one row computes this step: positions [start, start + num_new_tokens)."""

    row: int
    start: int
    num_new_tokens: int
    # Those positions' tokens; empty = one position, with the row's last sampled token. With drafts:
    # the last sampled token, then the guesses.
    token_ids: list[int]
    new_block_ids: list[int]  # appended to the row's block table
    # Last positions whose logits give a token: 0 = none (a chunk inside a prompt), 1 = one token,
    # 1 + k = k guesses are verified and 1 to 1 + k tokens come back.
    num_logits: int
    num_prompt_logits: int = 0  # leading positions whose next token, the prompt's, is scored
    is_pooled: bool = False  # the positions' hidden states go into a vector

    @property
    def num_drafts(self) -> int:
        """Trailing entries of `token_ids` that are guesses."""
        return max(0, self.num_logits - 1)

    @property
    def is_decode(self) -> bool:
        """Whether it continues an output that a step before sampled."""
        return not self.token_ids or self.num_logits > 1


class BlockTransfer(msgspec.Struct, frozen=True, array_like=True):
    """Copies of whole KV blocks between the device and a slower tier.

    The executor makes the transfers of a step in their order, before its `block_copies` and before
    it writes any key or value: a store reads a block that the same step may reuse. A load may end
    later, up to whenever `StepResult.finished_loads` names it; no step uses its blocks before.
    """

    transfer_id: int  # unique among loads; 0 for a store
    is_load: bool  # True: from the tier to the device
    block_ids: list[int]  # on the device
    places: list[int]  # in the tier, one per block


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """The only message from scheduler to executor: plain integers, replayable in a test."""

    scheduled: list[ScheduledSequence]
    admitted: list[AdmittedSequence]
    num_tokens: int
    num_prompt_logits: int = 0  # of all entries
    # (from, to): blocks whose contents are copied before anything is written, all at once.
    block_copies: list[tuple[int, int]] = []
    num_pooled: int = 0  # entries with `is_pooled`
    num_drafts: int = 0  # of all entries
    transfers: list[BlockTransfer] = []  # an executor without tiers refuses a step that has some

    @property
    def num_seqs(self) -> int:
        return len(self.scheduled)


class StepResult(msgspec.Struct, array_like=True):
    """What the executor gives back, in the order of the entries that sample.

    The tokens of all entries are one flat list. `logprobs` and the keys of `endings` follow it.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # None = no request asks
    # One list per entry with `num_prompt_logits`, in that order.
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    pooled: list[bytes] | None = None  # one per entry that is the end of a pooled prompt
    # Tokens after which a sequence's grammar ended, by index: "" = it matched completely and the
    # token is kept, else the error, and the token is dropped.
    endings: dict[int, str] = {}
    # Tokens of each entry that samples, 1 to `num_logits`; None = one each.
    counts: list[int] | None = None
    # (transfer_id, blocks that have their contents, from the first on) of loads that have ended.
    finished_loads: list[tuple[int, int]] = []
