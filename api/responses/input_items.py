"""The items that a reply was made from, for `GET /v1/responses/{id}/input_items`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ostinato.api.responses.response_object import ItemList
from ostinato.api.service.service import Service
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("conversation_items", "item_page", "listed_items")

_MAX_LIMIT = 100
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def listed_items(given: str | Sequence[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """The items of an `input` with ids, and with the texts of messages as parts.

    Args:
        given: the `input` of the request.
        response_id: the id of the reply. The ids of the items are made from it.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    stem = response_id.removeprefix("resp_")
    return [_listed(item, f"{stem}_in{index}") for index, item in enumerate(items)]


def _listed(item: dict[str, Any], name: str) -> dict[str, Any]:
    given = {key: value for key, value in item.items() if value is not None}
    kind = given.get("type", "message")
    listed = {"id": f"{_PREFIXES.get(kind, 'item')}_{name}", "type": kind, "status": "completed"}
    if kind == "message" and isinstance(given.get("content"), str):
        of = "output_text" if given.get("role") == "assistant" else "input_text"
        part: dict[str, Any] = {"type": of, "text": given["content"]}
        given["content"] = [{**part, "annotations": []} if of == "output_text" else part]
    return {**listed, **given}


class _Earlier(msgspec.Struct):
    """The field of a reply that names the turn before it."""

    previous_response_id: str | None


class _Turn(_Earlier):
    """The fields of a stored reply that belong to the conversation."""

    output: list[msgspec.Raw]


class _Item(msgspec.Struct):
    id: str


async def conversation_items(service: Service, response_id: str) -> list[msgspec.Raw]:
    """The items of a reply's request, and those of the stored turns before it.

    Raises:
        InvalidRequestError: the id is unknown (404).
    """
    running, stored = service.background.get(response_id), service.stored_responses
    if running is None:
        last = msgspec.json.decode(stored.response(response_id), type=_Earlier)
        given = stored.input_items(response_id) or b"[]"
    else:
        last = msgspec.convert(running.present(), _Earlier, from_attributes=True)
        given = running.input_items
    items = msgspec.json.decode(given, type=list[msgspec.Raw])
    name = last.previous_response_id
    while name is not None and (given := stored.input_items(name)) is not None:
        await asyncio.sleep(0)  # let other tasks run: a turn can have megabytes
        turn = msgspec.json.decode(stored.response(name), type=_Turn)
        items = [*msgspec.json.decode(given, type=list[msgspec.Raw]), *turn.output, *items]
        name = turn.previous_response_id
    return items


def item_page(
    items: Sequence[msgspec.Raw],
    *,
    limit: int,
    order: Literal["asc", "desc"],
    after: str | None,
) -> ItemList:
    """A page of items.

    Args:
        items: all items, in the order of the conversation.
        limit: the largest number of items on the page.
        order: `desc` = the last item first.
        after: the page begins after the item with this id; None = at the first item.

    Raises:
        InvalidRequestError: the limit is out of range, or there is no item with that id.
    """
    if not 1 <= limit <= _MAX_LIMIT:
        raise InvalidRequestError(
            f"limit must be 1 to {_MAX_LIMIT}, got {limit}", param="limit", code="invalid_value"
        )
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = 0
    if after is not None:
        ids = [_id_of(item) for item in ordered]
        if after not in ids:
            raise InvalidRequestError(
                f"after must be the id of one of the listed input items, got {after[:100]!r}",
                param="after",
                code="invalid_value",
            )
        begin = ids.index(after) + 1
    page = ordered[begin : begin + limit]
    return ItemList(
        data=page,
        first_id=_id_of(page[0]) if page else None,
        last_id=_id_of(page[-1]) if page else None,
        has_more=begin + limit < len(ordered),
    )


def _id_of(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_Item).id
