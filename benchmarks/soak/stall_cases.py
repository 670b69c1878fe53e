"""The requests that `soak.stalls` measures: requests of the largest allowed size, and attacks.

Cases that measure the writing of an answer end within a few seconds. Other cases can take longer.

A case is one or several HTTP requests as bytes, each sent on a new connection, one after the other.
`generation_cases` are for a model that generates, `pooling_cases` for an embedding model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ("StallCase", "generation_cases", "pooling_cases")

_MB = 1_000_000
_PROSE = "A melody that is learned once can be repeated under everything that is played over it. "
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"


@dataclass(frozen=True, slots=True)
class StallCase:
    """The requests of one hostile client, or of several equal ones.

    Attributes:
        name: the name in the table.
        requests: makes the case's requests. They are large, so they are made when they are
            needed.
        num_at_once: clients that send the same requests at the same time.
        group: the kind of attack; set by `generation_cases`.
    """

    name: str
    requests: Callable[[], Iterator[bytes]]
    num_at_once: int = 1
    group: str = ""


def _post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _one(name: str, path: str, make: Callable[[], dict[str, Any] | bytes]) -> StallCase:
    def requests() -> Iterator[bytes]:
        body = make()
        yield _post(path, body if isinstance(body, bytes) else json.dumps(body).encode())

    return StallCase(name, requests)


def _prompt(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 4, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}


def _tool(index: int, description: str = "d") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    function = {"name": f"f{index}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def generation_cases(max_model_len: int) -> list[StallCase]:
    """The cases for a model that generates.

    Args:
        max_model_len: context length of the server; accepted prompts have nearly as many tokens.
    """
    groups = {
        "long texts": _long_texts(),
        "many parts": _many_parts(),
        "odd values": _odd_values(),
        "large constraints": _constraints(),
        "many sequences": [*_many_sequences(max_model_len), *_many_masks()],
        "large answers": _large_answers(max_model_len),
        "large HTTP": _connections(),
    }
    return [replace(case, group=name) for name, cases in groups.items() for case in cases]


def _long_texts() -> list[StallCase]:
    long = "a" * (7 * _MB)
    prose = _PROSE * (7 * _MB // len(_PROSE))
    truncated = {"truncate_prompt_tokens": 100}
    template = "{{ messages[0]['content'] }}\n" * (5 * _MB // 30)
    body = json.dumps(_prompt(prompt=prose)).encode()
    return [
        _one("prompt of 7 MB", _COMPLETIONS, lambda: _prompt(prompt=long)),
        _one("prompt of 7 MB of prose", _COMPLETIONS, lambda: _prompt(prompt=prose)),
        _one("7 MB, truncated to 100", _COMPLETIONS, lambda: _prompt(prompt=long, **truncated)),
        _one("7 MB of prose, truncated", _COMPLETIONS, lambda: _prompt(prompt=prose, **truncated)),
        StallCase("8 clients with 7 MB at once", lambda: iter([_post(_COMPLETIONS, body)]), 8),
        _one("/tokenize 7 MB", "/tokenize", lambda: {"prompt": long}),
        _one("/tokenize 2 MB of prose", "/tokenize", lambda: {"prompt": prose[: 2 * _MB]}),
        _one("/tokenize of 200 kB", "/tokenize", lambda: {"prompt": prose[:200_000]}),
        _one(
            "chat message of 7 MB",
            _CHAT,
            lambda: _chat(messages=[{"role": "user", "content": long}]),
        ),
        _one("count_tokens of 7 MB", f"{_MESSAGES}/count_tokens", lambda: _anthropic([long])),
        _one("chat_template of 5 MB", _CHAT, lambda: _chat(chat_template=template)),
        _one(
            "chat_template with 7 MB of variables",
            _CHAT,
            lambda: _chat(
                chat_template="{{ a | length }}", chat_template_kwargs={"a": ["b"] * 1_000_000}
            ),
        ),
        _one("user of 7 MB", _COMPLETIONS, lambda: _prompt(user=long)),
        _one("a stop string of 7 MB", _COMPLETIONS, lambda: _prompt(stop=[long])),
        _one("bad_words of 7 MB", _COMPLETIONS, lambda: _prompt(bad_words=[prose[:27_000]] * 256)),
        _one(
            "bad_words, all short",
            _COMPLETIONS,
            lambda: _prompt(bad_words=[f"word number {index}" for index in range(256)]),
        ),
    ]


def _anthropic(texts: list[str], **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"messages": messages, **fields}


def _many_parts() -> list[StallCase]:
    many = 100_000
    messages = [{"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(many)]
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    calls = [{"role": "assistant", "tool_calls": [call] * 50_000}, messages[0]]
    return [
        _one("100,000 chat messages", _CHAT, lambda: _chat(messages=messages)),
        _one("100,000 response items", _RESPONSES, lambda: {"input": messages}),
        _one(
            "100,000 Anthropic messages", _MESSAGES, lambda: _anthropic(["x"] * many, max_tokens=4)
        ),
        _one(
            "100,000 text parts",
            _CHAT,
            lambda: _chat(
                messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * many}]
            ),
        ),
        _one("50,000 tool calls in a message", _CHAT, lambda: _chat(messages=calls)),
        _one("2,000 tools", _CHAT, lambda: _chat(tools=[_tool(index) for index in range(2000)])),
        _one(
            "2,000 tools that are not used",
            _RESPONSES,
            lambda: {
                "input": "Hi",
                "max_output_tokens": 4,
                "tool_choice": "none",
                "tools": [
                    {"type": "function", "name": f"f{index}", "description": "d" * 3000}
                    for index in range(2000)
                ],
            },
        ),
        _one("100,000 prompts", _COMPLETIONS, lambda: _prompt(prompt=["x"] * many)),
        _one("2,048 prompts", _COMPLETIONS, lambda: _prompt(prompt=["Hi"] * 2048, max_tokens=1)),
        _one(
            "2,048 prompts of 3 kB",
            _COMPLETIONS,
            lambda: _prompt(prompt=[(_PROSE * 40)[:3000]] * 2048, max_tokens=1),
        ),
        _one("2,000,000 token ids", _COMPLETIONS, lambda: _prompt(prompt=[7] * (2 * _MB))),
        _one(
            "2,000,000 token ids, truncated",
            _COMPLETIONS,
            lambda: _prompt(prompt=[7] * (2 * _MB), truncate_prompt_tokens=100),
        ),
        _one("/detokenize 2,000,000 ids", "/detokenize", lambda: {"tokens": [700] * (2 * _MB)}),
        _one("/detokenize 1,500,000 ids", "/detokenize", lambda: {"tokens": [700] * 1_500_000}),
        _one("100,000 stop strings", _COMPLETIONS, lambda: _prompt(stop=["x"] * many)),
        _one("2,000,000 stop tokens", _COMPLETIONS, lambda: _prompt(stop_token_ids=[7] * 2 * _MB)),
        _one(
            "2,000,000 allowed tokens",
            _COMPLETIONS,
            lambda: _prompt(allowed_token_ids=[700, 701] * _MB),
        ),
        _one(
            "logit_bias of 500,000",
            _COMPLETIONS,
            lambda: _prompt(logit_bias={str(index): 1 for index in range(500_000)}),
        ),
        _one(
            "logit_bias of 1,024, n=128",
            _COMPLETIONS,
            lambda: _prompt(logit_bias={str(index): 1 for index in range(1024)}, n=128),
        ),
        _one("100,000 documents", _CHAT, lambda: _chat(documents=[{"text": "x"}] * many)),
        _one(
            "metadata of 100,000",
            _RESPONSES,
            lambda: {"input": "Hi", "metadata": {f"k{index}": "v" for index in range(many)}},
        ),
    ]


def _odd_values() -> list[StallCase]:
    arguments = json.dumps({"a": "x" * (3 * _MB)})
    function = {"name": "f", "arguments": arguments}
    call = {"type": "function", "id": "1", "function": function}
    spoken = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "Hi"}]
    deep = b'{"prompt": "Hi", "max_tokens": 4, "nonsense": %s}'
    return [
        _one("nested JSON of 4 MB", _COMPLETIONS, lambda: b'{"prompt": ' + b"[" * (4 * _MB)),
        _one(
            "an unknown field of 6 MB",
            _COMPLETIONS,
            lambda: deep % (b"[" + b"[]," * (2 * _MB) + b"1]"),
        ),
        _one("2,000,000 empty lists", _COMPLETIONS, lambda: _prompt(prompt=[[]] * (2 * _MB))),
        _one(
            "a seed of 2 MB",
            _COMPLETIONS,
            lambda: b'{"prompt": "Hi", "seed": ' + b"1" * (2 * _MB) + b"}",
        ),
        _one("a call's arguments of 3 MB", _CHAT, lambda: _chat(messages=spoken)),
        _one("7 MB that are not JSON", _COMPLETIONS, lambda: b'{"prompt": "' + b"a" * (7 * _MB)),
    ]


def _constraints() -> list[StallCase]:
    def constrained(**fields: Any) -> dict[str, Any]:
        return _prompt(structured_outputs=fields)

    wide = {"properties": {f"property_{index}": {"type": "string"} for index in range(20_000)}}
    forks = [[{"$ref": f"#/$defs/{n + 1}"}, {"minLength": n}] for n in range(7)]
    rules = {n: {"allOf": [{"anyOf": fork}] * 2} for n, fork in enumerate(forks)}
    fans = {"$ref": "#/$defs/0", "$defs": {**rules, 7: {}}}
    return [
        _one(
            "choice of 4,000 texts",
            _COMPLETIONS,
            lambda: constrained(choice=[f"choice number {index}" for index in range(4000)]),
        ),
        _one(
            "choice of 100,000 texts",
            _COMPLETIONS,
            lambda: constrained(choice=[f"choice number {index}" for index in range(100_000)]),
        ),
        _one("a schema of 1 MB", _COMPLETIONS, lambda: constrained(json=wide)),
        _one("references that fan out", _COMPLETIONS, lambda: constrained(json=fans)),
        _one("a regex of 400 kB", _COMPLETIONS, lambda: constrained(regex="(a|b)?" * 66_000)),
        _one("a regex that explodes", _COMPLETIONS, lambda: constrained(regex="(.*a){1,200}" * 4)),
        _one(
            "a choice of 300 kB, n=128",
            _COMPLETIONS,
            lambda: {**constrained(choice=["c" * 150 + str(i) for i in range(1900)]), "n": 128},
        ),
    ]


def _long_prompt(max_model_len: int) -> list[int]:
    return [300 + index * 7 % 2000 for index in range(max_model_len - 8)]


def _many(**fields: Any) -> dict[str, Any]:
    return _prompt(**{"n": 128, "max_tokens": 32, "ignore_eos": True, **fields})


def _many_sequences(max_model_len: int) -> list[StallCase]:
    """Requests with the largest allowed number of sequences, and the costliest options."""
    words = [f"{_PROSE[index : index + 30]} {index}" for index in range(256)]
    chosen = list(range(300, 428))
    held = [*(first + "a" * 4095 for first in "bcdefghijklmnop"), "a" * 4095 + "b"]
    ids = _long_prompt(max_model_len)
    return [
        _one("n=128 with log-probabilities", _COMPLETIONS, lambda: _many(logprobs=20)),
        _one(
            "n=128 with log-probabilities, streamed",
            _COMPLETIONS,
            lambda: _many(logprobs=20, stream=True),
        ),
        _one(
            "chat, n=128 with log-probabilities",
            _CHAT,
            lambda: _chat(n=128, max_tokens=32, logprobs=True, top_logprobs=20, ignore_eos=True),
        ),
        _one(
            "chat, n=128 with log-probabilities, streamed",
            _CHAT,
            lambda: _chat(
                n=128, max_tokens=32, logprobs=True, top_logprobs=20, ignore_eos=True, stream=True
            ),
        ),
        _one(
            "n=128 with 128 chosen log-probabilities",
            _COMPLETIONS,
            lambda: _many(logprobs=1, logprob_token_ids=chosen),
        ),
        _one(
            "n=128 with log-probabilities of a long prompt",
            _COMPLETIONS,
            lambda: _many(prompt=ids, max_tokens=1, prompt_logprobs=20),
        ),
        _one("128 candidates", _COMPLETIONS, lambda: _many(n=1, best_of=128, max_tokens=64)),
        _one(
            "128 beams with log-probabilities",
            _COMPLETIONS,
            lambda: _many(use_beam_search=True, best_of=128, max_tokens=16, logprobs=20),
        ),
        _one(
            "2,048 prompts of 16 tokens",
            _COMPLETIONS,
            lambda: _prompt(prompt=["Hi"] * 2048, max_tokens=16, ignore_eos=True),
        ),
        _one(
            "n=128 with 16 stop strings of 4,096 characters",
            _COMPLETIONS,
            # After each token, the text is the beginning of the last stop string and of no other.
            lambda: _many(stop=held, structured_outputs={"regex": "a{4000}"}, max_tokens=480),
        ),
        _one("n=128 with 256 bad words", _COMPLETIONS, lambda: _many(bad_words=words)),
        _one(
            "n=128 with all penalties",
            _COMPLETIONS,
            lambda: _many(presence_penalty=1, frequency_penalty=1, repetition_penalty=1.5),
        ),
        _one(
            "n=128 with repetition_detection",
            _COMPLETIONS,
            lambda: _many(
                allowed_token_ids=chosen[:2],
                repetition_detection={"max_pattern_size": 512, "min_count": 1 << 30},
            ),
        ),
    ]


def _many_masks() -> list[StallCase]:
    """Sequences with grammars whose masks take long to compute."""
    once = '"once " ' * 60
    return [
        _one(
            "n=128 with a regular expression",
            _COMPLETIONS,
            lambda: _many(structured_outputs={"regex": "([a-z]{1,40}[ ,.]){1,400}"}),
        ),
        _one(
            "n=128 with masks of 5 ms",
            _COMPLETIONS,
            lambda: _many(structured_outputs={"grammar": _words_of_60_kinds()}),
        ),
        _one(
            "n=128 with an ambiguous grammar",
            _COMPLETIONS,
            lambda: _many(structured_outputs={"grammar": 'start: s\ns: s s | /[a-z]/ | " "'}),
        ),
        _one(
            "n=32 with an ambiguous grammar behind 60 words",
            _COMPLETIONS,
            lambda: _many(
                n=32,
                max_tokens=400,
                structured_outputs={"grammar": f'start: {once} s\ns: s s | /[a-z]/ | " "'},
            ),
        ),
    ]


def _words_of_60_kinds() -> str:
    """A grammar whose next token can belong to any of 60 rules."""
    names = [f"y{index}" for index in range(60)]
    rules = [f"{name}: /[a-z ]{{1,{index}}}/" for index, name in enumerate(names, 2)]
    return "\n".join(["start: x", "x: " + " | ".join(f"{name} x?" for name in names), *rules])


def _large_answers(max_model_len: int) -> list[StallCase]:
    words = _PROSE.split()
    ids = _long_prompt(max_model_len)

    def stored() -> Iterator[bytes]:
        thoughts = [{"type": "reasoning_text", "text": " ".join(words) * 70_000}]
        items = [
            {"type": "reasoning", "summary": [], "content": thoughts},
            {"role": "user", "content": "Hi"},
        ]
        yield _post(_RESPONSES, json.dumps({"input": items, "max_output_tokens": 4}).encode())

    return [
        _one(
            "log-probabilities of a long prompt",
            _COMPLETIONS,
            lambda: _prompt(prompt=ids, max_tokens=1, prompt_logprobs=20),
        ),
        _one(
            "echo and log-probabilities",
            _COMPLETIONS,
            lambda: _prompt(prompt=ids, max_tokens=0, echo=True, logprobs=20),
        ),
        StallCase("reasoning of 6 MB that is stored", stored),
    ]


def _connections() -> list[StallCase]:
    def one(data: bytes) -> Callable[[], Iterator[bytes]]:
        return lambda: iter([data])

    body = json.dumps(_prompt(user="u" * 200_000)).encode()
    chunked = (
        f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    ).encode() + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    get = b"GET /health HTTP/1.1\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    return [
        StallCase("a header of 40 MB", one(b"GET /health HTTP/1.1\r\nX: " + b"f" * (40 * _MB))),
        StallCase(
            "20,000 headers", one(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n")
        ),
        StallCase("20,000 pipelined requests", one(get * 20_000 + last)),
        StallCase("a body of one-byte chunks", one(chunked + b"0\r\n\r\n")),
    ]


def pooling_cases() -> list[StallCase]:
    """The cases for an embedding model."""
    long = "a " * (7 * _MB // 2)
    embed, rerank, score = "/v1/embeddings", "/v1/rerank", "/v1/score"
    return [
        _one("an input of 7 MB", embed, lambda: {"input": long}),
        _one(
            "an input of 7 MB, truncated",
            embed,
            lambda: {"input": long, "truncate_prompt_tokens": -1},
        ),
        _one("100,000 inputs", embed, lambda: {"input": ["x"] * 100_000}),
        _one("2,048 inputs", embed, lambda: {"input": [f"text {index}" for index in range(2048)]}),
        _one("100,000 documents", rerank, lambda: {"query": "x", "documents": ["y"] * 100_000}),
        _one(
            "1,000 documents of 7 kB",
            rerank,
            lambda: {"query": "x", "documents": [long[:7000]] * 1000, "truncate_prompt_tokens": -1},
        ),
        _one("10,000 pairs", rerank, lambda: {"query": long[:600], "documents": ["y"] * 10_000}),
        _one("100,000 pairs", score, lambda: {"text_1": "x", "text_2": ["y"] * 100_000}),
        _one("/tokenize 7 MB", "/tokenize", lambda: {"prompt": long}),
    ]
