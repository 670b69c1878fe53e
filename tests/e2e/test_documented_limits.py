"""Each documented limit of a request's fields: the last accepted value, and a value beyond it.

Limits that other tests cover in the same way:

| document | limits | test |
|---|---|---|
| structured-output.md | texts of `choice`, size, optional properties | e2e/test_structured_output_limits.py |
| structured-output.md | numbers, bounds, counts, alternatives, parts | runtime/grammar/test_json_schemas.py |
| limits.md | `server.max_header_kib`, `header_timeout_s`, `body_timeout_s` | e2e/test_slow_and_large_senders.py |
| limits.md | `max_prompt_tokens`, queues, requests of a key | api/service/test_admission.py |
| reliability.md | `max_restarts` | runtime/replicas/test_restarts.py |
| dialects.md | replies in the background | api/responses/test_responses.py |
| dialects.md | `limit` of lists | e2e/test_custom_tools.py |
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.server_process import HTTP, ServerProcess

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MOST = 2**31 - 1


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}


def answered(**fields: Any) -> dict[str, Any]:
    return {"input": "Hi", "max_output_tokens": 1, **fields}


def role(name: str) -> dict[str, Any]:
    return chat(messages=[{"role": name, "content": "a"}, {"role": "user", "content": "Hi"}])


def tool(name: str) -> dict[str, Any]:
    return chat(tools=[{"type": "function", "function": {"name": name, "parameters": {}}}])


def bad_word(num_tokens: int) -> str:
    """A word that has `num_tokens` tokens after a space: one for the space, one a character."""
    return ("!?" * num_tokens)[: num_tokens - 1]


def plain(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "max_tokens": 1, **fields}


def beams(**fields: Any) -> dict[str, Any]:
    return plain(use_beam_search=True, best_of=2, temperature=0, **fields)


def pattern(size: int) -> dict[str, Any]:
    return plain(repetition_detection={"max_pattern_size": size, "min_count": 2})


# (path, body at the limit, body beyond it, the field that the error names)
PARAMETERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "n": (COMPLETIONS, plain(n=128), plain(n=129), "n"),
    "best_of": (COMPLETIONS, plain(best_of=128), plain(best_of=129), "best_of"),
    "temperature": (COMPLETIONS, plain(temperature=2), plain(temperature=2.001), "temperature"),
    "top_p": (COMPLETIONS, plain(top_p=1), plain(top_p=1.001), "top_p"),
    "min_p": (COMPLETIONS, plain(min_p=1), plain(min_p=1.001), "min_p"),
    "top_k": (COMPLETIONS, plain(top_k=MOST), plain(top_k=MOST + 1), "top_k"),
    "repetition_penalty": (
        COMPLETIONS,
        plain(repetition_penalty=10),
        plain(repetition_penalty=10.01),
        "repetition_penalty",
    ),
    "presence_penalty": (
        CHAT,
        chat(presence_penalty=-2),
        chat(presence_penalty=-2.01),
        "presence_penalty",
    ),
    "frequency_penalty": (
        CHAT,
        chat(frequency_penalty=2),
        chat(frequency_penalty=2.01),
        "frequency_penalty",
    ),
    "length_penalty": (
        COMPLETIONS,
        beams(length_penalty=-10),
        beams(length_penalty=10.1),
        "length_penalty",
    ),
    "logit_bias": (
        COMPLETIONS,
        plain(logit_bias={"7": -100}),
        plain(logit_bias={"7": -100.1}),
        "logit_bias",
    ),
    "tokens of logit_bias": (
        COMPLETIONS,
        plain(logit_bias={str(index): 1 for index in range(1024)}),
        plain(logit_bias={str(index): 1 for index in range(1025)}),
        "logit_bias",
    ),
    "stop_token_ids": (
        COMPLETIONS,
        plain(stop_token_ids=list(range(1024))),
        plain(stop_token_ids=list(range(1025))),
        "stop_token_ids",
    ),
    "bad_words": (
        COMPLETIONS,
        plain(bad_words=["no"] * 256),
        plain(bad_words=["no"] * 257),
        "bad_words",
    ),
    "tokens of bad_words": (
        COMPLETIONS,
        plain(bad_words=[bad_word(32)]),
        plain(bad_words=[bad_word(33)]),
        "bad_words",
    ),
    "stop": (
        COMPLETIONS,
        plain(stop=[f"stop {index}" for index in range(16)]),
        plain(stop=[f"stop {index}" for index in range(17)]),
        "stop",
    ),
    "characters of stop": (
        COMPLETIONS,
        plain(stop=["s" * 4096]),
        plain(stop=["s" * 4097]),
        "stop",
    ),
    "repetition_detection": (COMPLETIONS, pattern(512), pattern(513), "repetition_detection"),
    "prompt_logprobs": (
        COMPLETIONS,
        plain(prompt_logprobs=20),
        plain(prompt_logprobs=21),
        "prompt_logprobs",
    ),
    "logprobs": (COMPLETIONS, plain(logprobs=20), plain(logprobs=21), "logprobs"),
    "top_logprobs": (
        CHAT,
        chat(logprobs=True, top_logprobs=20),
        chat(logprobs=True, top_logprobs=21),
        "top_logprobs",
    ),
    "top_logprobs of responses": (
        RESPONSES,
        answered(top_logprobs=20, include=["message.output_text.logprobs"]),
        answered(top_logprobs=21, include=["message.output_text.logprobs"]),
        "top_logprobs",
    ),
    "logprob_token_ids": (
        COMPLETIONS,
        plain(logprobs=0, logprob_token_ids=list(range(128))),
        plain(logprobs=0, logprob_token_ids=list(range(129))),
        "logprob_token_ids",
    ),
    "truncate_prompt_tokens": (
        COMPLETIONS,
        plain(truncate_prompt_tokens=MOST),
        plain(truncate_prompt_tokens=MOST + 1),
        "truncate_prompt_tokens",
    ),
    "prompts": (
        COMPLETIONS,
        plain(prompt=[[7]] * 2048, max_tokens=0, echo=True),
        plain(prompt=[[7]] * 2049, max_tokens=0, echo=True),
        "prompt",
    ),
    "metadata": (
        CHAT,
        chat(metadata={f"key {index}": "v" for index in range(16)}),
        chat(metadata={f"key {index}": "v" for index in range(17)}),
        "metadata",
    ),
    "texts of metadata": (
        RESPONSES,
        answered(metadata={"k": "v" * 512}),
        answered(metadata={"k": "v" * 513}),
        "metadata",
    ),
    "keys of metadata": (
        CHAT,
        chat(metadata={"k" * 64: "v"}),
        chat(metadata={"k" * 65: "v"}),
        "metadata",
    ),
    "safety_identifier": (
        CHAT,
        chat(safety_identifier="s" * 128),
        chat(safety_identifier="s" * 129),
        "safety_identifier",
    ),
    "roles": (CHAT, role("r" * 64), role("r" * 65), "messages"),
    "names of tools": (CHAT, tool("t" * 64), tool("t" * 65), "tools"),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_field(server: ServerProcess, name: str) -> None:
    path, at_limit, beyond, field = PARAMETERS[name]
    taken = HTTP.post(f"{server.url}{path}", json=at_limit)
    assert taken.status_code == 200, taken.text
    refused = HTTP.post(f"{server.url}{path}", json=beyond)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["param"] or error["message"]).startswith(field), error


@pytest.mark.parametrize(
    ("name", "at_limit", "beyond"),
    [
        ("X-Request-Id", "i" * 128, "i" * 129),
        ("X-Request-Timeout-Ms", "86400000", "86400001"),
        ("X-Request-Timeout-Ms", "1000", "0.9"),
        ("x-trace", "1", "2"),
    ],
)
def test_a_header(server: ServerProcess, name: str, at_limit: str, beyond: str) -> None:
    url = f"{server.url}{COMPLETIONS}"
    assert HTTP.post(url, json=plain(), headers={name: at_limit}).status_code == 200
    refused = HTTP.post(url, json=plain(), headers={name: beyond})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].lower() == name.lower()


def test_a_body(server: ServerProcess) -> None:
    """The shared server takes bodies of up to 4 MiB."""
    rest = (4 << 20) - len('{"prompt":"Hi","max_tokens":1,"user":""}')
    for more, status in ((0, 200), (1, 413)):
        body = b'{"prompt":"Hi","max_tokens":1,"user":"%s"}' % (b"u" * (rest + more))
        headers = {"Content-Type": "application/json"}
        answer = HTTP.post(f"{server.url}{COMPLETIONS}", content=body, headers=headers)
        assert answer.status_code == status
