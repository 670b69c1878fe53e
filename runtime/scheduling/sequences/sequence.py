"""`Sequence`: the scheduler's mutable record of a request. It is not sent to other processes.

A sequence has no phases for prefill and decode. Each step raises `num_computed_tokens` towards the
number of tokens. This covers chunks of a prompt, prefix hits, recomputation after preemption, and
decoding.
"""

from __future__ import annotations

from enum import Enum

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.kv.block_table import BlockTable
from ostinato.runtime.scheduling.sequences.beam_search import Beam
from ostinato.runtime.scheduling.sequences.repetition import REPETITION_REASON, RepetitionDetector
from ostinato.runtime.speculation.depth import DraftRecord
from ostinato.runtime.speculation.proposer import Draft
from ostinato.runtime.types.outputs import FinishReason, TokenLogprobs
from ostinato.runtime.types.request import Request

__all__ = ("Sequence", "SequenceStatus", "check_prompt_length", "duplicate_id")


class SequenceStatus(Enum):
    """The state of a sequence.

    A preempted, parked or finished sequence that is part of a step in flight is *draining*: it
    keeps its row and blocks until that step has been read. Then a preempted sequence waits.
    """

    waiting = "waiting"  # waits for a row and blocks; it holds neither
    loading = "loading"  # waits until blocks of its prefix are loaded; then it waits for a row
    running = "running"
    preempted = "preempted"  # it is draining, and loses its row and blocks afterwards
    parked = "parked"  # a beam without row and blocks, whose candidates are known
    finished = "finished"


def duplicate_id(request_id: str) -> InvalidRequestError:
    """The error for a request whose id is in use."""
    return InvalidRequestError(
        f"request_id {request_id!r} is in use; choose another id, or wait until that request ends",
        param="request_id",
    )


def check_prompt_length(request: Request, max_model_len: int) -> None:
    """Raises InvalidRequestError if the prompt is empty or leaves no room for output."""
    kept = 1 if request.pooling is None else 0
    if not 1 <= len(request.prompt_token_ids) <= max_model_len - kept:
        raise InvalidRequestError(
            f"the prompt must have 1 to {max_model_len - kept} tokens (max_model_len="
            f"{max_model_len}{', one is kept for the output' if kept else ''}), got "
            f"{len(request.prompt_token_ids)}; send a prompt of such a length",
            param="prompt",
            code="context_length_exceeded",
        )


class Sequence:
    """The progress of one request.

    Args:
        request: the request. `sampling.n` is ignored, because each completion is a request.
        order: a unique key. A sequence with a smaller key runs first.
        max_model_len: tokens of prompt plus output that one sequence may have.
        block_table: an empty block table; None = a table without a cache salt.
    """

    __slots__ = (
        "beam",
        "block_table",
        "decoded_at",
        "draft",
        "draft_record",
        "eos_token_ids",
        "forced_token_ids",
        "has_logprobs",
        "is_held",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts",
        "num_holds",
        "num_in_flight",
        "num_loaded_blocks",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_repeats",
        "order",
        "prompt_logprobs",
        "repetition",
        "request",
        "row",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        order: tuple[int, ...],
        max_model_len: int,
        block_table: BlockTable | None = None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.order = order
        self.status = SequenceStatus.waiting
        # The prompt, then the output so far.
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.row = -1  # index into the runner's buffers, while it runs or drains

        # Positions below this are computed, or will be by a step in flight. Only modules of
        # runtime/scheduling write it.
        self.num_computed_tokens = 0
        # The host supplies the ids of this many leading tokens: those that were known when the
        # sequence took its row. For beams and held sequences they are all tokens so far. At later
        # positions the input is the row's last sampled token, which the device has.
        self.num_prefill_tokens = 0
        # Draft tokens of its step in flight. A sequence with drafts has only one step in flight.
        self.num_drafts = 0
        # Right drafts that are computed again, because the states went back behind them.
        self.num_repeats = 0
        # Whether the log-probabilities of its output are computed.
        self.has_logprobs = sampling.logprobs is not None or sampling.use_beam_search
        self.draft: Draft | None = None  # the draft that these `num_drafts` tokens come from
        self.draft_record: DraftRecord | None = None  # its accepted and refused drafts
        self.forced_token_ids: list[int] = []  # tokens that its grammar forces after the last one
        # Its first blocks that it may not load from a slower tier again until it is preempted.
        self.num_loaded_blocks = 0
        self.num_in_flight = 0  # steps in flight that include it
        # The last step that decoded it. Only steps in which some sequence rested are counted.
        self.decoded_at = 0
        # Whether its last step gave no token. Then its last position is computed again, but only
        # after the steps in flight: these were planned as if there were a token. With recurrent
        # layers, positions before it are computed again too.
        self.is_held = False
        self.num_holds = 0  # steps so far that gave no token
        self.num_cached_tokens: int | None = None  # prefix hits at first admission; None before it
        self.num_preemptions = 0
        # Log-probabilities of prompt tokens 1, 2, ... so far. None = not requested, or already
        # returned.
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            None if sampling.prompt_logprobs is None or request.output_token_ids else []
        )

        self.block_table = block_table or BlockTable()

        room = max_model_len - self.num_prompt_tokens
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self.max_num_tokens = self.num_prompt_tokens + max_tokens
        self.min_num_tokens = self.num_prompt_tokens + sampling.min_tokens
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else request.eos_token_ids)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        detection = sampling.repetition_detection
        self.repetition = (
            RepetitionDetector(detection, request.output_token_ids)
            if detection is not None and detection.is_on
            else None
        )
        self.beam: Beam | None = None  # the beam that it computes, if it is part of a beam search

    def fork(self, order: tuple[int, ...], max_model_len: int) -> Sequence:
        """A waiting sequence with the same tokens; it holds no blocks yet."""
        other = Sequence(self.request, order, max_model_len, self.block_table.fork())
        other.token_ids = self.token_ids[:]
        other.num_cached_tokens = self.num_cached_tokens
        other.prompt_logprobs = self.prompt_logprobs
        return other

    @property
    def num_tokens(self) -> int:
        """Prompt and arrived output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have arrived."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache."""
        if self.prompt_logprobs is not None:
            return min(len(self.prompt_logprobs), self.num_tokens - 1)
        pooling = self.request.pooling
        if pooling is not None and pooling.needs_all_tokens:
            return 0
        return self.num_tokens - 1  # the last token must be computed to get its logits

    def num_prompt_logits(self, start: int, end: int) -> int:
        """Number of positions in [start, end) that predict a prompt token to be scored."""
        if self.prompt_logprobs is None:
            return 0
        return max(0, min(end, self.num_prompt_tokens - 1) - start)

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is a decode: the prompt is computed, and output is still missing.

        A sequence that computes its tokens again after a preemption does not decode meanwhile.
        """
        known, computed = self.num_prefill_tokens, self.num_computed_tokens
        if self.beam is not None:  # the search sets its last token; a waiting beam does not have it
            return self.num_output_tokens > 0 and known - computed == 1
        if self.is_held:
            return known - computed == 1
        return known <= computed and computed + 1 < self.max_num_tokens

    def hold(self, start: int) -> None:
        """Undo the last step, which gave no token.

        Args:
            start: the first position that is computed again, at most that of the last token.
        """
        self.is_held = True
        self.num_drafts = 0
        self.num_prefill_tokens = self.num_tokens
        self.num_computed_tokens = start

    def append(self, token_id: int) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)
        if self.repetition is not None:
            self.repetition.append(token_id)

    def ending(self) -> tuple[FinishReason, int | str | None] | None:
        """The finish reason and the stop reason if the last token ends the output; else None."""
        token_id, num_tokens = self.token_ids[-1], len(self.token_ids)
        may_end = num_tokens >= self.min_num_tokens
        if may_end:
            if token_id in self.eos_token_ids:
                return FinishReason.stop, None
            if token_id in self.stop_token_ids:
                return FinishReason.stop, token_id
        if num_tokens >= self.max_num_tokens:
            return FinishReason.length, None
        if may_end and self.repetition is not None and self.repetition.found:
            return FinishReason.repetition, REPETITION_REASON
        return None

    @property
    def is_running(self) -> bool:
        """Whether it has a row and blocks and can take part in steps."""
        return self.status is SequenceStatus.running

    @property
    def is_finished(self) -> bool:
        """Whether it has ended: its last output was returned, or it was dropped."""
        return self.status is SequenceStatus.finished

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.status.value}, row={self.row}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens} tokens)"
        )
