"""`tools` and `tool_choice` with thousands of tools."""

from __future__ import annotations

import pytest

from ostinato.api.chat.tools import tool_use
from ostinato.api.schemas.conversation import (
    AllowedTools,
    AllowedToolsChoice,
    FunctionTool,
    NamedFunction,
    NamedToolChoice,
    Tool,
)
from ostinato.runtime.errors import InvalidRequestError

COUNT = 2000


class Name(str):
    """A name that counts how often it is compared with another one."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def named(number: int) -> NamedToolChoice:
    return NamedToolChoice(function=NamedFunction(name=f"tool{number}"))


def tools() -> list[Tool]:
    return [Tool(function=FunctionTool(name=Name(f"tool{number}"))) for number in range(COUNT)]


def test_names_are_compared_a_few_times_each():
    Name.num_compared = 0
    allowed = AllowedTools(mode="auto", tools=[named(number) for number in range(COUNT)])
    use = tool_use(tools(), AllowedToolsChoice(allowed_tools=allowed), None)
    assert len(use.only_names or ()) == COUNT
    assert Name.num_compared < 10 * COUNT


def test_a_repeated_name_is_refused():
    again = Tool(function=FunctionTool(name="tool7"))
    with pytest.raises(InvalidRequestError, match="tools has two tools named 'tool7'"):
        tool_use([*tools(), again], None, None)


def test_an_error_lists_the_first_tools():
    with pytest.raises(InvalidRequestError) as caught:
        tool_use(tools(), named(COUNT), None)
    assert str(caught.value) == (
        "tool_choice names the function 'tool2000', and tools has tool0, tool1, tool2, tool3, tool4"
        " and 1995 more"
    )
