"""Request fields of the OpenAI API and its usual extensions that this server does not support.

A request with such a field is refused by name, unless the value asks for nothing. Null always asks
for nothing. A field that becomes supported moves from here to `schemas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ("UNSUPPORTED", "Unsupported", "is_no_op")


class Unsupported(NamedTuple):
    """One field."""

    missing_feature: str  # what this server lacks for the field, for the error message
    no_op_values: tuple[Any, ...] = ()  # values that ask for nothing
    instead: str = ""  # a supported field that does the same


_TOOLS = "the older form of tool calls (see tools)"
_GRAMMAR = "an older spelling"
_MEDIA = "input other than text"
_STORE = "stored replies"
_TRANSFER = "transfer of caches between servers"

UNSUPPORTED: Mapping[str, Unsupported] = {
    "annotations": Unsupported("citations in messages", ([],)),
    "audio": Unsupported(_MEDIA),
    "ec_transfer_params": Unsupported(_TRANSFER),
    "function_call": Unsupported(_TOOLS, ("none",)),
    "functions": Unsupported(_TOOLS, ([],)),
    "guided_choice": Unsupported(_GRAMMAR, instead="structured_outputs.choice"),
    "guided_decoding_backend": Unsupported("a choice of grammar libraries"),
    "guided_grammar": Unsupported(_GRAMMAR, instead="structured_outputs.grammar"),
    "guided_json": Unsupported(_GRAMMAR, instead="structured_outputs.json"),
    "guided_regex": Unsupported(_GRAMMAR, instead="structured_outputs.regex"),
    "guided_whitespace_pattern": Unsupported(
        _GRAMMAR, instead="structured_outputs.whitespace_pattern"
    ),
    "kv_transfer_params": Unsupported(_TRANSFER),
    "media_io_kwargs": Unsupported(_MEDIA),
    "metadata": Unsupported(_STORE, ({},)),
    "mm_processor_kwargs": Unsupported(_MEDIA),
    "modalities": Unsupported("output other than text", (["text"],)),
    "prediction": Unsupported("predicted outputs"),
    "prompt_cache_retention": Unsupported("cached prompts that are kept for a time"),
    "prompt_embeds": Unsupported(_MEDIA),
    "refusal": Unsupported("refusals apart from the text"),
    "return_mm_kwargs": Unsupported(_MEDIA, (False,)),
    "routed_experts_prompt_start": Unsupported("reports of routed experts"),
    "service_tier": Unsupported("tiers of service (see priority)", ("auto", "default")),
    "session_id": Unsupported("sessions"),
    "spaces_between_special_tokens": Unsupported("text without those spaces", (True,)),
    "store": Unsupported(_STORE, (False,)),
    "suffix": Unsupported("models that fill in the middle", ("",)),
    "verbosity": Unsupported("models with a setting of it"),
    "vllm_xargs": Unsupported("plugins for logits"),
    "web_search_options": Unsupported("web search"),
}


def is_no_op(
    name: str, value: object, unsupported: Mapping[str, Unsupported] = UNSUPPORTED
) -> bool:
    """Whether the field is known and unsupported, and `value` asks for nothing."""
    if name not in unsupported:
        return False
    # The types are compared too: true equals 1 in Python.
    no_op_values = unsupported[name].no_op_values
    return value is None or any(type(value) is type(one) and value == one for one in no_op_values)
