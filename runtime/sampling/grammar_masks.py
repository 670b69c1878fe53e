"""Makes the token masks of a step from grammars and thinking budgets, one bit a token.

A row's mask depends on the token that it sampled last. If two successive steps both have such a
row, the second step's draw waits until the first step has been read. Its model runs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ostinato.ops.sample_rows import rows_at_once
from ostinato.ops.sampling import apply_token_bitmask
from ostinato.runtime.grammar.matcher import problem
from ostinato.runtime.sampling.thinking_budget import ThinkingBudget
from ostinato.runtime.types.request import Request

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

__all__ = ("GrammarMasks", "GrammarRow", "MatcherSource", "forced_tokens")

MatcherSource = Callable[[Request], "LLMatcher"]
_NOTHING_LEFT = (
    "the grammar allows no token that allowed_token_ids leave; allow more tokens or change the "
    "grammar"
)


class GrammarRow:
    """The state of a running sequence's grammar and thinking budget.

    Attributes:
        matcher: the grammar's matcher; None = the row has no grammar.
        num_unread: tokens that were drawn for the row and have not been read yet.
        ending: None while the answer continues; "" = the grammar is complete; else the error.
    """

    __slots__ = (
        "_banned",
        "_early",
        "_is_drafted",
        "_kept",
        "_thinking",
        "ending",
        "matcher",
        "min_position",
        "num_unread",
    )

    def __init__(
        self,
        matcher: LLMatcher | None,
        request: Request,
        output_token_ids: list[int],
        vocab_size: int,
    ) -> None:
        params = request.sampling
        self.matcher = matcher
        self.num_unread = 0
        self.ending: str | None = None
        self._kept = None
        if params.allowed_token_ids is not None:
            self._kept = _bits(params.allowed_token_ids, vocab_size)
        # With ignore_eos the answer continues until the grammar is complete.
        self._banned = ~_bits(request.eos_token_ids if params.ignore_eos else (), vocab_size)
        self.min_position = len(request.prompt_token_ids) + params.min_tokens
        eos_token_ids = () if params.ignore_eos else request.eos_token_ids
        self._early = ~_bits((*eos_token_ids, *params.stop_token_ids), vocab_size)
        self._is_drafted = params.speculation
        self._thinking: ThinkingBudget | None = None
        if params.thinking is not None:
            self._thinking = ThinkingBudget(params.thinking, output_token_ids)
        if (
            matcher is not None
            and output_token_ids
            and not matcher.consume_tokens(output_token_ids)
        ):
            self.ending = problem(matcher) or "the grammar does not allow the output so far"

    @property
    def is_free(self) -> bool:
        """Whether nothing is masked any more: it has no grammar and its reasoning is over."""
        return self.matcher is None and (self._thinking is None or self._thinking.is_over)

    def limit(self, bits: np.ndarray, position: int) -> None:
        """Apply the request's other limits to its mask, [W] int32; sets `ending` on a conflict."""
        error = None if self.matcher is None else problem(self.matcher)
        if error is not None and self.ending is None:
            self.ending = f"structured_outputs can not go on: {error}"
        bits &= self._banned
        if self._kept is not None:
            bits &= self._kept
        if position < self.min_position and (bits & self._early).any():
            bits &= self._early  # if this left no token, the answer would end before min_tokens
        if self._thinking is not None and self._thinking.is_spent:
            end = self._thinking.end_token_id
            word, bit = divmod(end, 32)
            if bits[word] >> bit & 1:  # else another limit forbids it
                bits[:] = 0
                bits[word] = np.uint32(1 << bit).view(np.int32)
        if self.ending is None and not bits.any():
            self.ending = _NOTHING_LEFT
        if self.ending is not None:
            bits[:] = -1  # allow all; the drawn token is dropped

    def forced_token_ids(self) -> list[int]:
        """The tokens that the grammar forces after those taken in, such as the keys of an object.

        They are guesses: a grammar forces bytes, and other tokens may have the same bytes.
        """
        if self.matcher is None or self.ending is not None or not self._is_drafted:
            return []
        return self.matcher.compute_ff_tokens()

    def take(self, token_id: int) -> str | None:
        """Take in the row's next token.

        Returns:
            None if the answer continues; "" if the grammar is complete with this token; else an
            error, and the token is not part of the answer.
        """
        self.num_unread -= 1
        if self.ending is not None:
            return self.ending
        if self._thinking is not None:
            self._thinking.take(token_id)
        if self.matcher is None:
            return None
        if not self.matcher.consume_token(token_id):
            self.ending = problem(self.matcher) or "the grammar does not allow the drawn token"
        elif self.matcher.is_stopped():
            self.ending = problem(self.matcher) or ""
        return self.ending


def forced_tokens(rows: Iterable[GrammarRow | None]) -> dict[int, list[int]]:
    """The tokens that grammars force next, by index of their row; only of rows that have some."""
    forced: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row is not None and (token_ids := row.forced_token_ids()):
            forced[index] = token_ids
    return forced


class GrammarMasks:
    """Makes a step's masks and applies them to its logits.

    Attributes:
        seconds: spent on masks, summed over steps.
    """

    def __init__(
        self, *, vocab_size: int, device: torch.device, matchers: MatcherSource | None = None
    ) -> None:
        """
        Args:
            vocab_size: V.
            device: of the logits.
            matchers: gives a request a matcher of its own; None = no request has a grammar.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._matchers = matchers
        self._executor: LLExecutor | None = None
        self.seconds = 0.0

    def admit(self, request: Request, output_token_ids: list[int]) -> GrammarRow | None:
        """The mask state of a sequence that takes a row; None without a grammar or budget."""
        if not request.grammar and request.sampling.thinking is None:
            return None
        matcher = None
        if request.grammar:
            assert self._matchers is not None, "a grammar was sent to a sampler without matchers"
            matcher = self._matchers(request)
        return GrammarRow(matcher, request, output_token_ids, self._vocab_size)

    def apply(
        self, logits: Tensor, rows: Sequence[GrammarRow | None], positions: Sequence[int]
    ) -> None:
        """Set the logits of tokens that are not allowed to minus infinity, in place.

        Args:
            logits: [R, V] float32.
            rows: [R], the mask state of each row or None. All their drawn tokens have been read.
            positions: [R], the position of each row's new token in its sequence.
        """
        begin = time.perf_counter()
        where = [index for index, row in enumerate(rows) if row is not None]
        states = [row for row in rows if row is not None]
        bits = self._fill(states)
        array = bits.numpy()
        for place, (index, state) in enumerate(zip(where, states, strict=True)):
            state.limit(array[place], positions[index])
            state.num_unread += 1
        self.seconds += time.perf_counter() - begin
        indices = torch.tensor(where, dtype=torch.int64, pin_memory=bits.is_pinned())
        indices = indices.to(self._device, non_blocking=True)
        bits = bits.to(self._device, non_blocking=True)
        at_once = rows_at_once(logits.shape[-1])  # masking takes as much memory a row as a draw
        for some, their_bits in zip(indices.split(at_once), bits.split(at_once), strict=True):
            apply_token_bitmask(logits, some, their_bits)

    def _fill(self, states: Sequence[GrammarRow]) -> Tensor:
        """[C, W] int32: the masks of the rows that have grammars; all bits of the others."""
        words = -(-self._vocab_size // 32)
        # New memory in every step: the device may still copy from that of the last step.
        bits = torch.empty(
            (len(states), words), dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        open_rows = []
        for place, state in enumerate(states):
            if state.matcher is None:
                bits[place] = -1
            elif state.ending is None:
                open_rows.append((state.matcher, place))
        if len(open_rows) == 1:
            ((matcher, place),) = open_rows
            matcher.unsafe_compute_mask_ptr(bits[place].data_ptr(), words * 4)
        elif open_rows:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                open_rows, bits.data_ptr(), words * 4, len(states)
            )
        return bits


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[W] int32 with one bit for each token, lowest first."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
