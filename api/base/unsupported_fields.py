"""Request fields of the OpenAI API and its usual extensions that this server does not support.

A request with such a field gets a 400 that names the field, unless the value has no effect. Null
never has an effect. When a field becomes supported, it moves from here to `api/schemas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = (
    "UNSUPPORTED",
    "UNSUPPORTED_IN_MESSAGES",
    "UNSUPPORTED_WITHIN",
    "Unsupported",
    "is_no_op",
)


class Unsupported(NamedTuple):
    """One field."""

    missing_feature: str  # the feature that this server lacks, for the error message
    no_op_values: tuple[Any, ...] = ()  # values without an effect
    instead: str = ""  # a supported field that does the same


_TOOLS = "the older form of tool calls"
_MEDIA = "input other than text, images, videos and audio"
_TRANSFER = "transfer of caches between servers"

UNSUPPORTED: Mapping[str, Unsupported] = {
    "audio": Unsupported("speech as output"),
    "ec_transfer_params": Unsupported(_TRANSFER),
    "function_call": Unsupported(
        _TOOLS, ("none",), instead="tool_choice (in a message: tool_calls)"
    ),
    "functions": Unsupported(_TOOLS, ([],), instead="tools"),
    "guided_decoding_backend": Unsupported("a choice of grammar libraries", ("auto",)),
    "kv_transfer_params": Unsupported(_TRANSFER),
    "file_id": Unsupported("uploaded files", instead="image_url"),
    "mm_processor_kwargs": Unsupported(
        "settings of processors per request",
        ({},),
        instead="detail in the part of an image, or media_io_kwargs for videos",
    ),
    "modalities": Unsupported("output other than text", (["text"],)),
    "moderation": Unsupported("moderation models"),
    "prompt_embeds": Unsupported(_MEDIA),
    "return_mm_kwargs": Unsupported(_MEDIA, (False,)),
    "routed_experts_prompt_start": Unsupported("reports of routed experts"),
    "session_id": Unsupported("sessions"),
    "spaces_between_special_tokens": Unsupported(
        "text without spaces between special tokens", (True,)
    ),
    "suffix": Unsupported("models that fill in the middle", ("",)),
    "vllm_xargs": Unsupported("custom logits processors"),
    "web_search_options": Unsupported("web search"),
}

# Keys of messages. All other unknown keys are passed to the chat template.
UNSUPPORTED_IN_MESSAGES: Mapping[str, Unsupported] = {
    name: UNSUPPORTED[name] for name in ("audio", "function_call")
}

# Keys of other objects in a body: the path of the object -> its keys. A key here comes before the
# field of the same name of the body.
UNSUPPORTED_WITHIN: Mapping[str, Mapping[str, Unsupported]] = {
    "media_io_kwargs": {"audio": Unsupported("settings for reading audio")},
}


def is_no_op(
    name: str, value: object, unsupported: Mapping[str, Unsupported] = UNSUPPORTED
) -> bool:
    """Whether the field is known and unsupported, and `value` has no effect."""
    if name not in unsupported:
        return False
    # The types are compared too, because true equals 1 in Python.
    no_op_values = unsupported[name].no_op_values
    return value is None or any(type(value) is type(one) and value == one for one in no_op_values)
