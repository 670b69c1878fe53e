"""The fields of requests that the installed `openai` and `anthropic` packages know.

The server either accepts a field or refuses it by name with a reason. The documents list the
accepted fields of each body. When a new version of a package has a new field, these tests fail
until the project's type or its table of unsupported fields has the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from anthropic import types as claude
from anthropic.types import message_create_params, output_config_param
from openai.types import chat, completion_create_params, embedding_create_params, responses
from openai.types.chat import (
    chat_completion_custom_tool_param,
    chat_completion_message_custom_tool_call_param,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    easy_input_message_param,
    input_token_count_params,
    response_create_params,
    response_format_text_json_schema_config_param,
    response_function_tool_call_param,
    response_input_item_param,
    response_output_message_param,
    response_output_text_param,
    response_reasoning_item_param,
)
from openai.types.shared_params import (
    FunctionDefinition,
    Reasoning,
    custom_tool_input_format,
    response_format_json_schema,
)

from ostinato.api.anthropic import schemas as messages
from ostinato.api.base.unsupported_fields import (
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    Unsupported,
)
from ostinato.api.pooling.schemas import EmbeddingRequest
from ostinato.api.responses import schemas as responding
from ostinato.api.schemas import client_fields, conversation, response_format
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.generation_fields import StreamOptions
from ostinato.api.schemas.text_completions import CompletionRequest

DOCS = Path(__file__).parents[2] / "docs"
HI = [{"role": "user", "content": "Hi"}]


class Pair(NamedTuple):
    """A type of a client library and the project's type for it."""

    theirs: Any
    ours: type[msgspec.Struct]
    unsupported: Mapping[str, Unsupported] = {}
    elsewhere: frozenset[str] = frozenset()  # fields that the client does not send in the body


class Body(NamedTuple):
    """The body of an endpoint."""

    path: str
    pair: Pair
    page: str  # the page of the documents that lists the fields
    smallest: dict[str, Any]


# The client sends these two of its arguments as headers.
HEADERS = frozenset({"user_profile_id", "workspace_id"})
BODIES = [
    Body(
        "/v1/chat/completions",
        Pair(chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest, UNSUPPORTED),
        "parameters.md",
        {"messages": HI},
    ),
    Body(
        "/v1/completions",
        Pair(completion_create_params.CompletionCreateParamsBase, CompletionRequest, UNSUPPORTED),
        "parameters.md",
        {"prompt": "Hi"},
    ),
    Body(
        "/v1/embeddings",
        Pair(embedding_create_params.EmbeddingCreateParams, EmbeddingRequest, UNSUPPORTED),
        "embeddings.md",
        {"input": "Hi"},
    ),
    Body(
        "/v1/responses",
        Pair(
            response_create_params.ResponseCreateParamsBase,
            responding.ResponsesRequest,
            responding.UNSUPPORTED,
        ),
        "dialects.md",
        {"input": "Hi"},
    ),
    Body(
        "/v1/responses/input_tokens",
        Pair(
            input_token_count_params.InputTokenCountParams,
            responding.InputTokensRequest,
            responding.UNSUPPORTED,
        ),
        "dialects.md",
        {"input": "Hi"},
    ),
    Body(
        "/v1/messages",
        Pair(
            message_create_params.MessageCreateParamsBase,
            messages.MessagesRequest,
            messages.UNSUPPORTED,
            HEADERS,
        ),
        "dialects.md",
        {"messages": HI, "max_tokens": 5},
    ),
    Body(
        "/v1/messages/count_tokens",
        Pair(
            claude.MessageCountTokensParams,
            messages.CountTokensRequest,
            messages.UNSUPPORTED,
            HEADERS,
        ),
        "dialects.md",
        {"messages": HI},
    ),
]
# The types of the parts of a body: messages, texts, functions and formats.
PARTS = [
    Pair(chat.ChatCompletionStreamOptionsParam, StreamOptions),
    *(
        Pair(theirs, conversation.Message, UNSUPPORTED_IN_MESSAGES)
        for theirs in (
            chat.ChatCompletionAssistantMessageParam,
            chat.ChatCompletionDeveloperMessageParam,
            chat.ChatCompletionSystemMessageParam,
            chat.ChatCompletionToolMessageParam,
            chat.ChatCompletionUserMessageParam,
        )
    ),
    Pair(chat.ChatCompletionContentPartTextParam, conversation.TextPart),
    Pair(chat.ChatCompletionContentPartRefusalParam, conversation.RefusalPart),
    Pair(chat.ChatCompletionFunctionToolParam, conversation.Tool),
    Pair(FunctionDefinition, conversation.FunctionTool),
    Pair(chat.ChatCompletionMessageFunctionToolCallParam, conversation.MessageToolCall),
    Pair(chat.ChatCompletionNamedToolChoiceParam, conversation.NamedToolChoice),
    Pair(chat.ChatCompletionCustomToolParam, conversation.CustomToolEntry),
    Pair(chat_completion_custom_tool_param.Custom, conversation.CustomTool),
    Pair(chat_completion_custom_tool_param.CustomFormatGrammar, conversation.GrammarInput),
    Pair(chat.ChatCompletionMessageCustomToolCallParam, conversation.MessageToolCall),
    Pair(chat_completion_message_custom_tool_call_param.Custom, conversation.CalledCustomTool),
    Pair(chat.ChatCompletionNamedToolChoiceCustomParam, conversation.NamedCustomToolChoice),
    Pair(chat.ChatCompletionAllowedToolChoiceParam, conversation.AllowedToolsChoice),
    Pair(chat.ChatCompletionAllowedToolsParam, conversation.AllowedTools),
    Pair(response_format_json_schema.ResponseFormatJSONSchema, response_format.JsonSchemaFormat),
    Pair(response_format_json_schema.JSONSchema, response_format.NamedSchema),
    Pair(
        chat_create_params.PromptCacheOptions,
        client_fields.PromptCacheOptions,
        {
            "comparison_response_id": Unsupported("diagnostics of the cache"),
            "prewarm": Unsupported("prompts that are computed for later"),
        },
    ),
    Pair(response_create_params.StreamOptions, responding.ResponsesStreamOptions),
    Pair(Reasoning, responding.ReasoningConfig),
    Pair(responses.ResponseTextConfigParam, responding.TextConfig),
    Pair(
        response_format_text_json_schema_config_param.ResponseFormatTextJSONSchemaConfigParam,
        responding.SchemaFormat,
    ),
    Pair(responses.FunctionToolParam, responding.ToolDefinition, responding.UNSUPPORTED),
    Pair(responses.ToolChoiceFunctionParam, responding.NamedTool),
    Pair(responses.CustomToolParam, responding.CustomToolDefinition),
    Pair(custom_tool_input_format.Grammar, responding.GrammarFormat),
    Pair(responses.ToolChoiceCustomParam, responding.NamedCustomTool),
    Pair(responses.ToolChoiceAllowedParam, responding.ResponsesAllowedToolsChoice),
    Pair(responses.ResponseCustomToolCallParam, responding.CustomCallItem, responding.UNSUPPORTED),
    Pair(responses.ResponseCustomToolCallOutputParam, responding.CustomCallOutputItem),
    Pair(easy_input_message_param.EasyInputMessageParam, responding.MessageItem),
    Pair(response_output_message_param.ResponseOutputMessageParam, responding.MessageItem),
    Pair(responses.ResponseInputTextParam, responding.InputTextPart),
    Pair(response_output_text_param.ResponseOutputTextParam, responding.OutputTextPart),
    Pair(
        response_function_tool_call_param.ResponseFunctionToolCallParam,
        responding.CallItem,
        responding.UNSUPPORTED,
    ),
    Pair(
        response_input_item_param.FunctionCallOutput,
        responding.CallOutputItem,
        responding.UNSUPPORTED,
    ),
    Pair(response_reasoning_item_param.ResponseReasoningItemParam, responding.ReasoningItem),
    Pair(claude.MessageParam.__args__[0], messages.Turn),
    Pair(claude.TextBlockParam, messages.TextBlock),
    Pair(claude.ToolUseBlockParam, messages.ToolUseBlock),
    Pair(claude.ToolResultBlockParam, messages.ToolResultBlock),
    Pair(claude.ThinkingBlockParam, messages.ThinkingBlock),
    Pair(claude.RedactedThinkingBlockParam, messages.RedactedThinkingBlock),
    Pair(claude.ToolParam, messages.ToolDefinition, messages.UNSUPPORTED),
    Pair(claude.ToolChoiceToolParam, messages.ToolChoice),
    Pair(claude.ToolChoiceAnyParam, messages.AnyChoice),
    Pair(claude.ThinkingConfigEnabledParam, messages.Thinking),
    Pair(claude.ThinkingConfigAdaptiveParam, messages.Thinking),
    Pair(claude.CacheControlEphemeralParam, client_fields.CacheControl),
    Pair(claude.MetadataParam, messages.Metadata),
    Pair(output_config_param.OutputConfigParam, messages.OutputConfig),
]


def names(struct: type[msgspec.Struct]) -> set[str]:
    tag = struct.__struct_config__.tag_field
    return {field.encode_name for field in msgspec.structs.fields(struct)} | (
        {tag} if tag else set()
    )


@pytest.mark.parametrize(
    "pair", [*(body.pair for body in BODIES), *PARTS], ids=lambda pair: pair.theirs.__name__
)
def test_each_field_is_taken_or_refused_by_name(pair):
    theirs = set(pair.theirs.__annotations__)
    assert theirs, "the client library has moved this type"
    taken = names(pair.ours)
    assert theirs - taken - set(pair.unsupported) - pair.elsewhere == set()
    assert taken & set(pair.unsupported) == set()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.path)
def test_what_is_taken_is_documented(body):
    text = (DOCS / body.page).read_text(encoding="utf-8")
    taken = set(body.pair.theirs.__annotations__) & names(body.pair.ours)
    assert [name for name in sorted(taken) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.path)
def test_what_is_refused_is_refused_with_a_reason(app, body):
    refused = set(body.pair.theirs.__annotations__) & set(body.pair.unsupported)
    for name in sorted(refused):
        response = app.http.post(body.path, json={**body.smallest, name: {"x": 1}})
        assert response.status_code == 400, name
        message = response.json()["error"]["message"]
        assert message.startswith(f"{name} is not supported: "), message
        assert "it needs " in message or " instead" in message
        # Null has no effect.
        assert app.http.post(body.path, json={**body.smallest, name: None}).status_code == 200


@pytest.mark.parametrize("page", ["parameters.md", "dialects.md"])
def test_what_has_no_effect_is_taken(page):
    """The documents list fields without effect; each is a field of some request."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (section,) = [part for part in text.split("\n## ") if part.startswith("Without effect")] or [""]
    listed = {
        word
        for row in section.splitlines()
        if row.startswith("| `")
        for word in row.split("`")[1::2][:1]
    }
    known = set().union(*(names(body.pair.ours) for body in BODIES))
    assert listed <= known
    assert page != "parameters.md" or "metadata" in listed
