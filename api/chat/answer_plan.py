"""Plans the answer to a chat request: its parser, its grammar and its reasoning budget."""

from __future__ import annotations

import msgspec

from ostinato.api.chat.chat_prompt import ChatPrompt
from ostinato.api.chat.tool_constraint import tool_constraint
from ostinato.api.chat.tools import ToolUse
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.bodies.parameter_schemas import types_of_parameters
from ostinato.api.parsing.call_format import CallFormat
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.response_format import behind_reasoning, constraint_of
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.params import ThinkingLimit
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("AnswerPlan", "plan_answer")


class AnswerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is constrained and parsed."""

    form: AnswerForm  # makes the parser of an answer
    # False if the request says so, or if a marker that the parser looks for is a special token.
    skip_special_tokens: bool
    # Replaces the request's own constraint. It is a grammar for tool calls, or the request's
    # constraint with reasoning allowed before it. None = the request's own constraint is used.
    constraint: StructuredOutputsParams | None = None
    thinking: ThinkingLimit | None = None  # None = reasoning is not limited


def plan_answer(
    body: ChatCompletionRequest, prompt: ChatPrompt, tokenizer: Tokenizer
) -> AnswerPlan:
    """Plan how the answers to this prompt are constrained and parsed.

    Raises:
        InvalidRequestError: the constraint is not valid or cannot be combined with the tools, the
            schema of a tool cannot be enforced, or the model does not support the request's
            reasoning budget.
    """
    use, found = prompt.tools, prompt.traits
    form = AnswerForm(
        reasoning=found.reasoning,
        reasoning_is_open=_ends_in_reasoning(body, prompt),
        shows_reasoning=body.include_reasoning,
        call_format=found.calls.name if use.tools and found.calls is not None else "",
        tool_names=use.names,
        custom_names=use.custom_names,
        parameter_types=_parameter_types(use, found.calls),
        max_calls=None if use.parallel else 1,
        only_calls=use.must_call,
    )
    if use.tools:
        constraint = tool_constraint(use, form, constraint_of(body))
        if constraint is not None and form.call_format:
            form = msgspec.structs.replace(form, is_constrained=True)
    else:
        constraint = behind_reasoning(body, form)
    return AnswerPlan(
        form=form,
        constraint=constraint,
        thinking=_thinking_limit(body, form, tokenizer),
        skip_special_tokens=body.skip_special_tokens
        and not any(tokenizer.is_special(marker) for marker in form.markers),
    )


def _parameter_types(
    use: ToolUse, calls: CallFormat | None
) -> dict[str, dict[str, tuple[str, ...]]]:
    if calls is None or not calls.needs_types:
        return {}
    return {one.name: types_of_parameters(one.parameters) for one in use.callable_tools}


def _ends_in_reasoning(body: ChatCompletionRequest, prompt: ChatPrompt) -> bool:
    """Whether the prompt ends within reasoning, so that the answer begins there."""
    markers = prompt.traits.reasoning
    if markers is None:
        return False
    if body.continue_final_message:  # only the last message counts, not the template's own text
        last = body.messages[-1].text or ""
        return last.rfind(markers.begin) > last.rfind(markers.end)
    return prompt.text.rstrip().endswith(markers.begin)


def _thinking_limit(
    body: ChatCompletionRequest, form: AnswerForm, tokenizer: Tokenizer
) -> ThinkingLimit | None:
    if body.thinking_token_budget is None:
        return None
    markers = form.reasoning
    begin = None if markers is None else _token_id(tokenizer, markers.begin)
    end = None if markers is None else _token_id(tokenizer, markers.end)
    if begin is None or end is None:
        lacks = "no known markers of reasoning"
        if markers is not None:
            lacks = "a marker of reasoning that is several tokens"
        raise InvalidRequestError(
            f"thinking_token_budget is not supported: the model has {lacks}; leave the "
            "parameter out",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    return ThinkingLimit(
        max_tokens=body.thinking_token_budget,
        begin_token_id=begin,
        end_token_id=end,
        is_open=form.reasoning_is_open,
    )


def _token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the token with this text; None if the text takes several tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
