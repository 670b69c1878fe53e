"""Applies the rules of transcripts (Whisper, arXiv:2212.04356) to the logits of a step's rows.

The rules name tokens that are never written, tokens that are not written first, and where
timestamps can stand. The state of the rows lies in a tensor on the device. `apply` and `advance`
are tensor operations on the rows that have rules. They do not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.transcript_rules import TranscriptRules

__all__ = ("TranscriptProcessor",)

_NONE = -1  # stands for a token that the output does not have yet
_NEVER = float("-inf")


class _Timestamps(NamedTuple):
    end_id: int
    first_id: int  # <|0.00|>
    ids: Tensor  # [T] int64, all timestamps of the vocabulary
    last_initial: int | None  # the last timestamp that can begin an output; None = any


class _Rules:
    """One value of `TranscriptRules`, on the device. Compared by identity."""

    __slots__ = ("suppressed", "suppressed_first", "timestamps")

    def __init__(self, rules: TranscriptRules, vocab_size: int, device: torch.device) -> None:
        suppressed = {token for token in rules.suppressed if 0 <= token < vocab_size}
        first = {token for token in rules.suppressed_first if 0 <= token < vocab_size}
        first_id = rules.first_timestamp_id
        self.timestamps: _Timestamps | None = None
        if first_id is not None:
            assert 0 < rules.end_id < first_id < vocab_size, (
                f"the ids of text, <|endoftext|>={rules.end_id}, <|0.00|>={first_id} and "
                f"vocab_size={vocab_size} must rise"
            )
            if rules.no_timestamps_id is not None:
                suppressed.add(rules.no_timestamps_id)
            steps = rules.max_initial_timestamp
            self.timestamps = _Timestamps(
                rules.end_id,
                first_id,
                torch.arange(first_id, vocab_size, device=device),
                None if steps is None else first_id + steps,
            )
        self.suppressed = to_device(sorted(suppressed), device)  # [K] int64
        self.suppressed_first = to_device(sorted(first - suppressed), device)  # [K'] int64


class _Row(NamedTuple):
    rules: _Rules
    begin: int  # the position of the first token of the output


class TranscriptProcessor:
    """`SamplingParams.transcript` of every row, S rows over a vocabulary of V tokens.

    The state takes [S, 4] 64-bit integers while a row has rules for timestamps. Rules that are
    equal share their lists of tokens. So no memory grows with S * V.

    The rules for timestamps, which are those of Whisper:

    - The output begins with a timestamp, of at most `max_initial_timestamp` steps.
    - Text stands between two timestamps. After the first of them comes text. After the second
      comes a timestamp or the end.
    - Timestamps do not fall. The one after a text is larger than the one before it.
    - If all timestamps together are likelier than the likeliest other token, a timestamp follows.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._timed: set[int] = set()  # rows with rules for timestamps
        self._known: dict[TranscriptRules, _Rules] = {}
        # [S, 4] int64: the newest token of the output, the token before it, the newest timestamp,
        # and the id of <|0.00|>. None while no row has rules for timestamps.
        self._state: Tensor | None = None

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Note that a sequence takes the row; `output_token_ids` is its output so far."""
        if self._rows.pop(row, None) is not None:
            self._timed.discard(row)
            if not self._timed:
                self._state = None
            if not self._rows:
                self._known.clear()
        rules = request.sampling.transcript
        if rules is None:
            return
        known = self._known.get(rules)
        if known is None:
            if len(self._known) >= self._max_num_seqs:
                used = {state.rules for state in self._rows.values()}
                self._known = {key: one for key, one in self._known.items() if one in used}
            known = self._known[rules] = _Rules(rules, self._vocab_size, self._device)
        self._rows[row] = _Row(known, len(request.prompt_token_ids))
        if known.timestamps is not None:
            self._timed.add(row)
            self._remember(row, known.timestamps.first_id, output_token_ids)

    def _remember(self, row: int, first_id: int, output_token_ids: list[int]) -> None:
        if self._state is None:
            shape = (self._max_num_seqs, 4)
            self._state = torch.full(shape, _NONE, dtype=torch.int64, device=self._device)
        before, newest = [_NONE, _NONE, *output_token_ids[-2:]][-2:]
        timestamps = (token for token in reversed(output_token_ids) if token >= first_id)
        state = [newest, before, next(timestamps, _NONE), first_id]
        self._state[row] = to_device(state, self._device)

    def changes(self, row: int) -> bool:
        """Whether the row has rules."""
        return row in self._rows

    def depends_on_output(self, row: int) -> bool:
        """Whether the row's rules depend on tokens drawn before: those for timestamps do."""
        return row in self._timed

    def apply(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Set the logits of tokens that the rules exclude to -infinity, in place.

        Args:
            logits: [R, V] float32.
            rows: [R], for each row of logits the row of its sequence. Rows without rules are not
                changed.
            positions: [R], the position of each new token in its sequence.
        """
        if not self._rows or self._rows.keys().isdisjoint(rows):
            return
        groups: dict[_Rules, list[int]] = {}  # indices of rows with equal rules
        first_of: dict[_Rules, list[int]] = {}  # indices into these, of rows without output
        for index, row in enumerate(rows):
            state = self._rows.get(row)
            if state is not None:
                places = groups.setdefault(state.rules, [])
                if positions[index] == state.begin:
                    first_of.setdefault(state.rules, []).append(len(places))
                places.append(index)
        for rules, places in groups.items():
            begin, end = places[0], places[-1] + 1
            if end - begin == len(places):
                some, where = logits[begin:end], None
            else:
                where = to_device(places, self._device)
                some = logits[where]  # a copy, so that other rows cost nothing
            some.index_fill_(1, rules.suppressed, _NEVER)
            for place in first_of.get(rules, ()):
                some[place].index_fill_(0, rules.suppressed_first, _NEVER)
            if rules.timestamps is not None:
                assert self._state is not None, "rows with rules for timestamps have a state"
                their_rows = to_device([rows[index] for index in places], self._device)
                _apply_timestamps(some, self._state[their_rows], rules.timestamps)
            if where is not None:
                logits[where] = some

    def advance(self, rows: Sequence[int], token_ids: Tensor) -> None:
        """Remember the rows' new tokens, [R] int64."""
        if self._state is None or self._timed.isdisjoint(rows):
            return
        places = [place for place, row in enumerate(rows) if row in self._timed]
        where = to_device([rows[place] for place in places], self._device)
        if len(places) < len(rows):
            token_ids = token_ids[to_device(places, self._device)]
        newest, _, timestamp, first_id = self._state[where].unbind(1)
        timestamp = torch.where(token_ids >= first_id, token_ids, timestamp)
        self._state[where] = torch.stack((token_ids, newest, timestamp, first_id), 1)


def _apply_timestamps(logits: Tensor, state: Tensor, rules: _Timestamps) -> None:
    """Apply the rules for timestamps, in place.

    Args:
        logits: [G, V] float32. Suppressed tokens have -infinity already, because the probabilities
            of all timestamps and of all other tokens are compared after that.
        state: [G, 4] int64; see `TranscriptProcessor`.
        rules: the rules of all G rows.
    """
    first_id = rules.first_id
    newest, before, timestamp, _ = state.unbind(1)
    others, timestamps = logits[:, :first_id], logits[:, first_id:]
    is_first = newest == _NONE
    follows_time = newest >= first_id
    is_pair = (before == _NONE) | (before >= first_id)
    must_be_text = follows_time & is_pair
    no_text = follows_time & ~is_pair
    # The smallest timestamp that can follow. With none before, it is 0, which is below all of them.
    least = torch.where(no_text, timestamp, timestamp + 1)
    least = least.masked_fill(must_be_text, first_id + timestamps.shape[1])
    excluded = rules.ids < least[:, None]
    if rules.last_initial is not None:
        excluded |= is_first[:, None] & (rules.ids > rules.last_initial)
    timestamps.masked_fill_(excluded, _NEVER)
    _exclude(logits[:, : rules.end_id], no_text)
    _exclude(others, is_first | (timestamps.logsumexp(1) > others.amax(1)))


def _exclude(logits: Tensor, rows: Tensor) -> None:
    """Set whole rows of `logits` [G, C] to -infinity, where `rows` [G] is true.

    On a CPU, an addition takes a tenth of the time of `masked_fill_` with a mask of one column.
    """
    logits += torch.where(rows, _NEVER, 0.0)[:, None]
