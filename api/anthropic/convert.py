"""Converts Anthropic requests to chat requests, and content blocks to Anthropic events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ostinato.api.anthropic.message_events import (
    BlockBegins,
    BlockChanges,
    BlockEnds,
    InputJsonDelta,
    MessageEvent,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
)
from ostinato.api.anthropic.schemas import (
    AnyChoice,
    Base64Source,
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    NoChoice,
    RedactedThinkingBlock,
    ReplyText,
    ReplyThinking,
    ReplyToolUse,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
)
from ostinato.api.chat.chat_deltas import ChatDelta
from ostinato.api.chat.content_blocks import BlockDelta, BlockKind, ContentBlock
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import (
    CalledFunction,
    ContentPart,
    CustomToolEntry,
    FunctionTool,
    Message,
    MessageToolCall,
    NamedFunction,
    NamedToolChoice,
    TextPart,
    Tool,
)
from ostinato.api.schemas.media_parts import ImageUrlPart
from ostinato.api.schemas.response_format import JsonSchemaFormat, NamedSchema
from ostinato.runtime.errors import InvalidRequestError

__all__ = (
    "FIELD_NAMES",
    "block_events",
    "reply_blocks",
    "stop_of",
    "to_chat",
    "with_one_system_message",
)

# Field of a chat request -> the Anthropic field that it was made from. Errors name the latter.
FIELD_NAMES = {
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "continue_final_message": "messages",
}


# Claude Code begins a block of the system with this. The block has a hash of the request, so
# prompts with it would have no common prefix.
_BILLING = "x-anthropic-billing-header"
# Role of a message -> the types of blocks that it may have.
_BLOCKS: dict[str, tuple[type, ...]] = {
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (TextBlock,),
    "user": (TextBlock, ImageBlock, ToolResultBlock),
}


def to_chat(body: CountTokensRequest) -> ChatCompletionRequest:
    """Convert a request to a chat request.

    Raises:
        InvalidRequestError: a message has a block that its role cannot have, the answer would
            follow a call without its result, or `thinking.budget_tokens` does not fit
            `thinking.type`.
    """
    messages = _system(body.system or ())
    for index, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{index}]")
    messages = _combined(messages)
    is_prefilled = body.messages[-1].role == "assistant"
    if is_prefilled and messages[-1].tool_calls:
        if isinstance(body, MessagesRequest):
            raise InvalidRequestError(
                "the last message has tool_use blocks, which must be followed by a message of the "
                "user with their tool_result blocks",
                param="messages",
                code="invalid_value",
            )
        is_prefilled = False
    choice = body.tool_choice
    tools: list[Tool | CustomToolEntry] | None = None
    if body.tools:
        tools = [Tool(function=_function(tool)) for tool in body.tools]
    fields = _thinking_fields(body)
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "stream_interval": body.stream_interval,
            "repetition_detection": body.repetition_detection,
            "return_prompt_text": body.return_prompt_text,
            "return_token_offsets": body.return_token_offsets,
        }
    if body.output_config is not None and body.output_config.format is not None:
        schema = NamedSchema(name="output", schema=body.output_config.format.schema)
        fields["response_format"] = JsonSchemaFormat(schema)
    return ChatCompletionRequest(
        messages=messages,
        tools=tools,
        tool_choice=_choice(choice),
        parallel_tool_calls=None
        if choice is None or isinstance(choice, NoChoice)
        else not choice.disable_parallel_tool_use,
        # If the last message is the assistant's, it is the beginning of the answer.
        continue_final_message=is_prefilled,
        chat_template_kwargs=body.chat_template_kwargs,
        **fields,
    )


def _thinking_fields(body: CountTokensRequest) -> dict[str, Any]:
    """The chat fields that express `thinking` and `output_config.effort`."""
    thinking, output = body.thinking, body.output_config
    effort = None if output is None else output.effort
    if thinking is None:
        return {"reasoning_effort": effort}
    if (thinking.type == "enabled") == (thinking.budget_tokens is None):
        needed = "required with thinking.type=enabled; give a number of tokens"
        if thinking.budget_tokens is not None:
            needed = f"only for thinking.type=enabled, got {thinking.type}; leave it out"
        raise InvalidRequestError(
            f"thinking.budget_tokens is {needed}",
            param="thinking.budget_tokens",
            code="invalid_value",
        )
    return {
        "reasoning_effort": "none" if thinking.type == "disabled" else effort or "high",
        "thinking_token_budget": thinking.budget_tokens,
        "include_reasoning": thinking.display != "omitted",
    }


def _choice(choice: object) -> Any:
    if isinstance(choice, ToolChoice):
        return NamedToolChoice(NamedFunction(choice.name))
    if isinstance(choice, AnyChoice):
        return "required"
    return "none" if isinstance(choice, NoChoice) else None


def _function(tool: ToolDefinition) -> FunctionTool:
    return FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


def _messages(turn: Turn, place: str) -> list[Message]:
    """The chat messages for one Anthropic message.

    Tool results come before the user's texts and images.
    """
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    for index, block in enumerate(turn.content):
        if not isinstance(block, _BLOCKS[turn.role]):
            name = block.__struct_config__.tag
            raise InvalidRequestError(
                f"{place}.content[{index}]: a message of the role {turn.role} cannot have a "
                f"{name} block",
                param=f"{place}.content[{index}].type",
                code="invalid_value",
            )
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    if turn.role == "system":
        return _system(texts)
    if turn.role == "user":
        results = [_result(one) for one in turn.content if isinstance(one, ToolResultBlock)]
        blocks = [one for one in turn.content if isinstance(one, TextBlock | ImageBlock)]
        said = [Message(role="user", content=_content(blocks))] if blocks or not results else []
        return results + said
    thoughts = [one.thinking for one in turn.content if isinstance(one, ThinkingBlock)]
    calls = [
        MessageToolCall(
            id=block.id,
            function=CalledFunction(name=block.name, arguments=_arguments(block)),
        )
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    return [
        Message(
            role="assistant",
            content=_text(texts) if texts or not calls else None,
            reasoning="\n".join(thoughts) or None,
            tool_calls=calls or None,
        )
    ]


def _combined(messages: Sequence[Message]) -> list[Message]:
    """The messages with consecutive ones of the user, or of the assistant, as one message."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or last.role != message.role or message.role not in ("assistant", "user"):
            found.append(message)
            continue
        has_both = last.content and message.content
        found[-1] = msgspec.structs.replace(
            last,
            content=_both(last, message) if has_both else last.content or message.content,
            reasoning="\n".join(filter(None, (last.reasoning, message.reasoning))) or None,
            tool_calls=[*(last.tool_calls or ()), *(message.tool_calls or ())] or None,
        )
    return found


def _system(content: str | Sequence[TextBlock]) -> list[Message]:
    """The system message, if it has a block besides that of `_BILLING`."""
    if isinstance(content, str):
        return [Message(role="system", content=content)]
    blocks = [block for block in content if not block.text.startswith(_BILLING)]
    return [Message(role="system", content=_text(blocks))] if blocks else []


def _arguments(block: ToolUseBlock) -> str:
    """The input of an earlier call as JSON.

    Raises:
        InvalidRequestError: it is nested too deeply.
    """
    try:
        return json.dumps(block.input)
    except RecursionError as error:
        raise InvalidRequestError(
            f"the input of the call {block.id!r} is nested too deeply; make it flatter",
            param="messages",
            code="invalid_value",
        ) from error


def _result(block: ToolResultBlock) -> Message:
    content = _content(block.content or "")
    if block.is_error:
        content = (
            f"Error: {content}" if isinstance(content, str) else [TextPart("Error:"), *content]
        )
    return Message(role="tool", tool_call_id=block.tool_use_id, content=content)


def _content(content: str | Sequence[TextBlock | ImageBlock]) -> str | list[ContentPart]:
    """The content of a chat message: one text, or parts if there are images."""
    if isinstance(content, str):
        return content
    if not any(isinstance(block, ImageBlock) for block in content):
        return _text([block for block in content if isinstance(block, TextBlock)])
    return [
        TextPart(block.text)
        if isinstance(block, TextBlock)
        else ImageUrlPart(image_url=_url(block.source))
        for block in content
    ]


def _url(source: Base64Source | UrlSource) -> str:
    """The URL of an image."""
    if isinstance(source, Base64Source):
        return f"data:;base64,{source.data}"
    return source.url


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """The messages without a system message after the first place, for templates that refuse it.

    Such a message at the beginning joins the first one. A later one becomes a text of the user in
    its place, and joins the messages of the user next to it.
    """
    shown: list[Message] = []
    was_system = False  # the last message of `shown` ends with a text of the system
    for message in messages:
        last = shown[-1] if shown else None
        is_system = message.role == "system"
        if is_system and last is not None and last.role != "system":
            message = msgspec.structs.replace(message, role="user")
        if last is not None and last.role == message.role and (is_system or was_system):
            shown[-1] = msgspec.structs.replace(last, content=_both(last, message))
        else:
            shown.append(message)
        was_system = is_system
    return shown


def _both(first: Message, second: Message) -> str | list[ContentPart]:
    """The contents of two messages."""
    one, other = first.content or "", second.content or ""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n{other}"
    parts = [[TextPart(part)] if isinstance(part, str) else part for part in (one, other)]
    return [*parts[0], *parts[1]]


def stop_of(last: ChatDelta) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) of the Anthropic API, from the last delta of an answer."""
    stop_reason = last.output.stop_reason
    if last.finish_reason == "tool_calls":
        return "tool_use", None
    if (reason := last.incomplete_reason("max_tokens")) is not None:
        return reason, None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "end_turn", None


def reply_blocks(blocks: list[ContentBlock]) -> list[ReplyText | ReplyThinking | ReplyToolUse]:
    """The content of a complete answer. A call that was cut off is left out."""
    return [_reply_block(block, block.text) for block in blocks if not block.is_cut]


def block_events(change: BlockDelta) -> list[MessageEvent]:
    """The events of one change of a block."""
    block, index = change.block, change.block.index
    if change.begins:
        # A block starts empty (a tool call with an empty object). Its text follows as deltas.
        return [BlockBegins(index=index, content_block=_reply_block(block, ""))]
    if change.ends:
        if block.kind is not BlockKind.reasoning:
            return [BlockEnds(index=index)]
        signed = BlockChanges(index=index, delta=SignatureDelta(signature=""))
        return [signed, BlockEnds(index=index)]
    if block.kind is BlockKind.text:
        delta = TextDelta(text=change.delta)
    elif block.kind is BlockKind.reasoning:
        delta = ThinkingDelta(thinking=change.delta)
    else:
        delta = InputJsonDelta(partial_json=change.delta)
    return [BlockChanges(index=index, delta=delta)]


def _reply_block(block: ContentBlock, text: str) -> ReplyText | ReplyThinking | ReplyToolUse:
    if block.kind is BlockKind.text:
        return ReplyText(text)
    if block.kind is BlockKind.reasoning:
        return ReplyThinking(text)
    return ReplyToolUse(id=block.call_id, name=block.name, input=_input(text))


def _input(text: str) -> dict[str, Any]:
    """The arguments of a call; an empty object if the text is not a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.MsgspecError:
        return {}
