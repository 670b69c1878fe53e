"""The number of reasoning tokens does not depend on how many tokens a step gives."""

from __future__ import annotations

import pytest

from ostinato.api.chat.chat_deltas import ChatOutputParser
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.events import merge
from ostinato.api.parsing.reasoning import REASONING
from ostinato.runtime.types.outputs import FinishReason, RequestOutput

TEXTS = ["<think>", "Two", " words", "</th", "ink>", "An", " answer", "."]


def output(texts: list[str], *, is_last: bool) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        index=0,
        text_delta="".join(texts),
        new_token_ids=[1] * len(texts),
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
