"""Makes the prompt of a chat request: renders the chat template, then tokenises the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ostinato.api.chat.tools import ToolUse, explained, template_messages, tool_use
from ostinato.api.media.request_media import RequestMedia, refuse_fields_with_media
from ostinato.api.parsing.detect import TemplateTraits, traits
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.preparation.preparation import Arrival, Preparation
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import Message
from ostinato.api.schemas.tokenize import TokenizeRequest
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage

__all__ = ("ChatPrompt", "adds_generation_prompt", "encode_chat", "encode_messages", "reasons")


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as text and as token ids."""

    text: str
    token_ids: list[int]  # with a placeholder token for each embedding of a medium
    images: list[PromptImage]  # and pairs of frames of videos, in the order of the prompt
    sounds: list[PromptSound]  # windows, in the order of the prompt
    tools: ToolUse  # the functions that the model may call
    traits: TemplateTraits  # facts about the template and the model's answers


def encode_chat(
    preparation: Preparation,
    body: ChatCompletionRequest,
    arrival: Arrival,
    *,
    is_counted: bool = False,
) -> ChatPrompt:
    """The prompt of a chat request.

    Args:
        preparation: the model, its tokenizer and the server's settings.
        body: the request.
        arrival: has the media that were fetched.
        is_counted: the tokens are only counted, so the prompt may be longer than the context.

    Raises:
        InvalidRequestError: see `encode_messages`. Or `tool_choice` does not fit the tools, the
            request has `documents` and the template does not show them, the text cannot fit into
            the context, or the request has media and a field that needs text only.
        FetchNeededError: see `RequestMedia`.
        ForkNeededError: see `encode_messages`.
    """
    encoder = preparation.encoder
    tokenizer = encoder.tokenizer("messages")
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    found = _traits(preparation, tokenizer, body)
    refuse_fields_with_media(body)
    media = RequestMedia(preparation, body.messages, body.media_io_kwargs, arrival.fetched)
    rendered = _render(preparation, body, body.messages, use, found, media)
    text = preparation.model.text_to_encode(rendered)
    preparation.begin_prompt("messages")
    special = body.add_special_tokens
    token_ids = (
        tokenizer.encode(text, add_special_tokens=special)
        if is_counted
        else encoder.encode(text, body, param="messages", add_special_tokens=special)
    )
    placed = media.placed(token_ids)
    return ChatPrompt(
        text=text,
        token_ids=placed.token_ids,
        images=placed.images,
        sounds=placed.sounds,
        tools=use,
        traits=found,
    )


def encode_messages(
    preparation: Preparation, body: TokenizeRequest, messages: list[Message], arrival: Arrival
) -> list[int]:
    """The token ids of a conversation.

    Raises:
        InvalidRequestError: there is no tokenizer or no template; the template or
            `template_messages` refuses the messages; `tool_use` refuses the tools; there are
            tools, but no parser for this model's calls; or `RequestMedia` refuses the media.
        FetchNeededError: see `RequestMedia`.
        ForkNeededError: the request has media or a template of its own, and this process lacks the
            grant for them.
    """
    tokenizer = preparation.encoder.tokenizer("messages")
    found = _traits(preparation, tokenizer, body)
    media = RequestMedia(preparation, messages, body.media_io_kwargs, arrival.fetched)
    use = tool_use(body.tools, None, None)
    rendered = _render(preparation, body, messages, use, found, media)
    text = preparation.model.text_to_encode(rendered)
    preparation.begin_prompt("messages")
    special = body.add_special_tokens is True
    return media.placed(tokenizer.encode(text, add_special_tokens=special)).token_ids


def reasons(preparation: Preparation, body: ChatCompletionRequest) -> bool:
    """Whether the model writes reasoning with known markers."""
    tokenizer = preparation.encoder.tokenizer("messages")
    return _traits(preparation, tokenizer, body).reasoning is not None


def _traits(
    preparation: Preparation, tokenizer: Tokenizer, body: ChatCompletionRequest | TokenizeRequest
) -> TemplateTraits:
    source = _template(tokenizer, body)
    settings = preparation.settings
    architecture = preparation.model.architecture
    return traits(source, settings.tool_parser, settings.reasoning_parser, architecture)


def _template(tokenizer: Tokenizer, body: ChatCompletionRequest | TokenizeRequest) -> str:
    """The source of the template that renders the request; empty if there is none."""
    if body.chat_template is not None:
        return body.chat_template
    return "" if tokenizer.chat_template is None else tokenizer.chat_template.source


def _render(
    preparation: Preparation,
    body: ChatCompletionRequest | TokenizeRequest,
    messages: list[Message],
    use: ToolUse,
    found: TemplateTraits,
    media: RequestMedia,
) -> str:
    tokenizer = preparation.encoder.tokenizer("messages")
    conversation = template_messages(messages, found.reasoning_key)
    tools = use.for_template
    if tools and found.calls is None:
        raise InvalidRequestError(
            "tools cannot be offered: with server.tool_parser="
            f"{preparation.settings.tool_parser.value} there is no parser for this model's tool"
            " calls; start the server with server.tool_parser set to one of"
            f" {', '.join(FORMATS)}",
            param="tools",
            code="unsupported_parameter",
        )
    template = _template(tokenizer, body)
    settings: dict[str, Any] = {
        "add_generation_prompt": adds_generation_prompt(body),
        "continue_final_message": body.continue_final_message,
        "variables": _variables(body, found),
    }
    if body.chat_template is not None:
        preparation.begin_template()

    def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        shown = media.shown(messages, template)
        if body.chat_template is None:
            return tokenizer.apply_chat_template(shown, tools=tools, **settings)
        return _render_given(
            body.chat_template, tokenizer.special_tokens, shown, {**settings, "tools": tools}
        )

    if found.knows_tools or found.calls is None:
        return rendered(conversation, tools)
    in_system = explained(conversation, tools, found.calls)
    try:
        return rendered(in_system, [])
    except InvalidRequestError:
        # Some templates refuse a message of the system.
        in_user = explained(conversation, tools, found.calls, in_system=False)
        if in_user == in_system:
            raise
        return rendered(in_user, [])


def _render_given(
    source: str,
    special_tokens: Mapping[str, str],
    conversation: list[dict[str, Any]],
    settings: dict[str, Any],
) -> str:
    """Render the conversation with a template that the client sent."""
    try:
        return ChatTemplate(source, special_tokens).render(conversation, **settings)
    except StartupError as error:  # leave out the remedy, which is for the server's operator
        message, param = str(error).partition(";")[0], "chat_template"
    except InvalidRequestError as error:
        message = str(error).replace("the model's chat template", "chat_template")
        param = error.param
    raise InvalidRequestError(message, param=param, code="invalid_value")


def adds_generation_prompt(body: ChatCompletionRequest | TokenizeRequest) -> bool:
    """Whether the prompt ends with the head of a new assistant message.

    Default: yes, unless the answer continues the last message.
    """
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def _variables(
    body: ChatCompletionRequest | TokenizeRequest, found: TemplateTraits
) -> dict[str, Any]:
    """The template's variables. Those of `chat_template_kwargs` take precedence."""
    given = body.chat_template_kwargs or {}
    if isinstance(body, ChatCompletionRequest) and body.documents:
        if not found.knows_documents:
            raise InvalidRequestError(
                "documents is not supported: the chat template does not show them; put them into"
                " a message",
                param="documents",
                code="unsupported_parameter",
            )
        given = {"documents": body.documents, **given}
    return {**_settings(body, found), **given}


def _settings(
    body: ChatCompletionRequest | TokenizeRequest, found: TemplateTraits
) -> dict[str, Any]:
    """The template's variables for the request's `reasoning_effort` and `verbosity`.

    A variable that the template does not use is left out. If the template uses `enable_thinking`
    and not `reasoning_effort`, the effort sets `enable_thinking`: false for `none`, true for every
    other effort.
    """
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
