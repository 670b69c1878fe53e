"""One engine step as data: the scheduler's output and the executor's result.

A step has S sequences, T tokens and R rows of logits. Without drafts, R is the number of sequences
that sample. Each draft token adds one row.
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
    """A sequence that gets a row in this step: new, resumed after a preemption, or a moved beam."""

    row: int  # index into the runner's persistent buffers
    request: Request
    output_token_ids: list[int]  # its output so far, for example before a preemption
    is_resumed: bool = False  # after a preemption, which can come before the first output token


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """The work of one row in this step: positions [start, start + num_new_tokens)."""

    row: int
    start: int
    num_new_tokens: int
    # The tokens at these positions. Empty = one position, with the row's last sampled token. With
    # drafts: the last sampled token, then the drafts.
    token_ids: list[int]
    # Appended to the row's block table. 0 = the block lies outside of the window of all layers that
    # read the table.
    new_block_ids: list[int]
    # How many of the last positions get logits. 0 = no token is sampled: a chunk inside a prompt,
    # or a pooled prompt. 1 = one token is sampled. 1 + k = k drafts are verified, and up to 1 + k
    # tokens are returned.
    num_logits: int
    # How many of the first positions get the log-probability of the prompt token after them.
    num_prompt_logits: int = 0
    is_pooled: bool = False  # the positions' hidden states go into a vector
    # A decode whose last step gave no token: `token_ids` has the last token.
    is_repeated: bool = False
    # Appended to the row's second block table, which layers with a window read (`KVGroup`).
    new_window_block_ids: list[int] = []
    # The slots that recurrent layers read and write (`StepTensors.state_slots`). None = no layer is
    # recurrent, or a step that serves no request; then nothing is read, and slot 0 is written.
    state_slots: tuple[int, int, int, int] | None = None

    @property
    def num_drafts(self) -> int:
        """Number of trailing entries of `token_ids` that are drafts."""
        return max(0, self.num_logits - 1)

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode, and not a chunk of known tokens."""
        return not self.token_ids or self.num_logits > 1 or self.is_repeated


class BlockTransfer(msgspec.Struct, frozen=True, array_like=True):
    """Copies of whole KV blocks between the device and the slower tiers (runtime/tiers).

    An executor with tiers starts the transfers of a step in their order, before the
    `block_copies` and before the step writes keys and values, because the step can overwrite a
    block that is to be stored. A load can last longer than its step. No step uses the blocks of a
    load before `Scheduler.finish_load` was called for it.
    """

    transfer_id: int  # unique among loads; 0 for a store
    is_load: bool  # True: from the tiers to the device
    block_ids: list[int]  # on the device
    places: list[int]  # where the blocks are in the tiers, one per block; see `TierIndex`
    hashes: list[bytes]  # one per block; a place with other contents is not loaded


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """A planned step, which the engine sends from the scheduler to the executor."""

    scheduled: list[ScheduledSequence]
    admitted: list[AdmittedSequence]
    num_tokens: int
    num_prompt_logits: int = 0  # summed over the entries
    # (from, to) block ids. The contents are copied before the step writes keys and values. All
    # copies happen at once.
    block_copies: list[tuple[int, int]] = []
    num_pooled: int = 0  # entries with `is_pooled`
    num_drafts: int = 0  # summed over the entries
    transfers: list[BlockTransfer] = []  # an executor without tiers gets none

    @property
    def num_seqs(self) -> int:
        return len(self.scheduled)


class StepResult(msgspec.Struct, array_like=True):
    """The result of a step, in the order of the entries that sample.

    `token_ids` is one flat list with the tokens of all entries. The indices of `logprobs` and the
    keys of `endings` are indices into this list.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # None = no request asks for them
    # One list for each entry that has `num_prompt_logits` above 0, in their order.
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    pooled: list[bytes] | None = None  # one per entry that is the end of a pooled prompt
    # Keys are indices of tokens after which a sequence's grammar ended. The value "" says that the
    # grammar is complete; the token is kept. Any other value is the error; the token is dropped.
    endings: dict[int, str] = {}
    # The number of tokens of each entry that samples, 0 to `num_logits`; None = one token each.
    # 0 = the step had no time for the row's grammar mask, or the step before gave the row no token.
    # A later step then computes the row's last position again.
    counts: list[int] | None = None
    # Tokens that the grammar forces after the tokens in `token_ids`. The key is the index among the
    # entries that sample.
    forced_token_ids: dict[int, list[int]] = {}
