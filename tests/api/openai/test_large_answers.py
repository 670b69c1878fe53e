"""Log-probabilities of large answers are converted in parts, and other tasks run between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest

from ostinato.api.chat.chat_deltas import ChatDelta, CollectedAnswer
from ostinato.api.openai import chat, completions
from ostinato.api.openai.completions import Echo
from ostinato.api.openai.logprobs import chat_logprobs, completion_logprobs
from ostinato.api.parsing.events import Content, Message
from ostinato.api.preparation.generation import Generation
from ostinato.api.responses.text_logprobs import TextLogprobs
from ostinato.api.service.reply_state import CollectedCompletion, ReplyOptions
from ostinato.runtime.types.outputs import FinishReason, TokenLogprobs
from ostinato.runtime.types.params import SamplingParams
from tests.api.dialect_values import HEAD, PIECES, no_usage, output

NUM_TOKENS = 100
TOKENS = [1 + index % 2 for index in range(NUM_TOKENS)]
SCORES = [TokenLogprobs(-0.01 * index, 1, [1, 2], [-0.5, -0.25]) for index in range(NUM_TOKENS)]
OPTIONS = ReplyOptions(num_top_logprobs=2, num_prompt_logprobs=2)
LEAST_TURNS = NUM_TOKENS // 16
T = TypeVar("T")


def run_beside_another_task(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """The result of `work`, and how many turns another task had meanwhile."""

    async def both() -> tuple[T, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        result = await work
        task.cancel()
        return result, turns

    return asyncio.run(both())


def decoded(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


def completion() -> CollectedCompletion:
    one = CollectedCompletion()
    one.add(
        output(
            "text",
            TOKENS,
            NUM_TOKENS,
            logprobs=SCORES,
            prompt_logprobs=SCORES[1:],
            finish_reason=FinishReason.length,
        )
    )
    return one


def generation() -> Generation:
    return Generation(request_id="r", prompt_token_ids=TOKENS, sampling=SamplingParams())


@pytest.mark.parametrize("echoes", [[], [Echo(text="prompt", token_ids=TOKENS)]])
def test_a_completion(echoes: list[Echo]) -> None:
    response, turns = run_beside_another_task(
        completions.to_response(
            HEAD,
            [generation()],
            {(0, 0): completion()},
            PIECES.__getitem__,
            options=OPTIONS,
            echoes=echoes,
            usage=no_usage(),
        )
    )
    num_converted = 3 if echoes else 2  # the prompt's scores, the tokens, and the echoed tokens
    assert turns >= num_converted * LEAST_TURNS
    entries = [None, *SCORES[1:], *SCORES] if echoes else SCORES
    tokens = TOKENS * 2 if echoes else TOKENS
    at_once = completion_logprobs(tokens, entries, PIECES.__getitem__, num_top=2, text_offset=0)
    assert decoded(response.choices[0].logprobs) == decoded(at_once)


def test_an_answer_of_a_chat() -> None:
    answer = CollectedAnswer(completion=completion(), message=Message(), finish_reason="length")
    answer.message.add([Content("text")])
    response, turns = run_beside_another_task(
        chat.to_response(
            HEAD,
            generation(),
            {0: answer},
            PIECES.__getitem__,
            options=OPTIONS,
            usage=no_usage(),
        )
    )
    assert turns >= 2 * LEAST_TURNS
    at_once = chat_logprobs(TOKENS, SCORES, PIECES.__getitem__, num_top=2)
    assert decoded(response.choices[0].logprobs) == decoded(at_once)


def test_the_chunk_with_an_echoed_prompt() -> None:
    echo = Echo(text="prompt", token_ids=TOKENS)
    echoed, turns = run_beside_another_task(echo.logprobs(SCORES[1:], PIECES.__getitem__, OPTIONS))
    assert turns >= LEAST_TURNS
    at_once = completion_logprobs(
        TOKENS, [None, *SCORES[1:]], PIECES.__getitem__, num_top=2, text_offset=0
    )
    chunk = completions.echo_chunk(HEAD, 0, echo, echoed[0])
    assert decoded(chunk.choices[0].logprobs) == decoded(at_once)


def test_an_echoed_prompt_is_converted_once_for_all_completions(app, monkeypatch) -> None:
    converted = []
    convert = completions.all_completion_logprobs

    async def noting(token_ids, *arguments, **options):
        converted.append(list(token_ids))
        return await convert(token_ids, *arguments, **options)

    monkeypatch.setattr(completions, "all_completion_logprobs", noting)
    prompts = [[65, 66, 67], [65, 66]]
    body = {"prompt": prompts, "n": 3, "echo": True, "logprobs": 1, "stream": True}
    text = app.http.post("/v1/completions", json=body).text
    assert sorted(converted)[-2:] == [[65, 66], [65, 66, 67]]
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    for index in range(6):
        echoed, first, *_ = [one["logprobs"] for one in choices if one["index"] == index]
        length = len("".join(echoed["tokens"]))
        assert len(echoed["tokens"]) == len(prompts[index // 3])
        assert first["text_offset"] == [length]


def test_a_chunk_with_many_tokens() -> None:
    """As with a large `stream_interval`, or of a beam search."""
    one = output("text", TOKENS, NUM_TOKENS, logprobs=SCORES, finish_reason=FinishReason.length)
    delta = ChatDelta(one, [Content("text")], "length")
    chunks, turns = run_beside_another_task(
        chat.to_chunks(HEAD, delta, PIECES.__getitem__, options=OPTIONS)
    )
    assert turns >= LEAST_TURNS
    entries = decoded(chunks)[-1]["choices"][0]["logprobs"]["content"]
    assert (
        entries == decoded(chat_logprobs(TOKENS, SCORES, PIECES.__getitem__, num_top=2))["content"]
    )
    chunk, turns = run_beside_another_task(
        completions.to_chunk(HEAD, 0, one, PIECES.__getitem__, options=OPTIONS)
    )
    assert turns >= LEAST_TURNS
    assert decoded(chunk)["choices"][0]["logprobs"] == decoded(
        completion_logprobs(TOKENS, SCORES, PIECES.__getitem__, num_top=2, text_offset=0)
    )
    logprobs = TextLogprobs(PIECES.__getitem__, 2)
    _, turns = run_beside_another_task(logprobs.add(one))
    assert turns >= LEAST_TURNS
