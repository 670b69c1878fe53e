"""Bodies, outputs and reply heads that the tests of the dialects share."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ostinato.api.preparation.preparation import Preparation, PreparationSettings
from ostinato.api.schemas.body_decoding import decode
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.text_completions import CompletionRequest
from ostinato.api.schemas.usage import CompletionUsage
from ostinato.api.service.reply_state import (
    CollectedCompletion,
    ReplyHead,
    ReplyOptions,
    Tally,
    collect,
)
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs

MODEL = ServedModel(
    name="m", max_model_len=20, vocab_size=100, eos_token_ids=(0,), tokenizer="", created=7
)
HEAD = ReplyHead(id="chatcmpl-1", created=7, model="m", system_fingerprint="fp")
PLAIN = ReplyOptions()
PIECES = {1: b"a", 2: b" b", 3: b"\xf0\x9f", 4: b"\xa6\x86"}


def chat_body(**fields: object) -> ChatCompletionRequest:
    fields = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return decode(json.dumps(fields).encode(), ChatCompletionRequest)


def completion_body(**fields: object) -> CompletionRequest:
    return decode(json.dumps({"prompt": "Hi", **fields}).encode(), CompletionRequest)


def output(text: str, token_ids: list[int], total: int, **fields: Any) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        index=fields.pop("index", 0),
        text_delta=text,
        new_token_ids=token_ids,
        num_output_tokens=total,
        **fields,
    )


def encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def no_usage() -> CompletionUsage:
    return Tally(0).usage


def collected() -> dict[tuple[int, int], CollectedCompletion]:
    """Two completions of one prompt, "a0" and "a1"."""
    completions_by_key: dict[tuple[int, int], CollectedCompletion] = {}
    entry = TokenLogprobs(-0.5, 1, [1], [-0.5])
    for index in (1, 0):
        collect(completions_by_key, 0, output("a", [1], 1, index=index, logprobs=[entry]))
        collect(
            completions_by_key,
            0,
            output(
                f"{index}",
                [2],
                2,
                index=index,
                logprobs=[entry],
                finish_reason=FinishReason.stop,
                stop_reason=9,
            ),
        )
    return completions_by_key


def preparation(model: ServedModel = MODEL, default_max_tokens: int | None = None) -> Preparation:
    """A `Preparation` for a model without a tokenizer."""

    class Source:
        tokenizer = None

        def __init__(self) -> None:
            self.model = model

    return Preparation(Source(), PreparationSettings(default_max_tokens=default_max_tokens))
