"""Prepares requests of the Anthropic endpoints.

The functions keep no state between requests. They run on the event loop or in a fork
(`api/preparation/preparer.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ostinato.api.anthropic.convert import FIELD_NAMES, to_chat, with_one_system_message
from ostinato.api.anthropic.schemas import (
    UNSUPPORTED,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from ostinato.api.chat.chat_generation import ChatGeneration, count_chat, prepare_chat
from ostinato.api.chat.chat_prompt import reasons
from ostinato.api.preparation.generation import check_fields
from ostinato.api.preparation.preparation import Arrival, Preparation, renamed
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("FUNCTIONS", "PreparedMessages", "prepare_messages", "prepare_token_count")


T = TypeVar("T")


class PreparedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """A request of `/v1/messages`."""

    model: str | None
    stream: bool
    stream_interval: int
    shows_tier: bool
    ready: ChatGeneration


def prepare_messages(preparation: Preparation, data: bytes, arrival: Arrival) -> PreparedMessages:
    """Prepare a request of `/v1/messages`.

    Raises:
        InvalidRequestError: the body is not valid, or `to_chat` or `prepare_chat` refuses it.
    """
    body = preparation.decode(data, arrival, MessagesRequest, UNSUPPORTED)
    with renamed(FIELD_NAMES):
        chat = _to_chat(preparation, body)
        request_id = f"msg_{secrets.token_hex(12)}"
        ready = _with_any_template(
            chat, lambda one: prepare_chat(preparation, one, arrival, request_id=request_id)
        )
    return PreparedMessages(
        model=body.model,
        stream=bool(body.stream),
        stream_interval=body.stream_interval or 1,
        shows_tier=body.service_tier is not None,
        ready=ready,
    )


def prepare_token_count(preparation: Preparation, data: bytes, arrival: Arrival) -> bytes:
    """The answer of `/v1/messages/count_tokens`, as JSON.

    Raises:
        InvalidRequestError: the body is not valid, or `to_chat` or `count_chat` refuses it.
    """
    body = preparation.decode(data, arrival, CountTokensRequest, UNSUPPORTED)
    with renamed(FIELD_NAMES):
        chat = _to_chat(preparation, body)
        count = _with_any_template(chat, lambda one: count_chat(preparation, one, arrival))
    return msgspec.json.encode(TokenCount(count))


FUNCTIONS = (prepare_messages, prepare_token_count)


def _with_any_template(
    chat: ChatCompletionRequest, prepare: Callable[[ChatCompletionRequest], T]
) -> T:
    """What `prepare` returns.

    Clients send system messages within a conversation, and many templates refuse those that are
    not the first message.
    """
    try:
        return prepare(chat)
    except InvalidRequestError:
        messages = with_one_system_message(chat.messages)
        if messages == chat.messages:
            raise
        return prepare(msgspec.structs.replace(chat, messages=messages))


def _to_chat(preparation: Preparation, body: CountTokensRequest) -> ChatCompletionRequest:
    """The equivalent chat request for the served model."""
    chat = to_chat(body)
    check_fields(chat)
    if chat.thinking_token_budget is None or reasons(preparation, chat):
        return chat
    # A model that does not reason stays within every budget.
    return msgspec.structs.replace(chat, thinking_token_budget=None)
