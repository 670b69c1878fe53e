"""Renders chat templates: turns a conversation into the prompt text.

Templates are Jinja code from the model's author, so they run in Jinja's sandbox. The environment
(filters, globals, white space rules, the `generation` tag) is that of Hugging Face templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostinato.runtime.errors import InvalidRequestError, StartupError

__all__ = ("ChatTemplate", "with_tool_template")

_RESERVED = ("self", "messages", "tools", "add_generation_prompt")
_END_OF_MESSAGE = "OSTINATO_END_OF_FINAL_MESSAGE "


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it just renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is declared by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML. Templates expect plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as the templates' authors expect


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template; `source` is its text.

    Args:
        source: the Jinja text.
        special_tokens: `bos_token`, `eos_token`, ... as the template's variables.

    Raises:
        StartupError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            problem = "it is nested too deeply"
            if isinstance(error, jinja2.TemplateSyntaxError):
                problem = f"line {error.lineno}: {error.message}"
            raise StartupError(
                f"the chat template is not valid Jinja ({problem});"
                " give another one with model.chat_template=FILE"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render the prompt text of a conversation.

        Args:
            messages: `{"role": ..., "content": text}`, oldest first. Keys with value None are left
                out, but a message with tool calls and no content has an empty text.
            add_generation_prompt: end with the header of a new assistant message.
            continue_final_message: leave the last message open, so that the model continues it.
            variables: further variables of the template (`enable_thinking`, ...).
            tools: the functions that may be called, `{"type": "function", "function": ...}`.

        Raises:
            InvalidRequestError: the template refuses the messages, `variables` has a name that the
                server sets, or the last message cannot be continued as asked.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message=true needs add_generation_prompt=false: the last message is"
                " either continued or answered",
                param="continue_final_message",
            )
        conversation = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        for name in variables or {}:
            if name in _RESERVED or name in self._special_tokens:
                raise InvalidRequestError(
                    f"chat_template_kwargs cannot set {name}, which the server sets",
                    param="chat_template_kwargs",
                )
        if continue_final_message:
            _mark_end(conversation)
        for message in conversation:
            if message.get("tool_calls"):  # many templates read the content of every message
                message.setdefault("content", "")
        try:
            text = self._template.render(
                **self._special_tokens,
                messages=conversation,
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                **{"documents": None, **(variables or {})},
            )
        except MemoryError:
            raise  # the memory limit of the process that prepares the request
        except Exception as error:  # a template is a program and can raise any exception
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return _cut_at_end(text) if continue_final_message else text


def with_tool_template(source: str, tool_source: str) -> str:
    """One template in place of two: `tool_source` with tools, else `source`.

    Args:
        source: the template named "default" of a model with several.
        tool_source: the one named "tool_use".
    """
    # Jinja removes the last line break of a template, and those behind tags of statements, but
    # nothing behind an expression. The empty texts keep line breaks at the edges of both templates.
    empty = "{{ '' }}"
    tool, default = (f"{empty}{one.removesuffix(chr(10))}{empty}" for one in (tool_source, source))
    return f"{{% if tools %}}{tool}{{% else %}}{default}{{% endif %}}"


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    content = conversation[-1].get("content") if conversation else None
    if isinstance(content, str):
        conversation[-1]["content"] = content + _END_OF_MESSAGE
        return
    texts = [part for part in content or () if part.get("type") == "text"]
    if not texts:
        raise InvalidRequestError(
            "the last message has no text that the answer can continue; add some, or a message of"
            " the user after it",
            param="continue_final_message",
        )
    last = texts[-1]
    conversation[-1]["content"] = [
        {**part, "text": part["text"] + _END_OF_MESSAGE} if part is last else part
        for part in content or ()
    ]


def _cut_at_end(text: str) -> str:
    """The text before the mark `_END_OF_MESSAGE`.

    If the mark has lost its last space, the template trims messages. Then the text is trimmed too.
    """
    end = text.rfind(_END_OF_MESSAGE.rstrip())
    if end < 0:
        raise InvalidRequestError(
            "the model's chat template drops the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(_END_OF_MESSAGE, end) else text[:end].rstrip()
