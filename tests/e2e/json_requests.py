"""Sends JSON to a real server, and returns the reply, the error object or a stream's events."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.server_process import HTTP, ServerProcess

__all__ = (
    "CHAT",
    "COMPLETIONS",
    "GREEDY",
    "HI",
    "MODEL",
    "complete",
    "events",
    "post",
    "refused",
    "tokens_of",
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "ostinato-demo"  # the model of the shared server
HI: Any = [{"role": "user", "content": "What is a list?"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def post(server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
    """The JSON of a reply with status 200."""
    response = HTTP.post(server.url + path, json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
    """The error object of a reply with status 400."""
    response = HTTP.post(server.url + path, json=body, timeout=300)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def events(server: ServerProcess, path: str, **body: object) -> list[dict[str, Any]]:
    """The chunks of a whole stream, without its last line `[DONE]`."""
    with HTTP.stream(
        "POST", server.url + path, json={**body, "stream": True}, timeout=300
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def complete(server: ServerProcess, prompt: object = "Once upon", **fields: object) -> dict:
    """The only choice of a completion with its token ids; greedy unless `fields` say otherwise."""
    body = {"prompt": prompt, **GREEDY, "return_token_ids": True, **fields}
    (choice,) = post(server, COMPLETIONS, **body)["choices"]
    return choice


def tokens_of(server: ServerProcess, text: str, **fields: object) -> list[int]:
    """The token ids of a text."""
    return post(server, "/tokenize", prompt=text, **fields)["tokens"]
