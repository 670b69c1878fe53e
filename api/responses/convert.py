"""Converts requests of the Responses API to chat requests."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ostinato.api.responses.schemas import (
    UNSUPPORTED,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    CustomCallOutputItem,
    CustomToolDefinition,
    GrammarFormat,
    InputItem,
    NamedCustomTool,
    NamedTool,
    PromptFields,
    ReasoningItem,
    ResponsesAllowedToolsChoice,
    ResponsesInputImagePart,
    ResponsesRequest,
    SchemaFormat,
    ToolChoice,
    ToolDefinition,
)
from ostinato.api.schemas.body_decoding import refusal
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import (
    AllowedTools,
    AllowedToolsChoice,
    CalledCustomTool,
    CalledFunction,
    ContentPart,
    CustomTool,
    CustomToolEntry,
    FunctionTool,
    Grammar,
    GrammarInput,
    Message,
    MessageToolCall,
    NamedCustomToolChoice,
    NamedFunction,
    NamedToolChoice,
    TextPart,
    Tool,
)
from ostinato.api.schemas.media_parts import InputImagePart
from ostinato.api.schemas.response_format import (
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    TextFormat,
)
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("FIELD_NAMES", "encoded_reasoning", "input_messages", "shows_logprobs", "to_chat")

_REASONING_PREFIX = "ostinato-1."
# Field of a chat request -> the field of this API that it was made from. Errors name the latter.
FIELD_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
}


def to_chat(body: PromptFields, messages: Sequence[Message]) -> ChatCompletionRequest:
    """Convert a request to a chat request.

    Args:
        body: the request.
        messages: the conversation, without the instructions of the request.

    Raises:
        InvalidRequestError: there is no message, or two fields contradict each other.
    """
    first = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if not first and not messages:
        raise InvalidRequestError("input is required", param="input", code="missing_field")
    fields = _fields_of_the_answer(body) if isinstance(body, ResponsesRequest) else {}
    return ChatCompletionRequest(
        messages=[*first, *messages],
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        verbosity=None if body.text is None else body.text.verbosity,
        **fields,
    )


def _tool(tool: ToolDefinition | CustomToolDefinition) -> Tool | CustomToolEntry:
    if isinstance(tool, ToolDefinition):
        return Tool(
            function=FunctionTool(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
    wanted = tool.format
    if isinstance(wanted, GrammarFormat):
        wanted = GrammarInput(Grammar(syntax=wanted.syntax, definition=wanted.definition))
    return CustomToolEntry(
        custom=CustomTool(name=tool.name, description=tool.description, format=wanted)
    )


def _choice(choice: str | ToolChoice | None) -> Any:
    """The equivalent `tool_choice` of a chat request."""
    if isinstance(choice, ResponsesAllowedToolsChoice):
        tools = [_choice(one) for one in choice.tools]
        return AllowedToolsChoice(AllowedTools(mode=choice.mode, tools=tools))
    if isinstance(choice, NamedTool):
        return NamedToolChoice(NamedFunction(choice.name))
    if isinstance(choice, NamedCustomTool):
        return NamedCustomToolChoice(NamedFunction(choice.name))
    return choice


def _fields_of_the_answer(body: ResponsesRequest) -> dict[str, Any]:
    return {
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
        "logprobs": shows_logprobs(body),
        "top_logprobs": body.top_logprobs,
        "logprob_token_ids": body.logprob_token_ids,
        "repetition_detection": body.repetition_detection,
        "stream": body.stream,
        "stream_interval": body.stream_interval,
        "return_prompt_text": body.return_prompt_text,
        "return_token_offsets": body.return_token_offsets,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
    }


def shows_logprobs(body: ResponsesRequest) -> bool:
    """Whether the reply has log-probabilities.

    Raises:
        InvalidRequestError: `top_logprobs` is set without log-probabilities in `include`.
    """
    wanted = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not wanted:
        raise InvalidRequestError(
            "top_logprobs needs 'message.output_text.logprobs' in include",
            param="top_logprobs",
            code="invalid_value",
        )
    return wanted


def encoded_reasoning(text: str) -> str:
    """`encrypted_content` of a reasoning item, for clients that send back only this field.

    It has the text of the item. The text is encoded, not encrypted, because the item shows it too.
    """
    return _REASONING_PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def _decoded_reasoning(content: str | None) -> str:
    """The text of `encrypted_content`; empty if another server has encoded it."""
    if content is None or not content.startswith(_REASONING_PREFIX):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(_REASONING_PREFIX)).decode()
    except ValueError:
        return ""


def _format(body: PromptFields) -> ResponseFormat | None:
    wanted = TextFormat() if body.text is None else body.text.format
    if isinstance(wanted, SchemaFormat):
        return JsonSchemaFormat(
            NamedSchema(name=wanted.name, schema=wanted.schema, strict=wanted.strict)
        )
    return None if isinstance(wanted, TextFormat) else wanted


def input_messages(given: str | Sequence[dict[str, Any]] | None) -> list[Message]:
    """The conversation in `input`.

    If reasoning, a text and calls of the assistant follow each other in this order, they become one
    message. A call that an earlier answer did not finish is left out.

    Raises:
        InvalidRequestError: an item is not valid, or its type is not supported.
    """
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    conversation = _Conversation()
    for index, raw in enumerate(given or ()):
        item = _item(raw, index)
        if isinstance(item, CallItem) and not _is_object(item.arguments):
            if item.status == "incomplete":
                continue
            name = f"input[{index}].arguments"
            raise InvalidRequestError(
                f"{name} must be a JSON object as text", param=name, code="invalid_value"
            )
        conversation.add(item)
    return conversation.end()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _item(raw: dict[str, Any], index: int) -> InputItem:
    fields = {name: value for name, value in raw.items() if value is not None}
    fields.setdefault("type", "message")
    try:
        return msgspec.convert(fields, InputItem)  # pyright: ignore[reportArgumentType]
    except msgspec.ValidationError as error:
        raise refusal(
            str(error),
            set(),
            UNSUPPORTED,
            schema=InputItem,
            body=fields,
            prefix=f"input[{index}]",
        ) from error


class _Conversation:
    """Builds the list of messages from items. Several items can make one assistant message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[MessageToolCall] = []

    def add(self, item: InputItem) -> None:
        if isinstance(item, ReasoningItem):
            if self._text is not None or self._calls:
                self.end()
            texts = [part.text for part in item.content or ()]
            self._thoughts += texts or filter(None, [_decoded_reasoning(item.encrypted_content)])
        elif isinstance(item, CallItem):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            self._calls.append(MessageToolCall(id=item.call_id, function=function))
        elif isinstance(item, CustomCallItem):
            custom = CalledCustomTool(name=item.name, input=item.input)
            self._calls.append(MessageToolCall(id=item.call_id, type="custom", custom=custom))
        elif isinstance(item, CallOutputItem | CustomCallOutputItem):
            self.end()
            self._messages.append(
                Message(role="tool", tool_call_id=item.call_id, content=_content(item.output))
            )
        elif item.role == "assistant":
            if self._text is not None or self._calls:
                self.end()
            self._text = _assistant_text(item.content)
        else:
            self.end()
            self._messages.append(Message(role=item.role, content=_content(item.content)))

    def end(self) -> list[Message]:
        """Complete the last message; returns all messages."""
        if self._text is not None or self._calls or self._thoughts:
            self._messages.append(
                Message(
                    role="assistant",
                    content=self._text if self._calls else self._text or "",
                    reasoning="\n".join(self._thoughts) or None,
                    tool_calls=self._calls or None,
                )
            )
        self._thoughts, self._text, self._calls = [], None, []
        return self._messages


def _content(content: str | Sequence[Any]) -> str | list[ContentPart]:
    """The content of a message: one text, or parts if it has images."""
    if isinstance(content, str) or not any(
        isinstance(one, ResponsesInputImagePart) for one in content
    ):
        return _text(content)
    return [
        InputImagePart(image_url=one.image_url, detail=one.detail)
        if isinstance(one, ResponsesInputImagePart)
        else TextPart(one.text)
        for one in content
    ]


def _assistant_text(content: str | Sequence[Any]) -> str:
    """The text of a message of the assistant.

    Raises:
        InvalidRequestError: it has an image.
    """
    if not isinstance(content, str) and any(
        isinstance(one, ResponsesInputImagePart) for one in content
    ):
        raise InvalidRequestError(
            "input has an image in a message of the assistant, which has text only; move it to a"
            " message of the user",
            param="input",
            code="invalid_value",
        )
    return _text(content)


def _text(content: str | Sequence[Any]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
