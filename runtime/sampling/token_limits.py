"""Applies allowed token ids and bad words to the logits of all rows of a step.

The state of every row lies in tensors on the device. `apply` and `advance` are tensor operations on
the rows that have limits. They do not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.runtime.sampling.to_device import to_device
from ostinato.runtime.types.request import Request

__all__ = ("TokenLimits", "limits_tokens")

# The logit of a bad word's last token. It is finite and lower than any other logit, so the token is
# drawn only if no other token is allowed.
BAD_WORD_LOGIT = -1e30
_ANY = -1  # matches every token; pads words that are shorter than the longest word
_NONE = -2  # matches no token; pads the history before the first output token


def limits_tokens(request: Request) -> bool:
    """Whether a request has limits that `TokenLimits` applies."""
    return request.sampling.allowed_token_ids is not None or bool(request.bad_words_token_ids)


class TokenLimits:
    """The limits of every row, S rows over a vocabulary of V tokens.

    Tensors are allocated at the first request with such a limit, and freed after the last. Allowed
    token ids take [S, V] booleans. W bad words of at most L tokens take [S, W, L - 1] and [S, W]
    32-bit integers.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._limited: set[int] = set()  # rows whose sequences have limits
        self._free()

    def _free(self) -> None:
        """Make the tensors of a state without limits. They take nearly no memory."""
        max_num_seqs, device = self._max_num_seqs, self._device
        self._allowed: Tensor | None = None  # [S, V] bool
        # A word is a beginning and an end. The end is forbidden when the output ends with the
        # beginning.
        self._beginnings = self._full((max_num_seqs, 0, 0), _ANY)  # [S, W, L - 1]
        self._ends = self._full((max_num_seqs, 0), 0)  # [S, W]
        self._is_word = torch.zeros((max_num_seqs, 0), dtype=torch.bool, device=device)  # [S, W]
        self._latest = self._full((max_num_seqs, 0), _NONE)  # [S, L - 1] output tokens, newest last

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Note that a sequence takes the row; `output_token_ids` is its output so far."""
        if row in self._limited:
            self._limited.discard(row)
            self._is_word[row] = False
            if self._allowed is not None:
                self._allowed[row] = True
            if not self._limited:
                self._free()
        if not limits_tokens(request):
            return
        self._limited.add(row)
        allowed = request.sampling.allowed_token_ids
        if allowed is not None:
            if self._allowed is None:
                shape = (self._max_num_seqs, self._vocab_size)
                self._allowed = torch.ones(shape, dtype=torch.bool, device=self._device)
            self._allowed[row] = False
            self._allowed[row, to_device(allowed, self._device)] = True
        # A tokenizer can have more tokens than the model, which draws none of the others.
        known = range(self._vocab_size)
        words = [word for word in request.bad_words_token_ids if all(one in known for one in word)]
        if words:
            self._set_words(row, words, output_token_ids)

    def changes(self, row: int) -> bool:
        """Whether the row has limits."""
        return row in self._limited

    def depends_on_output(self, row: int) -> bool:
        """Whether the row's limits can depend on tokens drawn before, because of bad words."""
        return row in self._limited and self._latest.shape[1] > 0

    def apply(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Lower the logits of tokens that the rows must not draw, in place.

        Args:
            logits: [R, V] float32.
            rows: [R], for each row of logits the row of its sequence. Rows without limits are not
                changed.
            positions: [R], the position of each new token in its sequence; not used.
        """
        if not self._limited or self._limited.isdisjoint(rows):
            return
        places, their_rows = self._limited_of(rows)
        if len(places) == len(logits):
            self._apply(logits, their_rows)
            return
        where = to_device(places, self._device)
        some = logits[where]  # so that rows without limits cost nothing
        self._apply(some, their_rows)
        logits[where] = some

    def _limited_of(self, rows: Sequence[int]) -> tuple[list[int], Tensor]:
        """The indices in `rows` of the rows that have limits, and these rows, on the device."""
        places = [place for place, row in enumerate(rows) if row in self._limited]
        return places, to_device([rows[place] for place in places], self._device)

    def _apply(self, logits: Tensor, rows: Tensor) -> None:
        if self._allowed is not None:
            logits.masked_fill_(~self._allowed[rows], float("-inf"))
        if self._ends.shape[1]:
            latest = self._latest[rows][:, None, :]
            beginnings = self._beginnings[rows]
            matches = ((beginnings == latest) | (beginnings == _ANY)).all(-1) & self._is_word[rows]
            # The minimum over all words, because one token can be the last of several words.
            values = torch.where(matches, BAD_WORD_LOGIT, float("inf")).to(logits.dtype)
            logits.scatter_reduce_(1, self._ends[rows].long(), values, "amin")

    def advance(self, rows: Sequence[int], token_ids: Tensor) -> None:
        """Remember the rows' new tokens, [R] int64."""
        if self._limited and self._latest.shape[1] and not self._limited.isdisjoint(rows):
            places, where = self._limited_of(rows)
            if len(places) < len(rows):
                token_ids = token_ids[to_device(places, self._device)]
            newest = token_ids[:, None].to(self._latest.dtype)
            self._latest[where] = torch.cat((self._latest[where][:, 1:], newest), 1)

    def _set_words(self, row: int, words: list[list[int]], output_token_ids: list[int]) -> None:
        self._grow(len(words), max(map(len, words)) - 1)
        length = self._latest.shape[1]
        beginnings = [[_ANY] * (length - len(word) + 1) + word[:-1] for word in words]
        count = len(words)
        self._beginnings[row, :count] = self._tensor(beginnings).view(count, length)
        self._ends[row, :count] = self._tensor([word[-1] for word in words])
        self._is_word[row, :count] = True
        latest = output_token_ids[-length:] if length else []
        self._latest[row] = self._tensor([_NONE] * (length - len(latest)) + latest)

    def _grow(self, num_words: int, length: int) -> None:
        """Make room for words whose beginnings have up to `length` tokens.

        The sizes of the tensors are powers of two.
        """
        old_words, old_length = self._ends.shape[1], self._latest.shape[1]
        new_words = max(old_words, _power_of_two(num_words))
        new_length = max(old_length, _power_of_two(length))
        if (new_words, new_length) == (old_words, old_length):
            return
        rows = self._max_num_seqs
        beginnings = self._full((rows, new_words, new_length), _ANY)
        beginnings[:, :old_words, new_length - old_length :] = self._beginnings
        ends = self._full((rows, new_words), 0)
        ends[:, :old_words] = self._ends
        is_word = torch.zeros((rows, new_words), dtype=torch.bool, device=self._device)
        is_word[:, :old_words] = self._is_word
        # Running rows keep their shorter history, which is long enough for their words.
        latest = self._full((rows, new_length), _NONE)
        latest[:, new_length - old_length :] = self._latest
        self._beginnings, self._ends = beginnings, ends
        self._is_word, self._latest = is_word, latest

    def _full(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self._device)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 0 else 0
