"""Types of fields that clients send by default, and that do not change this server's answers.

The exception is `verbosity`, which a chat template can use. The fields are checked as OpenAI checks
them, and returned where OpenAI returns them. Fields about prompt caching have no effect, because
`cache.enable_prefix_caching` decides for all requests. docs/parameters.md lists the fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = (
    "CacheControl",
    "Metadata",
    "PromptCacheBreakpoint",
    "PromptCacheOptions",
    "PromptCacheRetention",
    "SafetyIdentifier",
    "ServedTier",
    "ServiceTier",
    "Verbosity",
    "tier_of",
)

_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]

Metadata = Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)]
"""Labels that the caller gives to a request."""

SafetyIdentifier = Annotated[str, msgspec.Meta(max_length=128)]
"""A label that the caller gives to an end user."""

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
"""Requested class of service. This server has only the class `default`."""

ServedTier = Literal["default"]

Verbosity = Literal["low", "medium", "high"]
"""Requested length of an answer; a variable of the chat template, if the template has it."""

PromptCacheRetention = Literal["in_memory", "in-memory", "24h"]
"""How long OpenAI keeps a cached prompt. This server caches a block until its memory is needed."""


class PromptCacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How OpenAI caches prompts. Here it has no effect."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class PromptCacheBreakpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks OpenAI to cache the prompt up to here. Here it has no effect."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks Anthropic to cache the prompt up to here. Here it has no effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def tier_of(wanted: ServiceTier | None) -> ServedTier | msgspec.UnsetType:
    """The tier that an answer shows. UNSET if the request does not have the field."""
    return msgspec.UNSET if wanted is None else "default"
