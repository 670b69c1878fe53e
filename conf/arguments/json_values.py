"""Reads values of arguments that are JSON, or are objects already."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

__all__ = ("json_object", "json_value")


def json_value(value: object) -> object:
    """The value that a text of JSON stands for; any other value unchanged.

    Raises:
        ValueError: the text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("it must be JSON") from None


def json_object(value: object, form: str) -> dict[str, object]:
    """A copy of an object, which is given as such or as a text of JSON.

    Args:
        value: the argument's value.
        form: what the value must be, for the error.

    Raises:
        ValueError: it is no object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise ValueError(form)  # noqa: TRY004 - the caller reports a ValueError
    return dict(cast(Mapping[str, object], value))
