"""Calls of custom tools in an answer: any escapes and any cuts into pieces give the same input."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ostinato.api.parsing.call_format import JsonArguments
from ostinato.api.parsing.custom_tools import RAW_BEGIN, RAW_END, CustomInputs
from ostinato.api.parsing.events import CallArguments, CallBegins, Event, Message
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.parsing.tool_calls import CallParser

JSON_FORMATS = sorted(
    name for name, form in FORMATS.items() if isinstance(form.style, JsonArguments)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def events_of(text: str, cuts: list[int], form: str) -> list[Event]:
    parser = CallParser(FORMATS[form].constrained(), {"note", "f"})
    inputs = CustomInputs({"note"})
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events: list[Event] = []
    for begin, end in pairwise(places):
        events += inputs.feed(parser.feed(text[begin:end]))
    return events + inputs.feed(parser.finish())


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.sampled_from(JSON_FORMATS), st.data())
def test_the_text_is_what_was_written(text, cuts, form, data):
    shape = FORMATS[form].shape
    ways = [json.dumps({"input": text}, ensure_ascii=flag) for flag in (True, False)]
    # The raw form is possible only if the text does not have the end of a call.
    if RAW_END + shape.end not in text + RAW_END:
        ways.append(f"{RAW_BEGIN}{text}{RAW_END}")
    call = f"{shape.begin}note{shape.middle}{data.draw(st.sampled_from(ways))}{shape.end}"
    written = f"{shape.opening}{call}{shape.closing}"
    events = events_of(written, cuts, form)
    message = Message()
    message.add(events)
    assert [(one.name, one.arguments, one.is_custom) for one in message.calls] == [
        ("note", text, True)
    ]
    assert message.content == ""
    assert all(one.is_custom for one in events if isinstance(one, CallArguments | CallBegins))


def test_half_of_a_surrogate_pair_is_a_replacement_character():
    shape = FORMATS["hermes"].shape
    for half, shown in (("\\ud83d", "�"), ("\\ude00", "�"), ("\\ud83d\\u0041", "�A")):
        for cut in range(80):
            written = f'{shape.begin}note{shape.middle}{{"input": "a{half}"}}{shape.end}'
            message = Message()
            message.add(events_of(written, [cut], "hermes"))
            assert message.calls[0].arguments == f"a{shown}"


def test_functions_keep_their_json():
    shape = FORMATS["hermes"].shape
    written = f'{shape.begin}f{shape.middle}{{"input": "a"}}{shape.end}'
    (begin, arguments) = events_of(written, [], "hermes")
    assert begin == CallBegins(0, "f")
    assert arguments == CallArguments(0, '{"input": "a"}')
