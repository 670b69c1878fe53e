"""Converts a chat request to the engine's request, for all chat APIs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ostinato.api.chat.answer_plan import plan_answer
from ostinato.api.chat.chat_prompt import encode_chat
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.preparation.generation import Generation, make_generations, with_thinking
from ostinato.api.preparation.preparation import Arrival, Preparation
from ostinato.api.preparation.prompt_report import PromptReport, prompt_report
from ostinato.api.schemas.chat_completions import ChatCompletionRequest, Prediction
from ostinato.api.schemas.response_format import NO_CONSTRAINT, constraint_field
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedTask

__all__ = ("ChatGeneration", "count_chat", "prepare_chat", "to_generation")


class ChatGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request that is ready for the engine."""

    generation: Generation
    form: AnswerForm  # makes the parser of its answers
    constraint_field: str  # the field of the request that has the constraint
    report: PromptReport  # the parts of the prompt that the reply shows


def count_chat(preparation: Preparation, body: ChatCompletionRequest, arrival: Arrival) -> int:
    """Count the prompt tokens of a request.

    The checks are those of `encode_chat` and `plan_answer`, but the prompt may be longer than the
    context.

    Raises:
        InvalidRequestError: the model does not generate, or `encode_chat` or `plan_answer` refuses
            the request.
        FetchNeededError: see `encode_chat`.
        ForkNeededError: see `encode_chat`.
    """
    require_task(preparation.model, ServedTask.generate)
    prompt = encode_chat(preparation, body, arrival, is_counted=True)
    plan_answer(body, prompt, preparation.encoder.tokenizer("messages"))
    return len(prompt.token_ids)


def prepare_chat(
    preparation: Preparation, body: ChatCompletionRequest, arrival: Arrival, *, request_id: str
) -> ChatGeneration:
    """Check a chat request and convert it. The engine's client makes the remaining checks later.

    Args:
        preparation: the model, its tokenizer and the server's settings.
        body: the request.
        arrival: has the media that were fetched.
        request_id: the id that the client sees.

    Raises:
        InvalidRequestError: a parameter is out of range, `prediction` is not supported, or
            `encode_chat` or `plan_answer` refuses the request.
        FetchNeededError: see `encode_chat`.
        ForkNeededError: see `encode_chat`.
    """
    require_task(preparation.model, ServedTask.generate)
    prompt = encode_chat(preparation, body, arrival)
    plan = plan_answer(body, prompt, preparation.encoder.tokenizer("messages"))
    original = body
    body = msgspec.structs.replace(body, skip_special_tokens=plan.skip_special_tokens)
    constraint_name = constraint_field(body)
    if plan.constraint is not None:
        constraint_name = "tools" if plan.form.call_format else constraint_name
        constraint = {**NO_CONSTRAINT, "structured_outputs": plan.constraint}
        body = msgspec.structs.replace(body, **constraint)
    generation = to_generation(preparation, body, prompt.token_ids, request_id=request_id)
    if prompt.images or prompt.sounds:
        generation = msgspec.structs.replace(generation, images=prompt.images, sounds=prompt.sounds)
    if plan.thinking is not None:
        generation = with_thinking(generation, plan.thinking)
    if body.prediction is not None:
        predicted = _encode_prediction(preparation, body, body.prediction)
        generation = msgspec.structs.replace(generation, prediction_token_ids=predicted)
    return ChatGeneration(
        generation=generation,
        form=plan.form,
        constraint_field=constraint_name,
        report=prompt_report(
            preparation.encoder,
            original,
            prompt.text,
            generation,
            add_special_tokens=original.add_special_tokens,
        ),
    )


def _encode_prediction(
    preparation: Preparation, body: ChatCompletionRequest, prediction: Prediction
) -> list[int]:
    """The tokens of a predicted answer, cut to the length of the context.

    Raises:
        InvalidRequestError: the server or the request does not use drafts.
    """
    model, reason = preparation.model, ""
    if not model.speculates:
        reason = "needs drafts, and this server has none: start it with speculation.method=auto"
    elif not body.speculation or body.use_beam_search:
        name = "use_beam_search=true" if body.use_beam_search else "speculation=false"
        reason = f"has no effect with {name}, which has no drafts; leave one of them out"
    if reason:
        raise InvalidRequestError(
            f"prediction {reason}", param="prediction", code="unsupported_parameter"
        )
    preparation.begin_prompt("prediction")
    token_ids = preparation.encoder.tokenizer("prediction").encode_truncated(
        prediction.text, model.max_model_len, side="right", add_special_tokens=False
    )
    return [token_id for token_id in token_ids if token_id < model.vocab_size]


def to_generation(
    preparation: Preparation,
    body: ChatCompletionRequest,
    prompt_token_ids: list[int],
    *,
    request_id: str,
) -> Generation:
    """The prompt with its sampling parameters; see `make_generations`."""
    newer_name = body.max_completion_tokens is not None
    names: Mapping[str, str] = {
        "prompt": "messages",
        "max_tokens": "max_completion_tokens" if newer_name else "max_tokens",
        "logprobs": "top_logprobs",
    }
    [generation] = make_generations(
        body,
        [prompt_token_ids],
        preparation,
        request_id=request_id,
        max_tokens=body.max_completion_tokens if newer_name else body.max_tokens,
        reports={
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "prompt_logprobs": body.prompt_logprobs,
        },
        field_names=names,
    )
    return generation
