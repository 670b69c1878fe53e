"""Makes the token masks of a step from grammars and thinking budgets, one bit a token.

A row's mask depends on the token that it sampled last. If two successive steps both have such a
row, the second step's draw waits until the first step has been read. Its model runs meanwhile.

The masks of a step take a limited time. Rows whose masks do not fit draw no token in this step, and
have the first turns in the next one, which computes their position again.
"""

from __future__ import annotations

import os
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

__all__ = ("MASKS_S", "GrammarMasks", "GrammarRow", "MatcherSource", "forced_tokens")

# Seconds of a step after which no further masks are begun. Masks that are being made then are
# completed. As many are made at once as the time is enough for, if they take as long as the last
# ones did, and one for each thread at least.
MASKS_S = 0.01
_MOST_ROWS_PER_THREAD = 64
# The limits of matcher.py do not bound ambiguous grammars, such as `s: s s | "a"`: their
# masks take longer with each token. A row whose mask takes `_SLOW_S` is made alone from then on. A
# row whose mask or token takes `_MAX_S` of processor time ends with an error.
_SLOW_S = 0.005
_MAX_S = 0.03
_MAX_THREADS = 32

MatcherSource = Callable[[Request], "LLMatcher"]
_NOTHING_LEFT = (
    "the grammar allows no token that allowed_token_ids leave; allow more tokens or change the "
    "grammar"
)


class GrammarRow:
    """The state of a running sequence's grammar and thinking budget.

    Attributes:
        matcher: the grammar's matcher; None = the row has no grammar.
        position: of the token that the next mask is for, in the sequence.
        is_slow: its last mask took long, perhaps because of others that were made with it.
        num_turns: steps that the row has waited for its mask.
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
        "is_slow",
        "matcher",
        "min_position",
        "num_turns",
        "num_unread",
        "position",
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
        self.position = len(request.prompt_token_ids) + len(output_token_ids)
        self.is_slow = False
        self.num_turns = 0
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
        self.position += 1
        if self.ending is not None:
            return self.ending
        if self._thinking is not None:
            self._thinking.take(token_id)
        if self.matcher is None:
            return None
        begin = time.thread_time()
        is_allowed = self.matcher.consume_token(token_id)
        self.spend(time.thread_time() - begin)
        if not is_allowed:
            self.ending = problem(self.matcher) or "the grammar does not allow the drawn token"
        elif self.matcher.is_stopped():
            self.ending = problem(self.matcher) or ""
        return self.ending

    def spend(self, seconds: float) -> None:
        """Note the processor time of a mask or token; sets `ending` if it is too long."""
        self.is_slow = self.is_slow or seconds > _SLOW_S
        if seconds > _MAX_S and self.ending is None:
            self.ending = (
                "structured_outputs can not go on: computing which tokens may follow takes"
                f" {seconds * 1e3:.0f} ms, at most {_MAX_S * 1e3:.0f} ms are allowed; make it"
                " simpler, and in a grammar write each text in one way only"
            )


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
        self._num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._executor: LLExecutor | None = None
        self._seconds_left = MASKS_S  # of the present step
        self._mask_s = _SLOW_S  # of one mask, in those that were made together last
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

    def begin_step(self, seconds: float = MASKS_S) -> None:
        """Set how many seconds the masks of the next calls of `apply` may take together."""
        self._seconds_left = seconds

    def apply(
        self, logits: Tensor, rows: Sequence[GrammarRow | None], positions: Sequence[int]
    ) -> set[int]:
        """Set the logits of tokens that are not allowed to minus infinity, in place.

        Args:
            logits: [R, V] float32.
            rows: [R], the mask state of each row or None. All their drawn tokens have been read.
            positions: [R], the position of each row's new token in its sequence.

        Returns:
            Indices of the rows without a mask, whose drawn tokens are void. The step has no time
            for their masks, or it was launched as if the step before had drawn their token.
        """
        begin = time.perf_counter()
        where: list[int] = []
        states: list[GrammarRow] = []
        held: set[int] = set()
        for index, row in enumerate(rows):
            if row is None:
                continue
            if row.matcher is not None and row.position != positions[index]:
                held.add(index)
                continue
            where.append(index)
            states.append(row)
        bits, waiting = self._fill(states)
        array = bits.numpy()
        for place, (index, state) in enumerate(zip(where, states, strict=True)):
            if place in waiting:
                array[place] = -1
                state.num_turns += 1
                held.add(index)
                continue
            state.limit(array[place], positions[index])
            state.num_turns = 0
            state.num_unread += 1
        self.seconds += time.perf_counter() - begin
        if where:
            self._mask(logits, where, bits)
        return held

    def _mask(self, logits: Tensor, where: list[int], bits: Tensor) -> None:
        """Apply the masks [C, W] int32 to the rows `where` [C] of the logits."""
        indices = torch.tensor(where, dtype=torch.int64, pin_memory=bits.is_pinned())
        indices = indices.to(self._device, non_blocking=True)
        bits = bits.to(self._device, non_blocking=True)
        at_once = rows_at_once(logits.shape[-1])  # masking takes as much memory a row as a draw
        for some, their_bits in zip(indices.split(at_once), bits.split(at_once), strict=True):
            apply_token_bitmask(logits, some, their_bits)

    def _fill(self, states: Sequence[GrammarRow]) -> tuple[Tensor, set[int]]:
        """The masks of the rows that have grammars, and all bits of the others.

        Returns:
            [C, W] int32, and the indices of the rows for whose masks there was no time.
        """
        words = -(-self._vocab_size // 32)
        # New memory in every step: the device may still copy from that of the last step.
        bits = torch.empty(
            (len(states), words), dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        waiting: list[int] = []
        for place, state in enumerate(states):
            if state.matcher is None:
                bits[place] = -1
            elif state.ending is None:
                waiting.append(place)
        at_once = self._at_once()
        has_slow = any(states[place].is_slow for place in waiting)
        if len(waiting) > at_once or has_slow:
            waiting.sort(key=lambda place: (-states[place].num_turns, states[place].is_slow))
        begin = time.perf_counter()
        while waiting and self._seconds_left > 0:
            slow = (index for index, place in enumerate(waiting) if states[place].is_slow)
            count = min(at_once, next(slow, at_once) if has_slow else at_once)
            some = waiting[: max(1, count)]
            del waiting[: len(some)]
            self._make([(states[place], place) for place in some], bits)
            now = time.perf_counter()
            self._seconds_left -= now - begin
            self._mask_s = (now - begin) * self._num_threads / len(some)
            at_once = self._at_once()
            begin = now
        return bits, set(waiting)

    def _at_once(self) -> int:
        """How many masks to make with one call."""
        rounds = int(self._seconds_left / max(self._mask_s, 1e-6))
        return self._num_threads * min(max(1, rounds), _MOST_ROWS_PER_THREAD)

    def _make(self, rows: list[tuple[GrammarRow, int]], bits: Tensor) -> None:
        """Write the masks of some rows; each has its place in `bits`."""
        num_bytes = bits.shape[1] * 4
        if len(rows) == 1:
            ((row, place),) = rows
            assert row.matcher is not None, "only rows with grammars have masks to be made"
            begin = time.thread_time()
            row.matcher.unsafe_compute_mask_ptr(bits[place].data_ptr(), num_bytes)
            row.is_slow = False
            row.spend(time.thread_time() - begin)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        begin = time.perf_counter()
        matchers = [(row.matcher, place) for row, place in rows if row.matcher is not None]
        self._executor.unsafe_compute_mask_ptr(matchers, bits.data_ptr(), num_bytes, len(bits))
        num_rounds = -(-len(rows) // self._num_threads)
        if time.perf_counter() - begin > _SLOW_S * num_rounds:
            for row, _ in rows:  # it is not known which of them took so long
                row.is_slow = True


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[W] int32 with one bit for each token, lowest first."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
