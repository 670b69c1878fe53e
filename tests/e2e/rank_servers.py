"""Servers whose engine has several ranks: their ranks, and a stream that is disturbed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.e2e.server_process import HTTP, ServerProcess

__all__ = ("ranks_of", "text_of")

_BODY = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


def ranks_of(server: ServerProcess) -> list[dict[str, Any]]:
    return [one["plan"] for one in HTTP.get(f"{server.url}/debug/state").json()["ranks"]]


def text_of(server: ServerProcess, on_token: Callable[[], object] = lambda: None) -> str:
    """The text of a stream; `on_token` is called when its first event arrives."""
    text = ""
    with HTTP.stream(
        "POST", f"{server.url}/v1/completions", json={**_BODY, "stream": True}
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                if not text:
                    on_token()
                text += json.loads(line[6:])["choices"][0]["text"]
    return text
