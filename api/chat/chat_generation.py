"""From a chat request to the engine's request, for every dialect that is converted to chat."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ostinato.api.base.errors import renamed
from ostinato.api.base.request_context import RequestContext
from ostinato.api.chat.answer_plan import AnswerPlan, plan_answer
from ostinato.api.chat.chat_prompt import ChatPrompt, encode_chat
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.response_format import NO_CONSTRAINT, constraint_field
from ostinato.api.service.generation import Generation, make_generation, with_thinking
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.types.engine_info import ServedModel, ServedTask

__all__ = ("ChatGeneration", "plan_chat", "prepare_chat", "to_generation")


class ChatGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request that is ready for the engine."""

    generation: Generation
    form: AnswerForm  # makes the parser of its answers
    prompt_text: str


async def plan_chat(service: Service, body: ChatCompletionRequest) -> tuple[ChatPrompt, AnswerPlan]:
    """The prompt, and what its answers may be.

    Raises:
        InvalidRequestError: the model does not generate; or as `encode_chat` and `plan_answer`.
    """
    require_task(service.client.model, ServedTask.generate)
    prompt = await encode_chat(service, body)
    return prompt, plan_answer(body, prompt, service.encoder.tokenizer("messages"))


async def prepare_chat(
    service: Service, body: ChatCompletionRequest, *, request_id: str, context: RequestContext
) -> ChatGeneration:
    """Check a chat request completely; nothing is refused after this.

    Args:
        request_id: the id that the client sees.

    Raises:
        InvalidRequestError: a parameter is out of range, a constraint is not valid, or the prompt
            does not fit.
        OverloadedError: the queue is full.
    """
    prompt, plan = await plan_chat(service, body)
    body = msgspec.structs.replace(body, skip_special_tokens=plan.skip_special_tokens)
    names = {}
    if plan.constraint is not None:
        names["structured_outputs"] = _constraint_field(body, plan)
        constraint = {**NO_CONSTRAINT, "structured_outputs": plan.constraint}
        body = msgspec.structs.replace(body, **constraint)
    generation = to_generation(
        body,
        prompt.token_ids,
        service.client.model,
        request_id=request_id,
        default_max_tokens=service.sampling.max_tokens,
    )
    if plan.thinking is not None:
        generation = with_thinking(generation, plan.thinking)
    with renamed(names):
        await service.runner.prepare(body, [generation], context)
    return ChatGeneration(generation=generation, form=plan.form, prompt_text=prompt.text)


def to_generation(
    body: ChatCompletionRequest,
    prompt_token_ids: list[int],
    model: ServedModel,
    *,
    request_id: str,
    default_max_tokens: int | None,
) -> Generation:
    """The prompt with its sampling parameters; see `make_generation`."""
    newer_name = body.max_completion_tokens is not None
    names: Mapping[str, str] = {
        "prompt": "messages",
        "max_tokens": "max_completion_tokens" if newer_name else "max_tokens",
        "logprobs": "top_logprobs",
    }
    return make_generation(
        body,
        prompt_token_ids,
        model,
        request_id=request_id,
        max_tokens=body.max_completion_tokens if newer_name else body.max_tokens,
        default_max_tokens=default_max_tokens,
        reports={
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "prompt_logprobs": body.prompt_logprobs,
        },
        field_names=names,
    )


def _constraint_field(body: ChatCompletionRequest, plan: AnswerPlan) -> str:
    """The field of the request that the constraint comes from, for error messages."""
    if plan.form.calls is not None:
        return "tools"
    return constraint_field(body)
