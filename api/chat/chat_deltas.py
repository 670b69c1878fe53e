"""Parses the engine's outputs of a chat into events, for all chat APIs.

A streamed reply turns the events into chunks. A whole reply joins them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ostinato.api.chat.chat_generation import ChatGeneration
from ostinato.api.chat.tools import new_call_id
from ostinato.api.parsing.answer_parser import AnswerForm, AnswerParser
from ostinato.api.parsing.events import CallBegins, Content, Event, Message, Reasoning, merge
from ostinato.api.service.reply_state import CollectedCompletion, Tally
from ostinato.api.service.stream_interval import StreamInterval
from ostinato.runtime.client.completion import join_outputs
from ostinato.runtime.types.outputs import DEADLINE_REASON, FinishReason, RequestOutput

__all__ = (
    "ChatDelta",
    "ChatDeltas",
    "ChatOutputParser",
    "CollectedAnswer",
    "collect_delta",
    "join_deltas",
)


class ChatDelta(msgspec.Struct, frozen=True):
    """The part of an answer that one output of the engine adds."""

    output: RequestOutput
    events: list[Event]  # the parsed text of the output; every call has an id
    finish_reason: str | None = None  # the OpenAI API's word, such as `tool_calls`
    num_reasoning_tokens: int = 0  # tokens of the output that are reasoning
    cuts_call: bool = False  # the answer ends within its last call

    def incomplete_reason(self, at_max_tokens: str) -> str | None:
        """Why the answer ends before it is complete; None = it is complete, or it has not ended.

        Args:
            at_max_tokens: the API's word for an answer that has reached its limit of tokens.
        """
        if self.finish_reason == FinishReason.length:
            is_late = self.output.stop_reason == DEADLINE_REASON
            return DEADLINE_REASON if is_late else at_max_tokens
        is_repetition = self.finish_reason == FinishReason.repetition
        return FinishReason.repetition.value if is_repetition else None


class ChatDeltas:
    """Turns the outputs of one chat request into deltas, and counts the tokens of the deltas.

    Args:
        ready: the request.
        stream_interval: least number of tokens of a delta; see `StreamInterval`.

    Attributes:
        tally: the token counts.
    """

    def __init__(self, ready: ChatGeneration, stream_interval: int = 1) -> None:
        self._parser = ChatOutputParser(ready.form)
        self._interval = StreamInterval(stream_interval, join_deltas)
        self.tally = Tally.of([ready.generation])
        self.tally.num_reasoning_tokens = None if ready.form.reasoning is None else 0

    def add(self, output: RequestOutput) -> ChatDelta | None:
        """Add the next output; returns the delta to send now. None = the output is held back."""
        delta = self._interval.add(output.index, output, self._parser.feed(output))
        if delta is not None:
            self.tally.add(0, delta.output, delta.num_reasoning_tokens)
        return delta


class CollectedAnswer(msgspec.Struct, kw_only=True):
    """All deltas of one answer, joined."""

    completion: CollectedCompletion
    message: Message
    finish_reason: str | None = None


class ChatOutputParser:
    """Parses the outputs of all answers to one prompt. Each answer has a parser of its own.

    Args:
        form: the parts that an answer can have.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._parsers: dict[int, AnswerParser] = {}  # by the index of the answer
        # Index of the answer -> the (text, number of tokens) that were fed since its last event.
        self._waiting: dict[int, list[tuple[str, int]]] = {}

    def feed(self, output: RequestOutput) -> ChatDelta:
        """Parse the next output."""
        index = output.index
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._form.parser()
        if output.token_texts is None:
            num_tokens = len(output.new_token_ids)
            text = output.text_delta
            events = self._counted(index, text, num_tokens, parser.feed(text), parser)
            num_reasoning = num_tokens if parser.is_reasoning else 0
        else:
            events, num_reasoning = [], 0
            for text in output.token_texts:
                events += self._counted(index, text, 1, parser.feed(text), parser)
                num_reasoning += parser.is_reasoning
            events = merge(events)
        finish_reason, cuts_call = None, False
        if output.finish_reason is not None:
            events += self._counted(index, "", 0, parser.finish(), parser)
            cuts_call = parser.ends_in_call
            is_whole = output.finish_reason is FinishReason.stop and not cuts_call
            has_calls = parser.has_calls and is_whole
            finish_reason = "tool_calls" if has_calls else output.finish_reason.value
        events = [self._with_id(event) for event in events]
        return ChatDelta(output, events, finish_reason, num_reasoning, cuts_call)

    def _counted(
        self, index: int, text: str, num_new: int, events: list[Event], parser: AnswerParser
    ) -> list[Event]:
        """Divide tokens among the events that new text gave.

        Args:
            index: index of the answer.
            text: the new text.
            num_new: number of tokens of the new text. They are counted in the last event. Waiting
                tokens, whose text was held back, are counted in the first event.
        """
        if not events:
            self._waiting.setdefault(index, []).append((text, num_new))
            return events
        waiting = self._waiting.pop(index, [])
        num_waiting = sum(count for _, count in waiting)
        if isinstance(events[0], Content | Reasoning):
            num_unseen = _num_unseen(waiting, text, events, parser.held_length)
            events[0] = msgspec.structs.replace(events[0], num_unseen=num_unseen)
        for place, num_tokens in ((0, num_waiting), (-1, num_new)):
            if num_tokens:
                event = events[place]
                num_tokens += event.num_tokens
                events[place] = msgspec.structs.replace(event, num_tokens=num_tokens)
        return events

    def _with_id(self, event: Event) -> Event:
        if isinstance(event, CallBegins) and event.id is None:
            return msgspec.structs.replace(event, id=new_call_id(self._form.calls))
        return event


def _num_unseen(
    waiting: list[tuple[str, int]], new_text: str, events: list[Event], held_length: int
) -> int:
    """Number of tokens at the beginning of `waiting` that have no text in the first event.

    Args:
        waiting: the (text, number of tokens) that were held back, in their order.
        new_text: the text after them.
        events: the events that the text gave. The first one is content or reasoning.
        held_length: number of the last characters that are still held back.
    """
    shown, *later = [one.text for one in events if isinstance(one, Content | Reasoning)]
    whole = "".join(held for held, _ in waiting) + new_text
    # `shown` ends before the text of later events and before the text that is still held back. A
    # marker or white space can have been dropped after `shown`. So `shown` is searched backwards.
    end = len(whole) - held_length - sum(map(len, later))
    begin = max(whole.rfind(shown, 0, end), 0)
    num_unseen, at, num_partial = 0, 0, 0
    for held, count in waiting:
        at += len(held)
        if at > begin:
            break
        # A token without text is a part of a later character.
        num_partial = 0 if held else num_partial + count
        num_unseen += count
    return num_unseen - num_partial


def join_deltas(deltas: Sequence[ChatDelta]) -> ChatDelta:
    """Join consecutive deltas of one answer to one delta."""
    return ChatDelta(
        join_outputs([one.output for one in deltas]),
        merge(event for one in deltas for event in one.events),
        deltas[-1].finish_reason,
        sum(one.num_reasoning_tokens for one in deltas),
        deltas[-1].cuts_call,
    )


def collect_delta(answers: dict[int, CollectedAnswer], delta: ChatDelta) -> None:
    """Add a delta to its answer in `answers`. The keys are the indices of the answers.

    A call that was cut off is left out, because its arguments are not JSON.
    """
    index = delta.output.index
    answer = answers.get(index)
    if answer is None:
        answer = answers[index] = CollectedAnswer(
            completion=CollectedCompletion(), message=Message()
        )
    answer.completion.add(delta.output)
    answer.message.add(delta.events)
    if delta.cuts_call:
        answer.message.drop_last_call()
    answer.finish_reason = delta.finish_reason
