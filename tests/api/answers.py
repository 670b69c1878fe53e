"""Reads answers of the API: error objects and events of a stream."""

from __future__ import annotations

import json
from typing import Any


def error_of(response) -> dict:
    assert response.headers["content-type"] == "application/json"
    (name, error), *others = response.json().items()
    assert (name, others) == ("error", [])
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


def events(text: str) -> list[Any]:
    """The data of each event; the last is usually "[DONE]"."""
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [json.loads(one) if one.startswith("{") else one for one in data]
