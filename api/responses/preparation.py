"""Prepares requests of the Responses API.

The functions keep no state between requests. They run on the event loop or in a fork
(`api/preparation/preparer.py`).
"""

from __future__ import annotations

import msgspec

from ostinato.api.chat.chat_generation import ChatGeneration, count_chat, prepare_chat
from ostinato.api.preparation.generation import check_fields
from ostinato.api.preparation.preparation import Arrival, Preparation, renamed
from ostinato.api.responses.convert import FIELD_NAMES, input_messages, shows_logprobs, to_chat
from ostinato.api.responses.input_items import listed_items
from ostinato.api.responses.response_object import InputTokens
from ostinato.api.responses.schemas import UNSUPPORTED, InputTokensRequest, ResponsesRequest
from ostinato.api.schemas.conversation import Message
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("FUNCTIONS", "PreparedResponse", "prepare_input_tokens", "prepare_response")


class PreparedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A request of `/v1/responses`."""

    body: ResponsesRequest  # without its input
    ready: ChatGeneration
    messages: msgspec.Raw  # the conversation without instructions, for the store
    input_items: msgspec.Raw  # a JSON list, for the store
    num_top_logprobs: int | None  # alternatives per token; None = no log-probabilities


def prepare_response(preparation: Preparation, data: bytes, arrival: Arrival) -> PreparedResponse:
    """Prepare a request of `/v1/responses`. `arrival.request_id` is the id of the reply.

    Raises:
        InvalidRequestError: the body is not valid, the previous response is not stored, or
            `to_chat` or `prepare_chat` refuses the request.
    """
    body = preparation.decode(data, arrival, ResponsesRequest, UNSUPPORTED)
    messages = _messages(body, arrival)
    with renamed(FIELD_NAMES):
        chat = to_chat(body, messages)
        check_fields(chat)
        ready = prepare_chat(preparation, chat, arrival, request_id=arrival.request_id)
    items = [] if body.store is False else listed_items(body.input, arrival.request_id)
    num_top = len(body.logprob_token_ids or ()) or body.top_logprobs or 0
    return PreparedResponse(
        body=msgspec.structs.replace(body, input=""),
        ready=ready,
        messages=msgspec.Raw(msgspec.json.encode(messages)),
        input_items=msgspec.Raw(msgspec.json.encode(items)),
        num_top_logprobs=num_top if shows_logprobs(body) else None,
    )


def prepare_input_tokens(preparation: Preparation, data: bytes, arrival: Arrival) -> bytes:
    """The answer of `/v1/responses/input_tokens`, as JSON.

    Raises:
        InvalidRequestError: the body is not valid, the previous response is not stored, or
            `to_chat` or `count_chat` refuses the request.
    """
    body = preparation.decode(data, arrival, InputTokensRequest, UNSUPPORTED)
    messages = _messages(body, arrival)
    with renamed(FIELD_NAMES):
        count = count_chat(preparation, to_chat(body, messages), arrival)
    return msgspec.json.encode(InputTokens(count))


FUNCTIONS = (prepare_response, prepare_input_tokens)


def _messages(body: InputTokensRequest | ResponsesRequest, arrival: Arrival) -> list[Message]:
    """The conversation without instructions: the stored conversation, then the input."""
    messages: list[Message] = []
    if body.previous_response_id is not None:
        if arrival.stored_messages is None:
            raise InvalidRequestError(
                f"previous_response_id {body.previous_response_id[:100]!r} is not stored here (any"
                " more): send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        messages = msgspec.json.decode(arrival.stored_messages, type=list[Message])
    return messages + input_messages(body.input)
