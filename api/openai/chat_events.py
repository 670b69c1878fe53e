"""The engine's news of a conversation as events, for every dialect that answers one.

A reply that streams turns the events into chunks; one that does not adds them up. Both see the
same ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from ostinato.api.openai.tools import new_call_id
from ostinato.api.parsing.answer_parser import AnswerForm, AnswerParser
from ostinato.api.parsing.events import CallBegins, Event, Message
from ostinato.api.service.generation import CollectedCompletion, Tally, collect
from ostinato.api.service.service import IndexedOutput
from ostinato.runtime.client.completion import join_outputs
from ostinato.runtime.types.outputs import FinishReason, RequestOutput

__all__ = ("ChatDelta", "CollectedAnswer", "chat_deltas", "collect_answers", "join_deltas")


class ChatDelta(msgspec.Struct, frozen=True):
    """One piece of news of one answer."""

    output: RequestOutput
    events: list[Event]  # what its text turned into; every call has an id
    finish_reason: str | None = None  # as the OpenAI API names it, `tool_calls` included
    num_reasoning_tokens: int = 0  # of its tokens, those that ended within reasoning


class CollectedAnswer(msgspec.Struct, kw_only=True):
    """All news of one answer, joined."""

    completion: CollectedCompletion
    message: Message
    finish_reason: str | None = None


async def chat_deltas(
    news: AsyncGenerator[IndexedOutput, None], form: AnswerForm
) -> AsyncGenerator[ChatDelta, None]:
    """The news of all answers to one prompt, parsed; closing it closes `news`."""
    parsers: dict[int, AnswerParser] = {}
    async with aclosing(news):
        async for _, output in news:
            parser = parsers.get(output.index)
            if parser is None:
                parser = parsers[output.index] = form.parser()
            events = parser.feed(output.text_delta)
            num_reasoning = len(output.new_token_ids) if parser.is_reasoning else 0
            finish_reason = None
            if output.finish_reason is not None:
                events += parser.finish()
                calls_end_it = parser.has_calls and output.finish_reason is FinishReason.stop
                finish_reason = "tool_calls" if calls_end_it else output.finish_reason.value
            yield ChatDelta(
                output, [_with_id(event, form) for event in events], finish_reason, num_reasoning
            )


def join_deltas(news: Sequence[ChatDelta]) -> ChatDelta:
    """Several that follow each other, of one answer, as one."""
    return ChatDelta(
        join_outputs([one.output for one in news]),
        [event for one in news for event in one.events],
        news[-1].finish_reason,
        sum(one.num_reasoning_tokens for one in news),
    )


async def collect_answers(
    news: AsyncGenerator[ChatDelta, None], tally: Tally
) -> dict[int, CollectedAnswer]:
    """All answers by their index, when they have ended."""
    completions: dict[tuple[int, int], CollectedCompletion] = {}
    answers: dict[int, CollectedAnswer] = {}
    async with aclosing(news):
        async for one in news:
            index = one.output.index
            tally.add(0, one.output, one.num_reasoning_tokens)
            collect(completions, 0, one.output)
            answer = answers.get(index)
            if answer is None:
                answer = answers[index] = CollectedAnswer(
                    completion=completions[0, index], message=Message()
                )
            answer.message.add(one.events)
            answer.finish_reason = one.finish_reason
    return answers


def _with_id(event: Event, form: AnswerForm) -> Event:
    if isinstance(event, CallBegins) and event.id is None:
        return msgspec.structs.replace(event, id=new_call_id(form.calls))
    return event
