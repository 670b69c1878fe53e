"""Requests that the tests of structured output send."""

from __future__ import annotations

from typing import Any

from tests.e2e.server_process import HTTP, ServerProcess

__all__ = ("HI", "complete", "refused")

HI = [{"role": "user", "content": "Tell me about a cat."}]


def complete(server: ServerProcess, **fields: object) -> dict[str, Any]:
    """Send a completion request that must succeed; returns its first choice."""
    body = {"prompt": "A cat: ", "max_tokens": 80, "temperature": 1, "seed": 1, **fields}
    response = HTTP.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def refused(server: ServerProcess, path: str = "/v1/completions", **fields: object) -> dict:
    """Send a request that must be refused with status 400; returns the error object."""
    body = {"prompt": "A cat: "} if path == "/v1/completions" else {"messages": HI}
    response = HTTP.post(f"{server.url}{path}", json=body | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]
