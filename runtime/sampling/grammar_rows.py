"""`GrammarRow`: the mask state of a running sequence: grammar, thinking budget, token limits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from ostinato.runtime.grammar.matcher import RequestMatcher, problem
from ostinato.runtime.sampling.thinking_budget import ThinkingBudget
from ostinato.runtime.types.request import Request

__all__ = ("COSTLY_S", "SLOW_S", "GrammarRow", "MaskCost", "forced_tokens")

# The limits of matcher.py do not bound ambiguous grammars such as `s: s s | "a"`. Their masks take
# longer with each token. If a row's mask takes `SLOW_S`, its next masks are made alone, until one
# takes less. If a row's mask or token takes `_MAX_S` of processor time, the row ends with an error.
SLOW_S = 0.005
_MAX_S = 0.03
# A grammar is costly if a mask and a token take more processor time than this.
COSTLY_S = 0.0005
_REPLAY_PIECE_S = 0.0005  # the time of a call that gives a matcher several tokens
_MOST_REPLAYED = 256  # tokens of such a call
_WEIGHT = 0.125  # weight of the last measurement in the moving average
_NOTHING_LEFT = "the grammar allows no token here; change the grammar"
_NONE_ALLOWED = (
    "allowed_token_ids has none of the tokens that the grammar allows here; allow more tokens or "
    "change the grammar"
)
# No further forced tokens of a step are computed after this many seconds. llguidance computes all
# tokens that a grammar forces: 1 ms for the 4,000 of `a{4000}`, and 50 ms or more for a constant of
# 20,000 characters. If one call takes longer than this, the grammar's rows make no further call.
_FORCED_S = 0.001
_MOST_FORCED = 32  # a sequence has fewer draft tokens in a step (`speculation.max_tokens`)
_ONLY_EOS = (
    "ignore_eos=true excludes the end-of-sequence tokens, and the grammar allows no other token "
    "here; set ignore_eos=false or change the grammar"
)
_ONLY_EOS_ALLOWED = (
    "ignore_eos=true excludes the end-of-sequence tokens, and no other token of allowed_token_ids "
    "can follow here; set ignore_eos=false or allow more tokens"
)


class MaskCost:
    """How long the masks and tokens of one grammar take.

    Attributes:
        seconds: processor time of one mask, a moving average; 0 at first. A batch of masks of
            several grammars counts only if its masks took at most `COSTLY_S` on average.
        token_seconds: processor time in which a matcher takes a token, a moving average.
        has_slow_forced: a call that computes forced tokens took longer than `_FORCED_S`.
        is_suspect: a batch of masks of this and other grammars took long. It is not known which of
            the grammars is costly.
    """

    __slots__ = ("__weakref__", "has_slow_forced", "is_suspect", "seconds", "token_seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.token_seconds = 0.0
        self.has_slow_forced = False
        self.is_suspect = False

    def note(self, seconds: float) -> None:
        """Add a measurement of masks. Those of one grammar differ by a factor of ten and more."""
        self.is_suspect = False
        self.seconds += (seconds - self.seconds) * (_WEIGHT if self.seconds else 1.0)

    def note_token(self, seconds: float) -> None:
        """Add a measurement of a token."""
        weight = _WEIGHT if self.token_seconds else 1.0
        self.token_seconds += (seconds - self.token_seconds) * weight

    @property
    def is_costly(self) -> bool:
        """Whether a mask and a token take long, or possibly take long."""
        return self.is_suspect or self.seconds + self.token_seconds > COSTLY_S


class GrammarRow:
    """The state of a running sequence's grammar and thinking budget.

    Attributes:
        matcher: the grammar's matcher; None = the row has no grammar.
        cost: the cost of the grammar's masks.
        group: `Request.group`.
        position: position in the sequence of the token that the next mask is for. While the matcher
            has not taken all tokens of the answer, it is the position of the next of these.
        min_position: before this position, no end-of-sequence or stop token is allowed, unless the
            grammar and the other limits allow no further token.
        is_slow: its last mask or token, or the batch with its last mask, took long.
        num_turns: number of steps that the row has waited for its mask.
        num_unread: tokens that were drawn for the row and have not been read yet.
        ending: None while the answer continues; "" = the grammar is complete; else the error.
    """

    __slots__ = (
        "_behind",
        "_early",
        "_forced",
        "_is_drafted",
        "_limits",
        "_progress",
        "_thinking",
        "cost",
        "ending",
        "group",
        "is_slow",
        "matcher",
        "min_position",
        "num_turns",
        "num_unread",
        "position",
    )

    def __init__(
        self,
        progress: RequestMatcher | None,
        request: Request,
        output_token_ids: list[int],
        vocab_size: int,
        cost: MaskCost,
    ) -> None:
        params = request.sampling
        self.matcher = None if progress is None else progress.matcher
        self.cost = cost
        self.group = request.group
        self._progress = progress
        # Tokens of the answer that the matcher has to take, in reverse order. There are some if the
        # engine was restarted since they were drawn.
        self._behind: list[int] = []
        if progress is not None:
            assert progress.num_taken <= len(output_token_ids), "the matcher has dropped tokens"
            self._behind = output_token_ids[progress.num_taken :]
            self._behind.reverse()
        self.position = len(request.prompt_token_ids) + len(output_token_ids) - len(self._behind)
        self.is_slow = False
        self.num_turns = 0
        self.num_unread = 0
        self.ending: str | None = None
        # Masks of the request's parameters, each with the error if it leaves no token.
        self._limits: list[tuple[np.ndarray, str]] = []
        allowed = params.allowed_token_ids
        if allowed is not None:
            self._limits.append((_bits(allowed, vocab_size), _NONE_ALLOWED))
        if params.ignore_eos:  # the answer continues until the grammar is complete
            error = _ONLY_EOS if allowed is None else _ONLY_EOS_ALLOWED
            self._limits.append((~_bits(request.eos_token_ids, vocab_size), error))
        self.min_position = len(request.prompt_token_ids) + params.min_tokens
        eos_token_ids = () if params.ignore_eos else request.eos_token_ids
        self._early = ~_bits((*eos_token_ids, *params.stop_token_ids), vocab_size)
        self._is_drafted = params.speculation
        self._forced: list[int] = []  # tokens that the grammar forces, in reverse order
        self._thinking: ThinkingBudget | None = None
        if params.thinking is not None:
            self._thinking = ThinkingBudget(params.thinking, output_token_ids)

    @property
    def is_free(self) -> bool:
        """Whether no token is masked any more: no grammar, and the reasoning is over."""
        return self.matcher is None and (self._thinking is None or self._thinking.is_over)

    @property
    def is_behind(self) -> bool:
        """Whether `replay` has tokens of the answer left."""
        return bool(self._behind)

    def replay(self, seconds: float) -> float:
        """Give the matcher tokens of the answer so far, for about `seconds` of processor time.

        Sets `ending` if a token takes too long, or is not allowed.

        Returns:
            The processor time in seconds. Some tokens are taken even if `seconds` is short.
        """
        assert self._progress is not None, "only rows with a matcher are behind"
        begin = before = time.thread_time()
        count = 1
        while self._behind:
            some = self._behind[: -count - 1 : -1]
            is_allowed = self._progress.matcher.consume_tokens(some)
            now = time.thread_time()
            each = (now - before) / len(some)
            before = now
            self.cost.note_token(each)
            self.spend(each)
            if not is_allowed and self.ending is None:
                error = problem(self._progress.matcher)
                self.ending = error or "the grammar does not allow the output so far"
            num_taken = len(self._behind) if self.ending is not None else len(some)
            self._progress.num_taken += num_taken
            self.position += num_taken
            del self._behind[-num_taken:]
            if now - begin >= seconds:
                break
            count = min(max(1, int(_REPLAY_PIECE_S / max(each, 1e-7))), _MOST_REPLAYED)
        return before - begin

    def limit(self, bits: np.ndarray, position: int) -> None:
        """Apply the request's other limits to its mask, [W] int32. Sets `ending` on a conflict."""
        error = None if self.matcher is None else problem(self.matcher)
        if error is not None and self.ending is None:
            self.ending = f"structured_outputs cannot go on: {error}"
        if self.ending is None and not bits.any():
            self.ending = _NOTHING_LEFT
        for mask, error in self._limits:
            bits &= mask
            if self.ending is None and not bits.any():
                self.ending = error
        if position < self.min_position and (bits & self._early).any():
            bits &= self._early  # not done if it would leave no token
        if self._thinking is not None and self._thinking.is_spent:
            end = self._thinking.end_token_id
            word, bit = divmod(end, 32)
            if bits[word] >> bit & 1:  # 0 = another limit forbids the end token
                bits[:] = 0
                bits[word] = np.uint32(1 << bit).view(np.int32)
        if self.ending is not None:
            bits[:] = -1  # allow all; the drawn token is dropped

    def forced_token_ids(self, *, may_compute: bool = True) -> list[int]:
        """The first tokens that the grammar forces next, such as the keys of an object.

        They are guesses. A grammar forces bytes, and other tokens can have the same bytes.

        Args:
            may_compute: False = return only tokens that were computed after an earlier token.
        """
        if self.matcher is None or self.ending is not None or not self._is_drafted or self._behind:
            return []
        if may_compute and not self._forced and not self.cost.has_slow_forced:
            begin = time.thread_time()
            self._forced = self.matcher.compute_ff_tokens()
            self._forced.reverse()
            self.cost.has_slow_forced = time.thread_time() - begin > _FORCED_S
        return self._forced[: -_MOST_FORCED - 1 : -1]

    def take(self, token_id: int) -> str | None:
        """Advance by the row's next token.

        Returns:
            None if the answer continues. "" if the grammar is complete with this token. Otherwise
            an error; then the token is not part of the answer.
        """
        self.num_unread -= 1
        self.position += 1
        if self.ending is not None:
            return self.ending
        if self._thinking is not None:
            self._thinking.take(token_id)
        if self.matcher is None:
            return None
        if self._forced and self._forced.pop() != token_id:
            self._forced = []
        begin = time.thread_time()
        is_allowed = self.matcher.consume_token(token_id)
        seconds = time.thread_time() - begin
        self.cost.note_token(seconds)
        self.spend(seconds)
        if self._progress is not None:
            self._progress.num_taken += 1
        if not is_allowed:
            self.ending = problem(self.matcher) or "the grammar does not allow the drawn token"
        elif self.matcher.is_stopped():
            self.ending = problem(self.matcher) or ""
        return self.ending

    def spend(self, seconds: float) -> None:
        """Note the processor time of a mask or token; sets `ending` if it is too long."""
        self.is_slow = self.is_slow or seconds > SLOW_S
        if seconds > _MAX_S and self.ending is None:
            self.ending = (
                "structured_outputs cannot go on: computing which tokens may follow takes"
                f" {seconds * 1e3:.0f} ms, but at most {_MAX_S * 1e3:.0f} ms are allowed; make it"
                " simpler, and let a grammar derive each text in only one way"
            )


def forced_tokens(rows: Iterable[GrammarRow | None]) -> dict[int, list[int]]:
    """The tokens that grammars force next, by index of the row.

    Rows without any are left out, and rows whose tokens cannot be computed within `_FORCED_S`.
    """
    forced: dict[int, list[int]] = {}
    end = time.perf_counter() + _FORCED_S
    for index, row in enumerate(rows):
        if row is None:
            continue
        if token_ids := row.forced_token_ids(may_compute=time.perf_counter() < end):
            forced[index] = token_ids
    return forced


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[W] int32: a bit for each token of the vocabulary, lowest bit first; 1 = in `token_ids`."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
