"""Streams of a server: what they say, and that they say the same if its engine is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.e2e.server_process import ServerProcess
from tests.waiting import PATIENCE_S, repeat_if_late

__all__ = ("ZOO", "Streams", "body", "run_streams")

_TEXTS = ("Once upon a time", "A block table is", "The scheduler", "Count to ten: one,", "Hello")
# The schema of an answer.
ZOO = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def body(number: int) -> dict[str, Any]:
    """The body of a request; `number` selects its kind. Equal bodies get equal answers."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "seed": number},
        {"temperature": 0.9, "seed": number, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.5, "seed": number, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.0, "seed": number, "n": 2},
        {"temperature": 1.1, "seed": number, "min_tokens": 100, "stop": ["e"]},
        {"temperature": 0, "logprobs": 1, "frequency_penalty": 0.8},
    ]
    chosen = options[number % len(options)]
    return {
        "prompt": f"{_TEXTS[number % len(_TEXTS)]} {number}",
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **chosen,
    }


def what_was_said(lines: list[str]) -> list[Any]:
    """A stream's `[(prompt tokens, completion tokens), choices of completion 0, of 1, ...]`.

    The choices are those of the chunks, in order. Ids, times and the count of cached
    tokens are left out, because they differ between two runs.
    """
    assert lines[-1] == "data: [DONE]", lines[-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not any("error" in event for event in events), events[-1]
    for event in events:
        for choice in event["choices"]:
            for call in choice.get("delta", {}).get("tool_calls", ()):
                call.pop("id", None)  # each answer has new ids
    usage = events[-1]["usage"]
    told: list[Any] = [(usage["prompt_tokens"], usage["completion_tokens"])]
    # Chunks of several completions arrive in any order.
    for index in range(max(c["index"] for e in events for c in e["choices"]) + 1):
        told.append([c for e in events for c in e["choices"] if c["index"] == index])
    return told


class Streams:
    """Runs all streams at once, and keeps the lines of each.

    Args:
        url: the address of the server.
        requests: path and body of each stream.
        on_line: is called after each line with the number of lines so far. No line is read
            meanwhile.
    """

    def __init__(
        self,
        url: str,
        requests: list[tuple[str, dict[str, Any]]],
        on_line: Callable[[int], None] | None = None,
    ) -> None:
        self._url = url
        self._requests = requests
        self._on_line = on_line
        self.lines: list[list[str]] = [[] for _ in requests]

    @property
    def num_lines(self) -> int:
        return sum(map(len, self.lines))

    async def run(self) -> list[list[Any]]:
        limits = httpx.Limits(max_connections=len(self.lines))
        async with httpx.AsyncClient(
            base_url=self._url, timeout=PATIENCE_S, limits=limits
        ) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(len(self.lines))))
        return [what_was_said(lines) for lines in self.lines]

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        path, request = self._requests[number]
        async with client.stream("POST", path, json=request) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line:
                    self.lines[number].append(line)
                    if self._on_line is not None:
                        self._on_line(self.num_lines)


def run_streams(
    server: ServerProcess, requests: list[tuple[str, dict[str, Any]]], kill_at: int | None = None
) -> list[list[Any]]:
    """What all streams said.

    Args:
        server: the server.
        requests: path and body of each stream.
        kill_at: the engine is killed when so many lines have come; None = it is not killed.
    """

    def attempt() -> list[list[Any]] | None:
        is_done = kill_at is None

        def on_line(num_lines: int) -> None:
            nonlocal is_done
            if num_lines == kill_at:
                is_done = server.kill_busy_engine()

        said = asyncio.run(Streams(server.url, requests, on_line).run())
        return said if is_done else None

    return repeat_if_late(attempt)
