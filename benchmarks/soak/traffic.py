"""Generates the soak test's requests: random lengths and every option, from a seed.

Each client has its own random generator, so a client's n-th request is the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ("OPTIONS", "TEXT", "Exchange", "Traffic")

TEXT = (
    "A melody that is learned once can be repeated under everything that is played over it. The "
    "old gardener counts seven apples, three pears and one small green bird; then she asks: which "
    'of them can sing? "Wait," says the child, "I know it!" 12 + 30 = 42. Rivers run to the sea.'
)
_WORDS = tuple(dict.fromkeys(TEXT.split()))
_SHORT_OUTPUT = 48  # tokens; many short answers keep the batch changing
# long outputs have up to a third of the context; together they exceed the KV cache
_SHARE_OF_LONG_OUTPUTS = 0.2
_SHARE_OF_OPTION = 0.15
_SHARE_INVALID = 0.03
_SHARE_OF_HANG_UPS = 0.25
_SHARE_OF_COMPARED = 0.5  # of the requests that are neither streamed, invalid nor left
_MARGIN = 40  # tokens that a chat template and a tokenizer may add

Numbers = random.Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and what its client does with the answer."""

    path: str
    body: dict[str, Any]
    status: int  # the expected HTTP status
    num_choices: int
    chunks_read: int | None = None  # chunks after which the client disconnects; None = all
    patience_s: float | None = None  # seconds after which the client disconnects; None = never
    # The request is sent again without drafts, and both answers must be equal. It is not streamed
    # and has a seed.
    is_compared: bool = False

    @property
    def kind(self) -> str:
        """The endpoint and the options that make the request large, in words."""
        body = self.body
        words = [self.path.removeprefix("/v1/"), f"max_tokens={body.get('max_tokens')}"]
        if self.num_choices > 1:
            words.append(f"{self.num_choices} choices")
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            parts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
            words.append(f"{sum(map(len, parts))} prompt tokens")
        words += self.body.get("structured_outputs", {})
        words += (name for name in ("stream", "prompt_logprobs", "logprobs") if body.get(name))
        return " ".join(words)


def _some(numbers: Numbers, items: Sequence[Any], most: int) -> list[Any]:
    return [numbers.choice(items) for _ in range(numbers.randint(1, most))]


_CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"choice": ["seven apples", "three pears", "one small green bird"]},
    {"regex": "[a-z]{1,12}( [a-z]{1,12}){0,3}"},
    {"json": {"type": "object", "properties": {"count": {"type": "integer"}}}},
)

# Random values for every field that changes the choice of tokens, the end of the answer or the
# reported data. Each is a function of (random numbers, token ids of TEXT, max_tokens).
OPTIONS: dict[str, Callable[[Numbers, Sequence[int], int], Any]] = {
    "temperature": lambda r, ids, most: r.choice([0, 0.3, 0.8, 1.5, 2]),
    "top_p": lambda r, ids, most: r.choice([0.05, 0.5, 0.95]),
    "top_k": lambda r, ids, most: r.choice([-1, 1, 5, 40, 600]),
    "min_p": lambda r, ids, most: r.choice([0.02, 0.2, 0.9]),
    "seed": lambda r, ids, most: r.randrange(-(1 << 63), 1 << 63),
    "presence_penalty": lambda r, ids, most: r.uniform(-2, 2),
    "frequency_penalty": lambda r, ids, most: r.uniform(-2, 2),
    "repetition_penalty": lambda r, ids, most: r.uniform(0.5, 2),
    "logit_bias": lambda r, ids, most: {
        str(token_id): r.uniform(-100, 100) for token_id in _some(r, ids, 8)
    },
    # More ids than stop tokens, so that `min_tokens` leaves an allowed token.
    "allowed_token_ids": lambda r, ids, most: r.sample(sorted(set(ids)), r.randint(5, 40)),
    "bad_words": lambda r, ids, most: _some(r, _WORDS, 6),
    "min_tokens": lambda r, ids, most: r.randint(0, most),
    "stop": lambda r, ids, most: _some(r, _WORDS, 4),
    "stop_token_ids": lambda r, ids, most: _some(r, ids, 4),
    "include_stop_str_in_output": lambda r, ids, most: True,
    "ignore_eos": lambda r, ids, most: True,
    "skip_special_tokens": lambda r, ids, most: False,
    "truncate_prompt_tokens": lambda r, ids, most: r.choice([-1, 1, 7, 100]),
    "truncation_side": lambda r, ids, most: r.choice(["left", "right"]),
    "prompt_logprobs": lambda r, ids, most: r.choice([0, 3]),
    "repetition_detection": lambda r, ids, most: {
        "max_pattern_size": r.randint(1, 20),
        "min_count": r.randint(2, 4),
    },
    "logprob_token_ids": lambda r, ids, most: _some(r, ids, 128),
    "stream_interval": lambda r, ids, most: r.randint(1, 20),
    "return_prompt_text": lambda r, ids, most: True,
    "return_token_offsets": lambda r, ids, most: True,
    "return_token_ids": lambda r, ids, most: True,
    "return_tokens_as_token_ids": lambda r, ids, most: True,
    "cache_salt": lambda r, ids, most: r.choice(["one", "two"]),
    "priority": lambda r, ids, most: r.randint(-2, 2),
    "speculation": lambda r, ids, most: False,
    "n": lambda r, ids, most: r.randint(2, 5),
    "structured_outputs": lambda r, ids, most: r.choice(_CONSTRAINTS),
}
# Fields that can forbid every token that a grammar allows.
_AGAINST_GRAMMARS = (
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
)
_INVALID: tuple[dict[str, Any], ...] = (
    {"temperature": 9},
    {"top_p": 0},
    {"no_such_field": 1},
    {"max_tokens": 0},
    {"logit_bias": {"-1": 1}},
    {"stop": [""]},
)


class Traffic:
    """The requests of one client.

    Args:
        seed: seed of the whole run.
        client: this client's number.
        token_ids: ids of TEXT, for prompts.
        max_model_len: tokens of prompt and answer together, at most.
    """

    def __init__(
        self, seed: int, client: int, token_ids: Sequence[int], max_model_len: int
    ) -> None:
        self._numbers = random.Random(f"{seed}/{client}")
        # A random generator of its own, so that comparisons change no other request.
        self._comparisons = random.Random(f"{seed}/{client}/compared")
        self._token_ids = token_ids
        self._longest_output = max(_SHORT_OUTPUT, max_model_len // 3)
        self._max_prompt = max_model_len - self._longest_output - _MARGIN
        # All clients have the same prefixes, so that the prefix cache is used.
        prefixes = random.Random(seed)
        self._prefixes = [
            self._random_ids(prefixes, prefixes.randint(1, self._max_prompt // 2)) for _ in range(4)
        ]

    def next(self) -> Exchange:
        """The next request."""
        numbers = self._numbers
        is_chat = numbers.random() < 0.4
        is_long = numbers.random() < _SHARE_OF_LONG_OUTPUTS
        max_tokens = numbers.randint(1, self._longest_output if is_long else _SHORT_OUTPUT)
        stream = numbers.random() < 0.6
        body: dict[str, Any] = {
            name: draw(numbers, self._token_ids, max_tokens)
            for name, draw in OPTIONS.items()
            if numbers.random() < _SHARE_OF_OPTION
        }
        if "structured_outputs" in body:
            body = {name: value for name, value in body.items() if name not in _AGAINST_GRAMMARS}
        body |= {"max_tokens": max_tokens, "stream": stream}
        if stream:
            body.pop("prompt_logprobs", None)  # chunks cannot carry them
        else:
            body.pop("stream_interval", None)
        num_prompts = 1 if is_chat else self._add_prompts(body)
        if is_chat:
            self._add_conversation(body)
        if "logprobs" not in body or "echo" in body:
            body.pop("logprob_token_ids", None)
        status = 200
        if numbers.random() < _SHARE_INVALID:
            body |= numbers.choice(_INVALID)
            body.pop("echo", None)  # with it, max_tokens=0 is valid
            status = 400
        chunks, patience = None, None
        if numbers.random() < _SHARE_OF_HANG_UPS:
            if stream:
                chunks = numbers.randint(0, 8)
            else:
                patience = numbers.uniform(0.001, 0.2)
        is_compared = self._comparisons.random() < _SHARE_OF_COMPARED
        is_compared = is_compared and not stream and status == 200 and patience is None
        if is_compared:
            body.setdefault("seed", self._comparisons.randrange(1 << 63))
            body.pop("speculation", None)
        return Exchange(
            path="/v1/chat/completions" if is_chat else "/v1/completions",
            body=body,
            status=status,
            num_choices=num_prompts * body.get("n", 1),
            chunks_read=chunks,
            patience_s=patience,
            is_compared=is_compared,
        )

    def _add_prompts(self, body: dict[str, Any]) -> int:
        numbers = self._numbers
        if numbers.random() < 0.3:
            body["logprobs"] = numbers.randint(0, 5)
        if numbers.random() < 0.1:
            body["echo"] = True
        if numbers.random() < 0.15:
            body["prompt"] = [self._prompt() for _ in range(numbers.randint(2, 4))]
            return len(body["prompt"])
        body["prompt"] = (
            TEXT[: numbers.randint(1, 60)] if numbers.random() < 0.3 else self._prompt()
        )
        return 1

    def _add_conversation(self, body: dict[str, Any]) -> None:
        numbers = self._numbers
        if numbers.random() < 0.3:
            body["logprobs"] = True
            body["top_logprobs"] = numbers.randint(0, 5)
        text = " ".join(_some(numbers, _WORDS, 25))
        body["messages"] = [{"role": "user", "content": text}]
        if numbers.random() < 0.3:
            body["messages"] += [
                {"role": "assistant", "content": "A list."},
                {"role": "user", "content": "Why?"},
            ]

    def _prompt(self) -> list[int]:
        """Token ids of a prompt, with a log-uniform length."""
        numbers = self._numbers
        length = int(self._max_prompt ** numbers.uniform(0, 1))
        start = numbers.choice(self._prefixes) if numbers.random() < 0.4 else []
        start = start[:length]
        return start + self._random_ids(numbers, length - len(start))

    def _random_ids(self, numbers: Numbers, count: int) -> list[int]:
        return [numbers.choice(self._token_ids) for _ in range(count)]
