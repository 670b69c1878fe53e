"""Holds requests until their images or their audio are encoded; gives out rows for the encodings.

The embeddings of an image, or of a window of a sound, lie in rows of the media tables. The keys and
values of audio that is transcribed lie in a window of the caches of cross attention, which counts
as one row. Every rank has both. Requests with the same input share its encoding. When no request
needs it any more, it stays until its rows are needed for another input; the encoding that was used
longest ago gives up its rows first.

The ranks encode between steps, in units of work, so that steps wait only a short time for them.

Requests get rows, and are encoded, in the order of fair queueing (Demers, Keshav and Shenker,
1989), as in `Turns` (runtime/scheduling/sequences/sequence_turns.py): the k-th further window of a
file comes behind the k-th request that arrives later. So that such a request finds rows, the
windows of one file hold at most three quarters of them. A request gets rows for all its images,
pairs of frames and windows of sounds at once, but the k-th further one is encoded after those of
the k-th later request.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator

from ostinato.runtime.execution.executor import AdvanceEncodings, BeginEncoding, Executor
from ostinato.runtime.types.audio import PromptAudio, PromptSound
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.request import Request

__all__ = ("EncodingQueue",)

_BUSY_S = 0.025  # how long the steps of other requests may wait for encodings
_IDLE_S = 0.1  # the same without other requests: then new requests wait


class _Encoding:
    """The encoding of one input."""

    __slots__ = ("holders", "is_ready", "num_ranks", "rows")

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.num_ranks = 0  # ranks that have completed it
        self.is_ready = False
        self.holders: set[str] = set()  # the requests that need it


class EncodingQueue:
    """The requests that wait for encodings, and the inputs that have any.

    Args:
        executor: computes the encodings.
        num_rows: rows besides row 0; 0 = the model takes text only.
        rank: requests of a lower rank come first, as in the scheduler.

    Attributes:
        num_encoded: inputs that were encoded.
        num_hits: inputs of requests that were encoded already, or were being encoded.
        encode_seconds: time for computing encodings.
    """

    def __init__(
        self,
        executor: Executor,
        num_rows: int,
        *,
        rank: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self.num_encoded = 0
        self.num_hits = 0
        self.encode_seconds = 0.0
        self._executor = executor
        self._num_rows = num_rows
        self._rank = rank
        self._free_rows = list(range(num_rows, 0, -1))
        self._encodings: OrderedDict[bytes, _Encoding] = OrderedDict()  # the last used one is last
        self._num_requests = 0  # the windows of one file count once
        self._num_arrivals = 0
        self._waiting: dict[str, Request] = {}
        # The waiting requests in their order (`add`), which ends with the id.
        self._queue: list[tuple[int, int, int, int, str]] = []
        self._rows_of_groups: Counter[int] = Counter()  # rows that the sequences of a request hold
        self._held: dict[str, list[bytes]] = {}  # request that has rows -> its inputs
        self._groups: dict[str, tuple[int, int]] = {}  # the same -> its group, and its new rows
        self._dropped: list[bytes] = []  # inputs that the ranks are to forget

    @property
    def num_waiting(self) -> int:
        """Requests whose encodings are not complete."""
        return len(self._waiting)

    def holds_back(self, request_id: str) -> bool:
        """Whether a request waits for encodings."""
        return request_id in self._waiting

    @property
    def encoding(self) -> str | None:
        """The request whose encodings are computed next; None = all waiting ones lack rows."""
        return min(self._missing(), default=(None, None, None))[1]

    @property
    def predicted_seconds(self) -> float:
        """Seconds for the missing encodings of waiting requests, by the mean of earlier inputs."""
        wanted = {one.digest for each in self._waiting.values() for one in each.encoded_inputs}
        found = (self._encodings.get(digest) for digest in wanted)
        num_missing = sum(one is None or not one.is_ready for one in found)
        return num_missing * self.encode_seconds / max(1, self.num_encoded)

    def add(self, request: Request) -> Request:
        """Queue a request with images or audio. When they are encoded, `advance` names it.

        Returns:
            The request without pixels and features.
        """
        self._num_requests += not request.place
        self._num_arrivals += 1
        turn = self._num_requests + request.place
        order = self._rank(request), turn, request.place, self._num_arrivals
        insort(self._queue, (*order, request.request_id))
        self._waiting[request.request_id] = request
        self._begin_waiting()
        return request.without_data()

    def advance(self, *, is_busy: bool) -> list[str]:
        """Compute a part of the missing encodings.

        Args:
            is_busy: other requests wait for their next step.

        Returns:
            The requests whose encodings are complete now. They keep them until `release`.
        """
        order = list(dict.fromkeys(digest for *_, digest in sorted(self._missing())))
        if not order:  # the requests wait for rows only
            return self._take_ready()
        begin = time.perf_counter()
        seconds = _BUSY_S if is_busy else _IDLE_S
        answers = self._executor.call(AdvanceEncodings(seconds, self._take_dropped(), order))
        self.encode_seconds += time.perf_counter() - begin
        for digest in (digest for answer in answers for digest in answer.split()):
            encoding = self._encodings.get(bytes.fromhex(digest))
            if encoding is not None:
                encoding.num_ranks += 1
                encoding.is_ready = encoding.num_ranks == len(answers)
                self.num_encoded += encoding.is_ready
        return self._take_ready()

    def release(self, request_id: str) -> bool:
        """Give up the encodings of a request that has ended; returns whether it still waited."""
        was_waiting = request_id in self._waiting
        if was_waiting:
            self._leave([request_id])
        group, num_rows = self._groups.pop(request_id, (0, 0))
        self._rows_of_groups[group] -= num_rows
        if not self._rows_of_groups[group]:
            del self._rows_of_groups[group]
        for digest in self._held.pop(request_id, ()):
            encoding = self._encodings[digest]
            encoding.holders.discard(request_id)
            if not encoding.holders and not encoding.is_ready:
                self._drop(digest)
        if was_waiting:
            self._begin_waiting()
        return was_waiting

    def _missing(self) -> Iterator[tuple[tuple[int, int, int, int], str, bytes]]:
        """The inputs that have rows and are not encoded: their order, a request and the digest."""
        for rank, turn, place, arrival, name in self._queue:
            for number, digest in enumerate(self._held.get(name, ())):
                if not self._encodings[digest].is_ready:
                    yield (rank, turn + number, place + number, arrival), name, digest

    def _is_encoding(self, request_id: str) -> bool:
        """Whether a waiting request has rows, and an input that is not encoded."""
        held = self._held.get(request_id)
        return held is not None and not all(self._encodings[digest].is_ready for digest in held)

    def _leave(self, request_ids: Collection[str]) -> None:
        """Take requests out of the queue."""
        for request_id in request_ids:
            del self._waiting[request_id]
        self._queue = [turn for turn in self._queue if turn[-1] not in request_ids]

    def _take_ready(self) -> list[str]:
        self._begin_waiting()
        ready = [
            name for *_, name in self._queue if name in self._held and not self._is_encoding(name)
        ]
        if ready:
            self._leave(ready)
        return ready

    def _begin_waiting(self) -> None:
        """Give rows to the inputs of waiting requests, the first request first.

        If a request lacks rows, later ones overtake it only if they need no rows.
        """
        lacks_rows = False
        for *_, name in self._queue:
            request = self._waiting[name]
            if name in self._held or self._has_its_share(request):
                continue
            if lacks_rows and self._num_missing_rows(request):
                continue
            lacks_rows = not self._hold_inputs(request) or lacks_rows

    def _has_its_share(self, request: Request) -> bool:
        """Whether other sequences of its request hold as many rows as they may."""
        held = self._rows_of_groups.get(request.group, 0)
        if not (held and request.group and request.group_size > 1):
            return False
        needed = self._num_missing_rows(request)
        return bool(needed) and held + needed > self._num_rows - max(1, self._num_rows // 4)

    def _num_missing_rows(self, request: Request) -> int:
        """Rows for the inputs of a request that no other request has had encoded."""
        inputs = {one.digest: one.num_rows for one in request.encoded_inputs}
        return sum(rows for digest, rows in inputs.items() if digest not in self._encodings)

    def _hold_inputs(self, request: Request) -> bool:
        """Let a request hold all its inputs; changes nothing and returns False without room."""
        inputs = {one.digest: one for one in request.encoded_inputs}
        missing = [one for digest, one in inputs.items() if digest not in self._encodings]
        room = len(self._free_rows)
        needed = sum(one.num_rows for one in missing)
        victims: list[bytes] = []
        for digest, encoding in self._encodings.items():
            if room >= needed:
                break
            if not encoding.holders and digest not in inputs:
                victims.append(digest)
                room += len(encoding.rows)
        if room < needed:
            return False
        for digest in victims:
            self._drop(digest)
        for digest, one in inputs.items():
            encoding = self._encodings.get(digest)
            if encoding is None:
                encoding = self._begin(one)
            else:
                self.num_hits += 1
            encoding.holders.add(request.request_id)
            self._encodings.move_to_end(digest)
        self._held[request.request_id] = list(inputs)
        self._groups[request.request_id] = request.group, needed
        self._rows_of_groups[request.group] += needed
        return True

    def _begin(self, one: PromptImage | PromptSound | PromptAudio) -> _Encoding:
        rows = self._free_rows[-one.num_rows :]
        del self._free_rows[-one.num_rows :]
        encoding = self._encodings[one.digest] = _Encoding(rows)
        self._executor.call(
            BeginEncoding(
                digest=one.digest,
                rows=rows,
                shape=one.shape,
                data=one.data,
                dropped=self._take_dropped(),
            )
        )
        return encoding

    def _drop(self, digest: bytes) -> None:
        self._free_rows += self._encodings.pop(digest).rows
        self._dropped.append(digest)

    def _take_dropped(self) -> list[bytes]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Compare rows, holders and requests with each other. O(rows).

        Raises:
            AssertionError: they contradict each other.
        """
        rows = [row for one in self._encodings.values() for row in one.rows] + self._free_rows
        if sorted(rows) != list(range(1, self._num_rows + 1)):
            raise AssertionError("encodings: a row is lost or has two uses")
        holders = {(digest, one) for one, digests in self._held.items() for digest in digests}
        listed = {(key, name) for key, one in self._encodings.items() for name in one.holders}
        if holders != listed:
            raise AssertionError(f"encodings: held {holders ^ listed} on one side only")
