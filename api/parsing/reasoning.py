"""Splits reasoning between two markers from the rest of an answer, incrementally.

Whitespace next to a marker belongs to the marker. Text that can be part of a marker is held back.
So the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ostinato.api.parsing.events import Content, Event, Reasoning
from ostinato.runtime.text.stop_strings import num_held

__all__ = ("REASONING", "ReasoningMarkers", "ReasoningSplitter")


class ReasoningMarkers(msgspec.Struct, frozen=True, kw_only=True):
    """How a model separates its reasoning from its answer."""

    begin: str
    end: str
    marks: tuple[str, ...]  # a chat template of this format has all these texts
    other_begins: tuple[str, ...] = ()  # other spellings of `begin`
    other_ends: tuple[str, ...] = ()  # other spellings of `end`
    answer: str = ""  # an optional text between `end` and an answer without calls
    answer_end: str = ""  # the text after an answer that began with `answer`
    # The markers are special tokens, which free text in a grammar does not match.
    is_special: bool = False
    has_channels: bool = False  # an answer is a list of messages, each on a channel

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that can be special tokens."""
        own = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>") if self.has_channels else ()
        around = tuple(filter(None, (self.answer.strip(), self.answer_end)))
        return (self.begin, self.end, *around, *own)


# If a template has the marks of two rows, the first row counts.
REASONING: Mapping[str, ReasoningMarkers] = {
    "openai_gptoss": ReasoningMarkers(
        begin="<|channel|>analysis<|message|>",
        end="<|end|><|start|>assistant",
        marks=("<|channel|>", "analysis"),
        answer="<|channel|>final<|message|>",
        is_special=True,
        has_channels=True,
    ),
    "mistral": ReasoningMarkers(
        begin="[THINK]", end="[/THINK]", marks=("[/THINK]",), is_special=True
    ),
    "seed_oss": ReasoningMarkers(
        begin="<seed:think>", end="</seed:think>", marks=("<seed:think>",), is_special=True
    ),
    "granite": ReasoningMarkers(
        begin="Here is my thought process:",
        end="Here is my response:",
        marks=("Here is my thought process:", "Here is my response:"),
        other_begins=("Here's my thought process:",),
        other_ends=("Here's my response:",),
    ),
    "ernie45": ReasoningMarkers(
        begin="<think>",
        end="</think>",
        marks=("</think>", "<response>"),
        answer="\n<response>\n",
        answer_end="</response>",
    ),
    "hunyuan_a13b": ReasoningMarkers(
        begin="<think>",
        end="</think>",
        marks=("</think>", "<answer>"),
        answer="\n<answer>\n",
        answer_end="</answer>",
    ),
    # Qwen3, DeepSeek R1 and most others.
    "think": ReasoningMarkers(begin="<think>", end="</think>", marks=("</think>",)),
}


class ReasoningSplitter:
    """Splits one answer: `feed` its text, then `finish`.

    Args:
        markers: the markers around the reasoning.
        is_open: the prompt ended within reasoning, so the answer begins there.
    """

    def __init__(self, markers: ReasoningMarkers, *, is_open: bool) -> None:
        self._markers = markers
        self._state = self._after_begin if is_open else self._at_start
        self._buffer = ""
        self._ends_answer = False  # the answer began with `answer`, so `answer_end` can follow it

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._state in (self._after_begin, self._inside)

    @property
    def held_length(self) -> int:
        """Number of characters at the end of the text so far that are held back."""
        return len(self._buffer)

    def feed(self, text: str) -> list[Event]:
        """The events of new text."""
        self._buffer += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The events of the text that was held back. Call it at the end."""
        text, self._buffer = self._buffer, ""
        if not text or self._state == self._after_end:
            return []
        if self.is_inside:
            return [Reasoning(text)]
        is_end = self._ends_answer and text.strip() == self._markers.answer_end
        return [] if is_end else [Content(text)]

    # Each state is a method. It takes text from the buffer and returns whether to run the next
    # state.

    def _at_start(self, events: list[Event]) -> bool:
        text = self._buffer.lstrip()
        for begin in (self._markers.begin, *self._markers.other_begins):
            if text.startswith(begin):
                self._buffer = text[len(begin) :]
                self._state = self._after_begin
                return True
        if any(one.startswith(text) for one in (self._markers.begin, *self._markers.other_begins)):
            return False
        self._state = self._outside
        return True

    def _after_begin(self, events: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._inside
        return bool(self._buffer)

    def _inside(self, events: list[Event]) -> bool:
        ends = (self._markers.end, *self._markers.other_ends)
        found = [(at, end) for end in ends if (at := self._buffer.find(end)) >= 0]
        if found:
            position, end = min(found)
            shown, self._buffer = self._buffer[:position].rstrip(), self._buffer[position:]
            self._buffer = self._buffer[len(end) :]
            self._state = self._after_end
        else:
            kept = len(self._buffer) - num_held(self._buffer, ends)
            kept = len(self._buffer[:kept].rstrip())
            shown, self._buffer = self._buffer[:kept], self._buffer[kept:]
        if shown:
            events.append(Reasoning(shown))
        return bool(found)

    def _after_end(self, events: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        answer = self._markers.answer.strip()
        if answer and self._buffer.startswith(answer):
            self._buffer = self._buffer[len(answer) :].lstrip()
            self._ends_answer = True
            self._markers = msgspec.structs.replace(self._markers, answer="")
            return True
        if answer and answer.startswith(self._buffer):
            return False
        self._state = self._outside
        return True

    def _outside(self, events: list[Event]) -> bool:
        text = self._buffer
        if self._ends_answer:
            text = text[: len(text) - self._num_of_end(text)]
        if text:
            events.append(Content(text))
            self._buffer = self._buffer[len(text) :]
        return False

    def _num_of_end(self, text: str) -> int:
        """How many characters at the text's end can be `answer_end`, with white space before it."""
        end = self._markers.answer_end
        body = text.rstrip()
        held = len(end) if body.endswith(end) else 0
        if not held and body == text:
            held = num_held(text, (end,))
        before = body[: len(body) - held].rstrip()
        return len(text) - len(before)
