"""A request while the engine works on it: the scheduler's mutable record, never sent anywhere.

A sequence has no phases. `num_computed_tokens` catches up with its tokens; a chunk of a prompt, a
prefix hit, recomputation after preemption and decoding are the same case.
"""

from __future__ import annotations

from enum import Enum

from ostinato.runtime.block_pool import BlockHash
from ostinato.runtime.types import Request

__all__ = ("Sequence", "SequenceStatus")


class SequenceStatus(Enum):
    """Where a sequence is. A preempted or finished one may still be part of a step in flight."""

    waiting = "waiting"
    running = "running"
    preempted = "preempted"
    finished = "finished"


class Sequence:
    """One request's progress.

    Args:
        request: what to generate; `sampling.n` is ignored, each completion is a request of its own.
        order: the policy's key; a smaller one runs first. Unique.
        max_model_len: tokens of prompt plus output that the model can hold.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "eos_token_ids",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "order",
        "request",
        "row",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: Request, order: tuple[int, int], max_model_len: int) -> None:
        sampling = request.sampling
        self.request = request
        self.order = order
        self.status = SequenceStatus.waiting
        self.token_ids = list(request.prompt_token_ids)  # prompt, then the output that has arrived
        self.num_prompt_tokens = len(self.token_ids)
        self.row = -1  # index into the runner's buffers; set while it is part of steps

        # Positions below are computed, or will be by a step that is in flight.
        self.num_computed_tokens = 0
        # Tokens known when it took its row. Later positions read the row's last sampled token, on
        # the device.
        self.num_given_tokens = 0
        self.num_in_flight = 0  # steps that include it and have not come back
        self.num_cached_tokens: int | None = None  # prefix hits at first admission; None before it
        self.num_preemptions = 0

        self.block_table: list[int] = []  # block ids by position // block_size; append-only
        self.block_hashes: list[
            BlockHash
        ] = []  # of the full blocks of token_ids, as far as needed yet
        self.num_registered_blocks = (
            0  # leading blocks of the table that are findable or duplicates
        )

        room = max_model_len - self.num_prompt_tokens
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self.max_num_tokens = self.num_prompt_tokens + max_tokens
        self.min_num_tokens = self.num_prompt_tokens + sampling.min_tokens
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else request.eos_token_ids)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and arrived output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have arrived."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether its terminal output was given."""
        return self.status is SequenceStatus.finished

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.status.value}, row={self.row}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens} tokens)"
        )
