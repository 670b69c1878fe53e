"""The engine's earlier answers, searched for the last tokens of a sequence.

Answers are in a ring buffer of token ids, where the newest overwrite the oldest. A place is the
index of a token among all tokens so far. A key is `min_match` successive tokens. A hash table gives
the latest place that follows each key. For each place, the distance to the previous place with the
same hash is stored. The memory is fixed: 16 bytes per token.

A sequence finds only answers of its own partition. A partition has the requests with the same cache
salt and the same adapters, as in the prefix cache. Otherwise the speed of a reply would tell one
client what the server has answered to another client.

The scheduler calls this class between steps, and an answer can have 100,000 tokens. So answers wait
in a queue, and each call takes a few tokens of it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence

from ostinato.runtime.speculation.text_index import MAX_MATCH

__all__ = ("AnswerHistory",)

_MAX_CANDIDATES = 6  # places of one hash that are compared, the latest first
_LEAD = 16  # prompt tokens that are kept before an answer, so that its beginning is found
_FAR = 1 << 30
_TOKENS_OF_A_CALL = 32  # 60 us. The answers of 128 sequences can end in one step.


class AnswerHistory:
    """A bounded memory of answers.

    Args:
        num_tokens: tokens that are kept.
        min_match: tokens of a key.
    """

    def __init__(self, num_tokens: int, min_match: int) -> None:
        self._num_tokens = num_tokens
        self._min_match = min_match
        self.clear()

    def clear(self) -> None:
        """Forget all answers."""
        size = self._num_tokens
        self._ring = array("i", [0]) * size
        self._distance = array("i", [0]) * size  # to the previous place of the same hash; 0 = none
        self._table = array("q", [-1]) * size  # hash -> latest place
        self._end = 0  # number of tokens so far, overwritten ones included
        self._begins: list[int] = []  # where each answer begins, rising
        self._partitions: list[Hashable] = []  # the partition of each answer
        self._queue: deque[tuple[Hashable, list[int]]] = deque()  # partition and tokens
        self._num_queued = 0  # tokens of the queue
        self._num_taken = 0  # tokens of the first answer in the queue that are in the buffer

    def learn(
        self, partition: Hashable, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """Add an answer, and the last tokens of its prompt.

        A part of it is found at once, and the rest after further calls of `learn` and `find`. If
        many answers wait, the oldest ones are dropped.
        """
        most = self._num_tokens // 2
        text = [*prompt_token_ids[-_LEAD:], *output_token_ids][-most:]
        self._queue.append((partition, text))
        self._num_queued += len(text)
        while self._num_queued > most:
            self._num_queued -= len(self._queue.popleft()[1])
            self._num_taken = 0
        self._take(_TOKENS_OF_A_CALL)

    def find(
        self, partition: Hashable, token_ids: Sequence[int], key: int, most: int
    ) -> tuple[list[int], int] | None:
        """Find the last tokens of a sequence in an answer of its partition.

        Args:
            partition: the partition of the sequence.
            token_ids: the sequence.
            key: `key_of` the sequence and `min_match` (text_index.py).
            most: the largest number of tokens to return.

        Returns:
            The tokens that follow the match, and the length of the match; None without a match.
        """
        if self._queue:
            self._take(_TOKENS_OF_A_CALL)
        if not self._begins:
            return None
        size, num_key, num_tokens = self._num_tokens, self._min_match, len(token_ids)
        place = self._table[key % size]
        best, best_length, best_end = -1, num_key - 1, 0
        for _ in range(_MAX_CANDIDATES):
            if place < self._begins[0]:
                break
            index = bisect_right(self._begins, place) - 1
            # One comparison tells whether the match at this place can be longer than the best one.
            reach = best_length + 1
            is_longer = (
                reach <= min(num_tokens, place - self._begins[index])
                and self._ring[(place - reach) % size] == token_ids[num_tokens - reach]
            )
            if is_longer and self._partitions[index] == partition:
                length = self._match_length(place, self._begins[index], token_ids)
                if length > best_length:
                    best, best_length = place, length
                    more = index + 1 < len(self._begins)
                    best_end = self._begins[index + 1] if more else self._end
                    if length == MAX_MATCH:
                        break
            step = self._distance[place % size]
            if not step:
                break
            place -= step
        if best < 0:
            return None
        ring = self._ring
        draft = [ring[place % size] for place in range(best, min(best + most, best_end))]
        return draft, best_length

    def _take(self, most: int) -> None:
        """Move up to `most` tokens of the queue to the buffer."""
        size, ring, table, distance = self._num_tokens, self._ring, self._table, self._distance
        num_key = self._min_match
        while most > 0 and self._queue:
            partition, text = self._queue[0]
            begin = self._end - self._num_taken
            if not self._num_taken:
                self._begins.append(begin)
                self._partitions.append(partition)
            end = min(begin + len(text), self._end + most)
            for place in range(self._end, end):
                ring[place % size] = text[place - begin]
            for place in range(max(begin + num_key, self._end), end):
                at = hash(tuple(text[place - num_key - begin : place - begin])) % size
                before = table[at]
                distance[place % size] = 0 if before < 0 else min(place - before, _FAR)
                table[at] = place
            most -= end - self._end
            self._num_taken += end - self._end
            self._end = end
            if self._num_taken == len(text):
                self._queue.popleft()
                self._num_queued -= len(text)
                self._num_taken = 0
        self._drop_overwritten()

    def _match_length(self, place: int, begin: int, token_ids: Sequence[int]) -> int:
        ring, size, end = self._ring, self._num_tokens, len(token_ids)
        most = min(place - begin, end, MAX_MATCH)
        length = 0
        while length < most and ring[(place - 1 - length) % size] == token_ids[end - 1 - length]:
            length += 1
        return length

    def _drop_overwritten(self) -> None:
        """Forget the answers that are partly overwritten."""
        first = self._end - self._num_tokens
        num_lost = bisect_right(self._begins, first - 1)
        if num_lost:
            del self._begins[:num_lost]
            del self._partitions[:num_lost]
