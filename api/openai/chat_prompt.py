"""A conversation as text, through the model's template or one that came with the request, and what
the answers to it may contain.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ostinato.api.openai.chat import asks_for_answer
from ostinato.api.openai.tool_constraint import tool_constraint
from ostinato.api.openai.tools import ToolUse, explained, template_messages, tool_use
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.detect import TemplateTraits, traits
from ostinato.api.schemas.conversation import Message
from ostinato.api.schemas.openai import ChatCompletionRequest, TokenizeRequest
from ostinato.api.schemas.response_format import behind_reasoning, constraint_of
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.chat_template_process import render_apart
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import ServedTask
from ostinato.runtime.types.params import ThinkingLimit
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("ChatPrompt", "prepare", "render")


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation ready to be continued."""

    text: str
    token_ids: list[int]  # of the text
    form: AnswerForm  # of its answers
    skip_special_tokens: bool  # false where a marker of the form is one
    # What keeps the answers' calls right, or lets reasoning stand before what is constrained; it
    # takes the place of the request's own constraint.
    constraint: StructuredOutputsParams | None = None
    thinking: ThinkingLimit | None = None  # how much reasoning there may be


async def prepare(service: Service, body: ChatCompletionRequest) -> ChatPrompt:
    """The prompt of a chat request.

    Raises:
        InvalidRequestError: as `render`; or the model does not generate, the template has no
            setting of `reasoning_effort`, or a budget is given to a model that does not reason.
    """
    require_task(service.client.model, ServedTask.generate)
    tokenizer = service.tokenizer("messages")
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    found = _traits(service, tokenizer, body)
    text = await _render(service, body, body.messages, use, found)
    (token_ids,) = await service.encode(
        [text], param="messages", add_special_tokens=body.add_special_tokens
    )
    form = AnswerForm(
        reasoning=found.reasoning,
        reasoning_is_open=_ends_in_reasoning(text, body, found),
        shows_reasoning=body.include_reasoning,
        calls=found.calls if use.tools else None,
        tool_names=use.names,
        max_calls=None if use.parallel else 1,
    )
    constraint = None
    if use.tools:
        constraint = tool_constraint(use, form, constraint_of(body))
        if constraint is not None and form.calls is not None:
            form = msgspec.structs.replace(form, calls=form.calls.constrained())
    else:
        constraint = behind_reasoning(body, form)
    return ChatPrompt(
        text=text,
        token_ids=token_ids,
        form=form,
        constraint=constraint,
        thinking=_thinking(body, form, tokenizer),
        skip_special_tokens=body.skip_special_tokens
        and not any(tokenizer.is_special(marker) for marker in form.markers),
    )


async def render(service: Service, body: TokenizeRequest, messages: list[Message]) -> str:
    """The text that the model continues.

    Raises:
        InvalidRequestError: there is no template, it refuses the messages, or one that came with
            the request takes too much time or memory; a message is not complete; tools are offered
            and no parser reads this model's calls.
    """
    found = _traits(service, service.tokenizer("messages"), body)
    return await _render(service, body, messages, tool_use(body.tools, None, None), found)


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
    tokenizer = service.tokenizer("messages")
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
        "add_generation_prompt": asks_for_answer(body),
        "continue_final_message": body.continue_final_message,
        "variables": _variables(body, found),
        "tools": tools,
    }
    if body.chat_template is None:
        return tokenizer.apply_chat_template(conversation, **settings)
    # One at a time: whatever such templates cost, the other cores are the engine's.
    async with service.template_turn:
        return await render_apart(
            body.chat_template, tokenizer.special_tokens, conversation, **settings
        )


def _variables(
    body: ChatCompletionRequest | TokenizeRequest, found: TemplateTraits
) -> dict[str, Any]:
    """The template's variables; `chat_template_kwargs` has the last word."""
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
    effort = body.reasoning_effort if isinstance(body, ChatCompletionRequest) else None
    if effort is None:
        return given
    if found.has_reasoning_effort:
        return {"reasoning_effort": effort, **given}
    if found.has_enable_thinking:
        return {"enable_thinking": effort != "none", **given}
    raise InvalidRequestError(
        "reasoning_effort is not supported: the chat template of this model has no setting of it;"
        " leave it out",
        param="reasoning_effort",
        code="unsupported_parameter",
    )


def _thinking(
    body: ChatCompletionRequest, form: AnswerForm, tokenizer: Tokenizer
) -> ThinkingLimit | None:
    """The limit of reasoning that the request sets."""
    if body.thinking_token_budget is None:
        return None
    markers = form.reasoning
    begin = None if markers is None else _token(tokenizer, markers.begin)
    end = None if markers is None else _token(tokenizer, markers.end)
    if begin is None or end is None:
        lacks = "no reasoning that this server knows" if markers is None else "no token for its end"
        raise InvalidRequestError(
            f"thinking_token_budget is not supported: the model has {lacks}; leave it out",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    return ThinkingLimit(
        max_tokens=body.thinking_token_budget,
        begin_token_id=begin,
        end_token_id=end,
        is_open=form.reasoning_is_open,
    )


def _token(tokenizer: Tokenizer, text: str) -> int | None:
    """The one token that is the text; None when it takes several."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _ends_in_reasoning(text: str, body: ChatCompletionRequest, found: TemplateTraits) -> bool:
    """Whether the answer begins within reasoning that the prompt has opened."""
    if found.reasoning is None:
        return False
    if body.continue_final_message:  # only the assistant's own words count
        last = body.messages[-1].text or ""
        return last.rfind(found.reasoning.begin) > last.rfind(found.reasoning.end)
    return text.rstrip().endswith(found.reasoning.begin)
