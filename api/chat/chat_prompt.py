"""The prompt of a chat request: the conversation through the chat template, then token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from ostinato.api.chat.tools import ToolUse, explained, template_messages, tool_use
from ostinato.api.parsing.detect import TemplateTraits, traits
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import Message
from ostinato.api.schemas.tokenize import TokenizeRequest
from ostinato.api.service.service import Service
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.chat_template_process import render_apart
from ostinato.runtime.text.tokenizer import Tokenizer

__all__ = ("ChatPrompt", "adds_generation_prompt", "encode_chat", "reasons", "render")


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as text and as token ids."""

    text: str
    token_ids: list[int]
    tools: ToolUse  # the functions that the model may call
    traits: TemplateTraits  # what is known of the template and of the model's answers


async def encode_chat(service: Service, body: ChatCompletionRequest) -> ChatPrompt:
    """The prompt of a chat request.

    Raises:
        InvalidRequestError: as `render`; or the template shows no `documents`.
    """
    tokenizer = service.encoder.tokenizer("messages")
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    found = _traits(service, tokenizer, body)
    text = await _render(service, body, body.messages, use, found)
    (token_ids,) = await service.encoder.encode(
        [text], param="messages", add_special_tokens=body.add_special_tokens
    )
    return ChatPrompt(text=text, token_ids=token_ids, tools=use, traits=found)


async def render(service: Service, body: TokenizeRequest, messages: list[Message]) -> str:
    """The text that the model continues.

    Raises:
        InvalidRequestError: there is no template; the template refuses the messages; a template of
            the request takes too much time or memory; a message is not complete; tools are given
            and no parser reads this model's calls.
    """
    found = _traits(service, service.encoder.tokenizer("messages"), body)
    return await _render(service, body, messages, tool_use(body.tools, None, None), found)


def reasons(service: Service, body: ChatCompletionRequest) -> bool:
    """Whether the model writes reasoning that this server knows."""
    return _traits(service, service.encoder.tokenizer("messages"), body).reasoning is not None


def _traits(
    service: Service, tokenizer: Tokenizer, body: ChatCompletionRequest | TokenizeRequest
) -> TemplateTraits:
    own = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    return traits(own if body.chat_template is None else body.chat_template, service.server)


async def _render(
    service: Service,
    body: ChatCompletionRequest | TokenizeRequest,
    messages: list[Message],
    use: ToolUse,
    found: TemplateTraits,
) -> str:
    tokenizer = service.encoder.tokenizer("messages")
    conversation, tools = template_messages(messages), use.for_template
    if tools and found.calls is None:
        raise InvalidRequestError(
            f"tools can not be offered: server.tool_parser={service.server.tool_parser.value} has"
            " no parser for the calls that this model's chat template describes; start the server"
            " with server.tool_parser set to hermes, llama3_json, mistral or json",
            param="tools",
            code="unsupported_parameter",
        )
    if not found.knows_tools and found.calls is not None:
        conversation, tools = explained(conversation, tools, found.calls), []
    settings: dict[str, Any] = {
        "add_generation_prompt": adds_generation_prompt(body),
        "continue_final_message": body.continue_final_message,
        "variables": _variables(body, found),
        "tools": tools,
    }
    if body.chat_template is None:
        return tokenizer.apply_chat_template(conversation, **settings)
    # One template of a request at a time: the other cores are for the engine.
    async with service.template_turn:
        return await render_apart(
            body.chat_template, tokenizer.special_tokens, conversation, **settings
        )


def adds_generation_prompt(body: ChatCompletionRequest | TokenizeRequest) -> bool:
    """By default a new assistant message begins, unless the last message is continued."""
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def _variables(
    body: ChatCompletionRequest | TokenizeRequest, found: TemplateTraits
) -> dict[str, Any]:
    """The template's variables; `chat_template_kwargs` takes precedence."""
    given = body.chat_template_kwargs or {}
    if isinstance(body, ChatCompletionRequest) and body.documents:
        if not found.knows_documents:
            raise InvalidRequestError(
                "documents is not supported: the chat template of this model does not show them;"
                " put them into a message",
                param="documents",
                code="unsupported_parameter",
            )
        given = {"documents": body.documents, **given}
    return {**_settings(body, found), **given}


def _settings(
    body: ChatCompletionRequest | TokenizeRequest, found: TemplateTraits
) -> dict[str, Any]:
    """`reasoning_effort` and `verbosity`, where the template has a setting of them."""
    if not isinstance(body, ChatCompletionRequest):
        return {}
    settings: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        if found.has_reasoning_effort:
            settings["reasoning_effort"] = body.reasoning_effort
        elif found.has_enable_thinking:
            settings["enable_thinking"] = body.reasoning_effort != "none"
    if body.verbosity is not None and found.has_verbosity:
        settings["verbosity"] = body.verbosity
    return settings
