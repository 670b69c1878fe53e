"""Stores replies of `/v1/responses` in memory, for `previous_response_id`; drops the oldest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from ostinato.api.schemas.conversation import Message
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("ResponseStore",)


class _Stored(msgspec.Struct, frozen=True):
    response: bytes
    messages: bytes
    events: tuple[bytes, ...]
    input_items: bytes

    @property
    def size(self) -> int:
        texts = (self.response, self.messages, self.input_items, *self.events)
        return sum(map(len, texts))


class ResponseStore:
    """Replies and their conversations as JSON, by the reply's id.

    Args:
        limit_mib: total size; 0 = nothing is stored.

    Attributes:
        limit: total size in bytes.
    """

    def __init__(self, limit_mib: float) -> None:
        self.limit = int(limit_mib * (1 << 20))
        self._size = 0
        self._stored: OrderedDict[str, _Stored] = OrderedDict()

    @property
    def is_enabled(self) -> bool:
        return self.limit > 0

    def put(
        self,
        response_id: str,
        response: bytes,
        messages: msgspec.Raw,
        answer: Message,
        events: Sequence[bytes] = (),
        *,
        input_items: bytes = b"[]",
    ) -> None:
        """Store a reply. A reply that is larger than the limit is not stored.

        Args:
            response_id: the id of the reply.
            response: the body of the reply.
            messages: the conversation that the reply answers, without instructions.
            answer: the reply as a message.
            events: the events of the stream as they were sent, if they can be requested again.
            input_items: the input items of the request, a JSON list.
        """
        # The JSON is joined as text, so that a long conversation is not parsed.
        before = bytes(messages).rstrip()[1:-1]
        parts = [part for part in (before, msgspec.json.encode(answer)) if part.strip()]
        one = _Stored(response, b"[" + b",".join(parts) + b"]", tuple(events), input_items)
        if one.size > self.limit:
            return
        self._stored[response_id] = one
        self._size += one.size
        while self._size > self.limit:
            _, oldest = self._stored.popitem(last=False)
            self._size -= oldest.size

    def response(self, response_id: str) -> bytes:
        """The body of a reply; raises InvalidRequestError (404) for an unknown id."""
        return self._get(response_id).response

    def events(self, response_id: str) -> tuple[bytes, ...]:
        """The events of a reply; raises InvalidRequestError (404) for an unknown id."""
        return self._get(response_id).events

    def messages(self, response_id: str) -> bytes | None:
        """The conversation, the reply included, as a JSON list; None for an unknown id."""
        one = self._stored.get(response_id)
        return None if one is None else one.messages

    def input_items(self, response_id: str) -> bytes | None:
        """The input items of the reply's request, as a JSON list; None for an unknown id."""
        one = self._stored.get(response_id)
        return None if one is None else one.input_items

    def delete(self, response_id: str) -> None:
        """Remove a reply; raises InvalidRequestError (404) for an unknown id."""
        self._size -= self._get(response_id).size
        del self._stored[response_id]

    def _get(self, response_id: str) -> _Stored:
        one = self._stored.get(response_id)
        if one is None:
            raise InvalidRequestError(
                f"the reply {response_id[:100]!r} is not stored here (any more)",
                param="response_id",
                code="not_found",
                status=404,
            )
        return one
