"""Counts and log-probabilities of tokens do not depend on the number of tokens of a step."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.api.chat.chat_deltas import ChatOutputParser, join_deltas
from ostinato.api.chat.content_blocks import BlockKind, ContentBlocks
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.events import merge
from ostinato.api.parsing.reasoning import REASONING
from ostinato.api.responses.event_writer import EventWriter
from ostinato.api.responses.response_events import OutputTextDelta, ResponseEvent
from ostinato.api.responses.text_logprobs import TextLogprobs
from ostinato.api.service.stream_interval import StreamInterval
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs

TEXTS = ["<think>", "Two", " words", "</th", "ink>", "An", " answer", "."]


def output(texts: list[str], *, is_last: bool, first: int = 0) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        index=0,
        text_delta="".join(texts),
        new_token_ids=list(range(first, first + len(texts))),
        logprobs=[TokenLogprobs(-0.5, 1, [], []) for _ in texts],
        finish_reason=FinishReason.stop if is_last else None,
        token_texts=texts if len(texts) > 1 else None,
    )


@pytest.mark.parametrize("size", range(1, len(TEXTS) + 1))
def test_tokens_of_one_step_are_counted_one_by_one(size: int) -> None:
    parser = ChatOutputParser(AnswerForm(reasoning=REASONING["think"]))
    deltas = [
        parser.feed(output(TEXTS[first : first + size], is_last=first + size >= len(TEXTS)))
        for first in range(0, len(TEXTS), size)
    ]
    assert sum(one.num_reasoning_tokens for one in deltas) == 4
    events = merge(event for one in deltas for event in one.events)
    assert [event.text for event in events] == ["Two words", "An answer."]
    assert [event.num_tokens for event in events] == [3, 5]


@pytest.mark.parametrize("interval", [1, 2, 3, 20])
@pytest.mark.parametrize("size", range(1, 12))
def test_log_probabilities_of_text_are_those_of_its_tokens(size: int, interval: int) -> None:
    """Reasoning, text, a call and text again, in outputs of `size` tokens."""
    texts = [
        *("<think>", "Two", " words", "</think>", "An", " answer", ". <"),
        *("tool_call>", '{"name": "f", "arguments": {"a"', ": 1}}", "</tool_call>", "End", "."),
    ]
    form = AnswerForm(
        reasoning=REASONING["think"], call_format="hermes", tool_names=frozenset({"f"})
    )
    parser, blocks = ChatOutputParser(form), ContentBlocks()
    logprobs = TextLogprobs(lambda token_id: texts[token_id].encode(), 0)
    deltas = StreamInterval(interval, join_deltas)
    writer = EventWriter("resp_1", logprobs, encodes_reasoning=False)
    events: list[ResponseEvent] = []
    for first in range(0, len(texts), size):
        one = output(texts[first : first + size], first=first, is_last=first + size >= len(texts))
        delta = deltas.add(0, one, parser.feed(one))
        if delta is not None:
            asyncio.run(logprobs.add(delta.output))
            for change in blocks.feed(delta.events):
                events += writer.of_change(change, "completed")
    assert [one.text for one in blocks.blocks if one.kind is BlockKind.text] == [
        "An answer.",
        "End.",
    ]
    shown = [
        [msgspec.json.decode(msgspec.json.encode(one))["token"] for one in logprobs.of_block(index)]
        for index in range(len(blocks.blocks))
    ]
    # A marker between two blocks has no text, and so no entry.
    before, after = ["An", " answer", ". <"], ["End", "."]
    assert shown == [[], before, [], after]
    streamed = [
        entry
        for event in events
        if isinstance(event, OutputTextDelta)
        for entry in event.logprobs or ()
    ]
    assert streamed == [entry for place in (1, 3) for entry in logprobs.of_block(place)]


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # The first bytes of a character have no text.
        (["<think>", "x", "</think>", "", "", "日", "本"], ["", "", "日", "本"]),
        # White space after a marker is no text of the answer.
        (["<think>", "x", "</th", "ink>", "\n\n", "An", "swer"], ["An", "swer"]),
        # A held-back beginning of a marker turns out to be text.
        (["<think>", "x", "</think>", "a ", "<", "tool", " b"], ["a ", "<", "tool", " b"]),
        # A marker's end is in the token with the first text.
        (["<think>", "x", "</thi", "nk>y", "z"], ["nk>y", "z"]),
        (["a ", "<think>", "x", "</think>", "b"], ["a ", "<think>", "x", "</think>", "b"]),
        # The token that ends a held-back beginning repeats it.
        (["<think>", "x", "</think>", "a", "<", "<", " b"], ["a", "<", "<", " b"]),
        (["<think>", "x", "</think>", "<", "<", "<", " b"], ["<", "<", "<", " b"]),
        (["a", "<tool", "<tool", " b"], ["a", "<tool", "<tool", " b"]),
    ],
)
def test_tokens_of_entries_give_the_text(size: int, texts: list[str], expected: list[str]) -> None:
    assert tokens_of_entries(texts, size) == expected


@given(
    st.lists(
        st.sampled_from(["a", "b ", "<", "<t", "tool", "<tool", "_call", "</", "think", "日", ""])
    ),
    st.integers(1, 6),
)
def test_beginnings_of_markers_are_tokens_of_the_text(middle: list[str], size: int) -> None:
    """No marker is complete, so each token after the reasoning has an entry."""
    texts = ["<think>", "x", "</think>", "A", *middle, "z"]
    assert tokens_of_entries(texts, size) == texts[3:]


def tokens_of_entries(texts: list[str], size: int) -> list[str]:
    """The tokens of a message's log-probabilities. Each output has `size` tokens."""
    form = AnswerForm(
        reasoning=REASONING["think"], call_format="hermes", tool_names=frozenset({"f"})
    )
    parser, blocks = ChatOutputParser(form), ContentBlocks()
    logprobs = TextLogprobs(lambda token_id: texts[token_id].encode(), 0)
    for first in range(0, len(texts), size):
        one = output(texts[first : first + size], first=first, is_last=first + size >= len(texts))
        delta = parser.feed(one)
        asyncio.run(logprobs.add(delta.output))
        for change in blocks.feed(delta.events):
            logprobs.of_change(change)
    return [
        msgspec.json.decode(msgspec.json.encode(entry))["token"]
        for block in blocks.blocks
        for entry in logprobs.of_block(block.index)
    ]
