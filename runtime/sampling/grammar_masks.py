"""Makes the token masks of a step from grammars and thinking budgets, one bit a token.

A row's mask depends on the token that the row sampled last. If two successive steps mask the same
row, the sampling of the second step waits until the first step has been read. The model of the
second step runs meanwhile.

The masks of a step take a limited time. The token of a row whose mask does not fit into this time
is dropped. A later step computes the row's position again. There its mask precedes the others of
its kind and of its request if time is short. Requests take turns.

Masks of costly grammars take a hundred times as long as other masks. They are made last. If the
step also has rows that need no costly mask, all costly masks together may take only a share of the
time that the model takes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ostinato.ops.sampling.plain_sampling import apply_token_bitmask
from ostinato.ops.sampling.sample_rows import rows_at_once
from ostinato.runtime.sampling.grammar_rows import COSTLY_S, SLOW_S, GrammarRow, MaskCost
from ostinato.runtime.types.request import Request

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from ostinato.runtime.grammar.matcher import RequestMatcher

__all__ = ("MASKS_S", "GrammarMasks", "MatcherSource")

# The time for the masks of one step in seconds, unless the caller allows more. After it no further
# masks are begun, and masks that are being made are completed. One call makes a batch of masks. It
# has as many masks as fit into the remaining time if each takes as long as the last masks did. It
# has at least one for each thread, and at most `_MOST_ROWS_PER_THREAD`.
MASKS_S = 0.01
_MOST_ROWS_PER_THREAD = 64
_MAX_THREADS = 32
# If a step has other rows, masks of costly grammars get a share of the model's time. The share is
# `_COSTLY_SHARE` for each request that needs them, divided by the number of the other rows, but at
# least `_LEAST_COSTLY_SHARE`. Unused time is saved for later steps, up to `_MOST_CREDIT_S`.
_COSTLY_SHARE = 0.5
_LEAST_COSTLY_SHARE = 0.05
_MOST_CREDIT_S = 0.01
# In each step, new matchers take tokens of answers that began before a restart for about this long.
_REPLAY_S = 0.002

MatcherSource = Callable[[Request], "RequestMatcher"]


class GrammarMasks:
    """Makes a step's masks and applies them to its logits.

    Attributes:
        seconds: time spent on masks, summed over steps.
    """

    def __init__(
        self, *, vocab_size: int, device: torch.device, matchers: MatcherSource | None = None
    ) -> None:
        """
        Args:
            vocab_size: V.
            device: the device of the logits.
            matchers: gives the matcher of a request; None = no request has a grammar.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._matchers = matchers
        self._num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._executor: LLExecutor | None = None
        self._seconds_left = MASKS_S  # time left for masks in the present step
        self._replay_s_left = _REPLAY_S  # time left for tokens of earlier steps
        self._model_s = 0.0  # time that the model took in the present step
        self._credit_s = 0.0  # time for masks of costly grammars; negative after a long mask
        self._mask_s = SLOW_S  # time of one mask in the last batch
        self._costs: WeakValueDictionary[str, MaskCost] = WeakValueDictionary()  # by grammar
        self.seconds = 0.0

    def admit(self, request: Request, output_token_ids: list[int]) -> GrammarRow | None:
        """The mask state of a sequence that takes a row; None without a grammar or budget."""
        if not request.grammar and request.sampling.thinking is None:
            return None
        progress = None
        if request.grammar:
            assert self._matchers is not None, "a grammar was sent to a sampler without matchers"
            progress = self._matchers(request)
        cost = self._costs.setdefault(request.grammar, MaskCost())
        return GrammarRow(progress, request, output_token_ids, self._vocab_size, cost)

    def begin_step(self, seconds: float = MASKS_S, model_s: float = MASKS_S) -> None:
        """Begin a step, whose masks the next calls of `apply` make.

        Args:
            seconds: time that all masks together may take.
            model_s: time that the model has taken.
        """
        self._seconds_left = seconds
        self._replay_s_left = _REPLAY_S
        self._model_s = model_s

    def apply(
        self, logits: Tensor, rows: Sequence[GrammarRow | None], positions: Sequence[int]
    ) -> set[int]:
        """Set the logits of tokens that are not allowed to minus infinity, in place.

        Args:
            logits: [R, V] float32.
            rows: [R], the mask state of each row or None. All tokens that the rows have drawn must
                have been read.
            positions: [R], the position of each row's new token in its sequence.

        Returns:
            Indices of the rows that got no mask. Their drawn tokens are void. The step has no time
            for their masks, the previous step drew no token for them, or their matchers have not
            taken all of their tokens.
        """
        begin = time.perf_counter()
        where: list[int] = []
        states: list[GrammarRow] = []
        held: set[int] = set()
        for index, row in enumerate(rows):
            if row is None:
                continue
            if row.is_behind and self._replay_s_left > 0:
                self._replay_s_left -= row.replay(self._replay_s_left)
            if row.matcher is not None and row.position != positions[index]:
                held.add(index)
                continue
            where.append(index)
            states.append(row)
        bits, waiting = self._fill(states, len(rows) - len(states))
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
        at_once = rows_at_once(logits.shape[-1])  # so masking needs no more memory than sampling
        for some, their_bits in zip(indices.split(at_once), bits.split(at_once), strict=True):
            apply_token_bitmask(logits, some, their_bits)

    def _fill(self, states: Sequence[GrammarRow], num_free: int) -> tuple[Tensor, set[int]]:
        """Make the masks of rows. A row without a grammar gets a mask of ones.

        Args:
            states: the mask states of C rows.
            num_free: number of further rows of the step, which get no mask.

        Returns:
            [C, W] int32, W = V / 32 rounded up, and the indices of the rows whose masks were not
            made in time.
        """
        words = -(-self._vocab_size // 32)
        # New memory in every step, because the device can still be copying the last step's masks.
        bits = torch.empty(
            (len(states), words), dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        cheap: list[int] = []
        costly: list[int] = []
        for place, state in enumerate(states):
            if state.matcher is None:
                bits[place] = -1
            elif state.ending is None:
                (costly if state.cost.is_costly else cheap).append(place)
        held = self._make_all(cheap, states, bits)
        if costly:
            self._seconds_left = self._costly_seconds(
                [states[place] for place in costly], num_free + len(states) - len(costly)
            )
            before = self._seconds_left
            held += self._make_all(costly, states, bits)
            self._credit_s -= before - self._seconds_left
        return bits, set(held)

    def _costly_seconds(self, rows: Sequence[GrammarRow], num_others: int) -> float:
        """Seconds that masks of costly grammars may take in this step.

        Args:
            rows: the rows that need such masks.
            num_others: number of other rows in the step.
        """
        if not num_others:
            self._credit_s = 0.0
            return self._seconds_left
        num_requests = len({row.group or id(row) for row in rows})
        share = max(_LEAST_COSTLY_SHARE, _COSTLY_SHARE * num_requests / num_others)
        self._credit_s = min(self._credit_s + share * self._model_s, _MOST_CREDIT_S)
        self._model_s = 0.0  # later draws of the step add nothing
        return self._credit_s

    def _make_all(
        self, waiting: list[int], states: Sequence[GrammarRow], bits: Tensor
    ) -> list[int]:
        """Make masks while there is time; returns the indices of the masks that were not made.

        Args:
            waiting: indices of the masks to make.
            states: the mask state of each row.
            bits: [C, W] int32, the masks.
        """
        at_once = self._at_once()
        has_slow = any(states[place].is_slow for place in waiting)
        has_suspects = any(states[place].cost.is_suspect for place in waiting)
        if len(waiting) > at_once or has_slow or has_suspects:
            waiting = _in_turn(waiting, states)
        begin = time.perf_counter()
        while waiting and self._seconds_left > 0:
            slow = (index for index, place in enumerate(waiting) if states[place].is_slow)
            count = min(at_once, next(slow, at_once) if has_slow else at_once)
            if has_suspects and states[waiting[0]].cost.is_suspect:
                count = 1  # made alone, to find out whether its grammar is costly
            some = waiting[: max(1, count)]
            del waiting[: len(some)]
            cpu = time.process_time()
            self._make([(states[place], place) for place in some], bits)
            cpu_s = time.process_time() - cpu
            now = time.perf_counter()
            tokens_s = sum(states[place].cost.token_seconds for place in some)
            self._seconds_left -= now - begin + tokens_s
            self._mask_s = (now - begin) * self._num_threads / len(some)
            _note_costs([states[place].cost for place in some], cpu_s / len(some))
            at_once = self._at_once()
            begin = now
        return waiting

    def _at_once(self) -> int:
        """How many masks to make with one call."""
        rounds = int(self._seconds_left / max(self._mask_s, 1e-6))
        return self._num_threads * min(max(1, rounds), _MOST_ROWS_PER_THREAD)

    def _make(self, rows: list[tuple[GrammarRow, int]], bits: Tensor) -> None:
        """Write the masks of some rows into `bits`; each row comes with its index there."""
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
        begin, cpu = time.perf_counter(), time.process_time()
        matchers = [(row.matcher, place) for row, place in rows if row.matcher is not None]
        self._executor.unsafe_compute_mask_ptr(matchers, bits.data_ptr(), num_bytes, len(bits))
        num_rounds = -(-len(rows) // self._num_threads)
        is_slow = time.perf_counter() - begin > SLOW_S * num_rounds
        if is_slow and time.process_time() - cpu > SLOW_S:
            for row, _ in rows:  # any of these rows can be the slow one
                row.is_slow = True


def _in_turn(waiting: Sequence[int], states: Sequence[GrammarRow]) -> list[int]:
    """The indices of rows that wait for masks, sorted. If time is short, the first get masks.

    Each HTTP request has its longest waiting row among the first. So a request of many rows does
    not keep others waiting.
    """

    def turn(place: int) -> tuple[int, bool]:
        return -states[place].num_turns, states[place].is_slow

    num_rows: Counter[int] = Counter()  # by request
    keys: dict[int, tuple[bool, int]] = {}
    for place in sorted(waiting, key=turn):
        row = states[place]
        request = row.group or id(row)
        keys[place] = not row.cost.is_suspect, num_rows[request]
        num_rows[request] += 1
    return sorted(keys, key=keys.__getitem__)  # `keys` is in the order of turns


def _note_costs(costs: Sequence[MaskCost], seconds: float) -> None:
    """Note how long a batch of masks took.

    Args:
        costs: the `MaskCost` of each mask's grammar.
        seconds: mean processor time of one mask.
    """
    kinds = set(costs)
    if len(kinds) == 1:
        costs[0].note(seconds)
    elif seconds > COSTLY_S:
        for cost in kinds:
            cost.is_suspect = cost.is_suspect or not cost.is_costly
    else:
        for cost in kinds:
            cost.note(seconds)
