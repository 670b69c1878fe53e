"""Holds requests until the embeddings of their images exist; gives out rows of the image tables.

The embeddings of an image lie in rows of the image tables, which every rank has. Requests with the
same image share them. When no request needs them any more, they stay until their rows are needed
for another image; the image that was used longest ago gives up its rows first.

Requests get rows in the order in which they came. The ranks compute the embeddings between steps,
in units of work, so that steps wait only a short time for them.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.executor import AdvanceImages, BeginImage, Executor
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.request import Request

__all__ = ("ImageQueue",)

_BUSY_S = 0.025  # how long the steps of other requests may wait for embeddings
_IDLE_S = 0.1  # the same without other requests: then new requests wait


class _Embeddings:
    """The embeddings of one image."""

    __slots__ = ("holders", "is_ready", "num_ranks", "rows")

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows  # of the tables, one for each token of the image
        self.num_ranks = 0  # ranks that have completed them
        self.is_ready = False
        self.holders: set[str] = set()  # the requests that need them


class ImageQueue:
    """The requests that wait for embeddings, and the images that have any.

    Args:
        executor: computes the embeddings.
        num_rows: rows of the image tables besides row 0; 0 = the model takes no images.

    Attributes:
        num_encoded: images whose embeddings were computed.
        num_hits: images of requests whose embeddings existed, or were being computed.
        encode_seconds: time for computing embeddings.
    """

    def __init__(self, executor: Executor, num_rows: int) -> None:
        self.num_encoded = 0
        self.num_hits = 0
        self.encode_seconds = 0.0
        self._executor = executor
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows, 0, -1))
        self._images: OrderedDict[bytes, _Embeddings] = OrderedDict()  # the last used one is last
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._held: dict[str, list[bytes]] = {}  # request that has rows -> its images
        self._dropped: list[bytes] = []  # images that the ranks are to forget

    @property
    def num_waiting(self) -> int:
        """Requests whose embeddings are not complete."""
        return len(self._waiting)

    def holds_back(self, request_id: str) -> bool:
        """Whether a request waits for embeddings."""
        return request_id in self._waiting

    @property
    def encoding(self) -> str | None:
        """The request whose embeddings are computed next; None = all waiting ones lack rows."""
        return next((one for one in self._waiting if one in self._held), None)

    def check(self, request: Request) -> None:
        """Check that the tables can hold all images of a request at once.

        Raises:
            InvalidRequestError: they cannot.
        """
        if not request.images:
            return
        if not self._num_rows:
            raise InvalidRequestError(
                f"{self._name(request)} has images, and this model takes none; send text alone",
                param="messages",
                code="unsupported_parameter",
            )
        sizes = {image.digest: image.num_tokens for image in request.images}
        if sum(sizes.values()) > self._num_rows:
            raise InvalidRequestError(
                f"the images of {self._name(request)} have {sum(sizes.values())} tokens together, "
                f"and at most {self._num_rows} fit (images.cache_tokens); send fewer or smaller "
                "images",
                param="messages",
                code="image_too_large",
            )

    def add(self, request: Request) -> Request:
        """Queue a request with images. When their embeddings are complete, `advance` names it.

        Returns:
            The request without the pixels.
        """
        request_id = request.request_id
        bare = msgspec.structs.replace(
            request, images=[msgspec.structs.replace(one, pixels=b"") for one in request.images]
        )
        self._waiting[request_id] = request
        self._begin_waiting()
        return bare

    def advance(self, *, is_busy: bool) -> list[str]:
        """Compute a part of the missing embeddings.

        Args:
            is_busy: other requests wait for their next step.

        Returns:
            The requests whose embeddings are complete now. They keep them until `release`.
        """
        if self.encoding is None:  # the requests wait for rows only
            return self._take_ready()
        begin = time.perf_counter()
        seconds = _BUSY_S if is_busy else _IDLE_S
        answers = self._executor.call(AdvanceImages(seconds, self._take_dropped()))
        self.encode_seconds += time.perf_counter() - begin
        for digest in (digest for answer in answers for digest in answer.split()):
            embeddings = self._images.get(bytes.fromhex(digest))
            if embeddings is not None:
                embeddings.num_ranks += 1
                embeddings.is_ready = embeddings.num_ranks == len(answers)
                self.num_encoded += embeddings.is_ready
        return self._take_ready()

    def release(self, request_id: str) -> bool:
        """Give up the embeddings of a request that has ended; returns whether it still waited."""
        was_waiting = self._waiting.pop(request_id, None) is not None
        for digest in self._held.pop(request_id, ()):
            embeddings = self._images[digest]
            embeddings.holders.discard(request_id)
            if not embeddings.holders and not embeddings.is_ready:
                self._drop(digest)
        if was_waiting:
            self._begin_waiting()
        return was_waiting

    def _take_ready(self) -> list[str]:
        self._begin_waiting()
        ready = [
            request_id
            for request_id in self._waiting
            if request_id in self._held
            and all(self._images[digest].is_ready for digest in self._held[request_id])
        ]
        for request_id in ready:
            del self._waiting[request_id]
        return ready

    def _begin_waiting(self) -> None:
        """Give rows to the images of waiting requests, the first request first."""
        for request_id, request in self._waiting.items():
            if request_id not in self._held and not self._hold_images(request):
                break  # later requests do not overtake this one

    def _hold_images(self, request: Request) -> bool:
        """Let a request hold all its images; changes nothing and returns False without room."""
        images = {image.digest: image for image in request.images}
        missing = [image for digest, image in images.items() if digest not in self._images]
        room = len(self._free_rows)
        needed = sum(image.num_tokens for image in missing)
        victims: list[bytes] = []
        for digest, embeddings in self._images.items():
            if room >= needed:
                break
            if not embeddings.holders and digest not in images:
                victims.append(digest)
                room += len(embeddings.rows)
        if room < needed:
            return False
        for digest in victims:
            self._drop(digest)
        for digest, image in images.items():
            embeddings = self._images.get(digest)
            if embeddings is None:
                embeddings = self._begin(image)
            else:
                self.num_hits += 1
            embeddings.holders.add(request.request_id)
            self._images.move_to_end(digest)
        self._held[request.request_id] = list(images)
        return True

    def _begin(self, image: PromptImage) -> _Embeddings:
        rows = self._free_rows[-image.num_tokens :]
        del self._free_rows[-image.num_tokens :]
        embeddings = self._images[image.digest] = _Embeddings(rows)
        self._executor.call(
            BeginImage(
                digest=image.digest,
                rows=rows,
                height=image.height,
                width=image.width,
                pixels=image.pixels,
                dropped=self._take_dropped(),
            )
        )
        return embeddings

    def _drop(self, digest: bytes) -> None:
        self._free_rows += self._images.pop(digest).rows
        self._dropped.append(digest)

    def _take_dropped(self) -> list[bytes]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def _name(self, request: Request) -> str:
        return f"request {request.request_id.rpartition('#')[0] or request.request_id}"

    def check_integrity(self) -> None:
        """Compare rows, holders and requests with each other. O(rows).

        Raises:
            AssertionError: they contradict each other.
        """
        rows = [row for one in self._images.values() for row in one.rows] + self._free_rows
        if sorted(rows) != list(range(1, self._num_rows + 1)):
            raise AssertionError("images: a row of the tables is lost or has two uses")
        holders = {(digest, one) for one, digests in self._held.items() for digest in digests}
        listed = {(digest, one) for digest, image in self._images.items() for one in image.holders}
        if holders != listed:
            raise AssertionError(f"images: held {holders ^ listed} on one side only")
