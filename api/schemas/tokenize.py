"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from ostinato.api.schemas.conversation import Message, Tool
from ostinato.api.schemas.media_parts import MediaSettings

__all__ = (
    "DetokenizeRequest",
    "DetokenizeResponse",
    "TokenizeRequest",
    "TokenizeResponse",
)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: either `prompt` or `messages`."""

    has_template_fields: ClassVar[bool] = True  # the chat template gets unknown keys
    takes_all_media: ClassVar[bool] = True

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # absent = true for a prompt, false for messages
    add_generation_prompt: bool | None = None  # absent = not continue_final_message
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    media_io_kwargs: MediaSettings | None = None  # as in chat completions
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
