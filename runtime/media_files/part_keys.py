"""Checks the keys of the parts with media that a Python program gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.runtime.errors import InvalidRequestError

__all__ = ("check_keys",)


def check_keys(fields: Mapping[str, Any], known: set[str], place: str) -> None:
    """Refuse a part with a key that is not supported.

    Args:
        fields: the part.
        known: the supported keys.
        place: the name of the part in errors.

    Raises:
        InvalidRequestError: there is another key.
    """
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise InvalidRequestError(
            f"{place} has the key {unknown[0]!r:.60}, which is not supported; keys:"
            f" {', '.join(sorted(known))}",
            param=place,
            code="unknown_parameter",
        )
