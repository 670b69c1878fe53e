"""From a request's fields to what the engine is asked, and the bookkeeping of one reply.

Pure functions and plain data, shared by the chat and the completions dialect.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

import msgspec

from ostinato.api.base.timeline import RequestContext
from ostinato.api.schemas.openai import (
    CompletionTokensDetails,
    GenerationFields,
    PromptTokensDetails,
    Usage,
)
from ostinato.api.schemas.response_format import constraint_of
from ostinato.runtime.client.requests import resolve_sampling, truncate
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs
from ostinato.runtime.types.params import SamplingParams, ThinkingLimit

__all__ = (
    "CollectedCompletion",
    "Generation",
    "ReplyHead",
    "ReplyOptions",
    "Tally",
    "check_fields",
    "check_model",
    "collect",
    "make_generation",
    "new_id",
    "with_thinking",
)

# Sampling fields that a model's generation_config.json may set; the names are the same everywhere.
_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "length_penalty",
    "early_stopping",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "truncate_prompt_tokens",
)

_FOR_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for the engine; nothing in it can be refused any more."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: float | None = None  # since the request's arrival


def with_thinking(generation: Generation, limit: ThinkingLimit) -> Generation:
    """The same with a limit on its reasoning.

    Raises:
        InvalidRequestError: it does not go with the other parameters.
    """
    try:
        sampling = msgspec.structs.replace(generation.sampling, thinking=limit)
    except ValueError as error:
        raise InvalidRequestError(
            str(error), param="thinking_token_budget", code="invalid_value"
        ) from error
    return msgspec.structs.replace(generation, sampling=sampling)


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk of one reply repeats."""

    id: str
    created: int  # unix seconds
    model: str


class ReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What of the news a reply shows."""

    num_top_logprobs: int | None = None  # alternatives per token; None = no log-probabilities
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens
    return_token_ids: bool = False
    as_token_ids: bool = False  # log-probabilities name tokens `token_id:N`

    def token_ids(self, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
        """The ids, when they are asked for."""
        return token_ids if self.return_token_ids else msgspec.UNSET


class CollectedCompletion(msgspec.Struct, kw_only=True):
    """All news of one completion, joined."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Tally:
    """Tokens of one reply, counted as they come: the prompts once, all completions of each.

    Args:
        num_prompt_tokens: of all prompts.
    """

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> Self:
        """For the reply to these prompts."""
        return cls(sum(len(one.prompt_token_ids) for one in generations))

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_reasoning_tokens: int | None = None  # of those; None = the model does not reason
        self._cached: dict[int, int] = {}

    def add(self, prompt_index: int, output: RequestOutput, num_reasoning_tokens: int = 0) -> None:
        if self.num_reasoning_tokens is not None:
            self.num_reasoning_tokens += num_reasoning_tokens
        self.num_output_tokens += len(output.new_token_ids) + output.num_discarded_tokens
        if output.index == 0:  # the others share this one's blocks by design
            self._cached[prompt_index] = output.num_cached_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached.values())),
            completion_tokens_details=(
                msgspec.UNSET
                if self.num_reasoning_tokens is None
                else CompletionTokensDetails(self.num_reasoning_tokens)
            ),
        )


class Named(Protocol):
    """A body that may name its reply."""

    @property
    def request_id(self) -> str | None: ...


def new_id(prefix: str, fields: Named, context: RequestContext) -> str:
    """The reply's id after the dialect's prefix: the body's `request_id`, the header's, or new."""
    return f"{prefix}-{fields.request_id or context.request_id or secrets.token_hex(16)}"


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises InvalidRequestError (404) when `name` is not the model that is served."""
    if name is not None and name != model.name:
        raise InvalidRequestError(
            f"the model {name[:200]!r} does not exist; this server has {model.name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def check_fields(fields: GenerationFields) -> None:
    """Raises InvalidRequestError for fields of both dialects that contradict each other."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError(
            "stream_options needs stream=true", param="stream_options", code="invalid_value"
        )
    if (fields.stream_interval or 1) > 1 and not fields.stream:
        raise InvalidRequestError(
            f"stream_interval={fields.stream_interval} needs stream=true: without it there is one"
            " answer",
            param="stream_interval",
            code="invalid_value",
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequestError(
            "prompt_logprobs needs stream=false: chunks have no place for them",
            param="prompt_logprobs",
            code="invalid_value",
        )


def make_generation(
    fields: GenerationFields,
    prompt_token_ids: list[int],
    model: ServedModel,
    *,
    request_id: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
    reports: Mapping[str, int | None],
    field_names: Mapping[str, str],
) -> Generation:
    """One prompt with its resolved parameters: the request's, else the model's, else ours.

    Args:
        max_tokens: what the request asks for; None = `default_max_tokens`.
        default_max_tokens: `sampling.max_tokens`; None = up to the context's end.
        reports: `logprobs` and `prompt_logprobs`: likeliest tokens to report per position; None =
            no log-probabilities.
        field_names: the dialect's names of `prompt` and `max_tokens`, for refusals.

    Raises:
        InvalidRequestError: a value is out of range, or the prompt does not fit.
    """
    if fields.structured_outputs is None:
        field_names = {**field_names, "structured_outputs": "response_format"}
    try:
        sampling = _sampling(fields, model, max_tokens, reports)
        prompt_token_ids = truncate(prompt_token_ids, sampling, model)
        if max_tokens is None and default_max_tokens is not None:
            room = model.max_model_len - len(prompt_token_ids)
            max_tokens = max(1, min(default_max_tokens, room))
            sampling = _sampling(fields, model, max_tokens, reports)
        sampling = resolve_sampling(prompt_token_ids, sampling, model)
    except ValueError as error:
        name = str(error).partition(" must be ")[0]
        raise _refusal(str(error), name, "invalid_value", field_names) from error
    except InvalidRequestError as error:
        raise _refusal(str(error), error.param or "", error.code, field_names) from error
    return Generation(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        deadline_ms=fields.deadline_ms,
    )


def _refusal(
    message: str, name: str, code: str | None, field_names: Mapping[str, str]
) -> InvalidRequestError:
    """A refusal that begins with a parameter's name, in the dialect's words."""
    param = field_names.get(name, name)
    if message.startswith(name):
        message = param + message.removeprefix(name)
    return InvalidRequestError(message, param=param or None, code=code)


def _sampling(
    fields: GenerationFields,
    model: ServedModel,
    max_tokens: int | None,
    reports: Mapping[str, int | None],
) -> SamplingParams:
    """Raises ValueError when a value is out of its range."""
    # A beam search does not sample: what the model's author sets for sampling is not for it.
    model_defaults = {
        name: value
        for name, value in model.default_sampling.items()
        if not (fields.use_beam_search and name in _FOR_SAMPLING)
    }
    # The defaults crossed the border as floats, top_k among them: hence not strict.
    defaults = msgspec.convert(model_defaults, SamplingParams, strict=False)
    given: dict[str, Any] = {name: getattr(fields, name) for name in _SAMPLING_FIELDS}
    return msgspec.structs.replace(
        defaults,
        **{name: value for name, value in given.items() if value is not None},
        use_beam_search=fields.use_beam_search,
        max_tokens=max_tokens,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        include_stop_str_in_output=fields.include_stop_str_in_output,
        ignore_eos=fields.ignore_eos,
        allowed_token_ids=(
            None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids)
        ),
        bad_words=tuple(fields.bad_words or ()),
        truncation_side=fields.truncation_side,
        # None chosen is as none asked for.
        logprob_token_ids=tuple(fields.logprob_token_ids or ()) or None,
        repetition_detection=fields.repetition_detection,
        skip_special_tokens=fields.skip_special_tokens,
        structured_outputs=constraint_of(fields),
        **reports,
    )


def collect(
    completions: dict[tuple[int, int], CollectedCompletion],
    prompt_index: int,
    output: RequestOutput,
) -> None:
    """Joins one piece of news to its completion in `completions`, keyed (prompt, index)."""
    one = completions.setdefault((prompt_index, output.index), CollectedCompletion())
    one.text += output.text_delta
    one.token_ids += output.new_token_ids
    one.logprobs += output.logprobs or ()
    if output.prompt_logprobs is not None:
        one.prompt_logprobs = output.prompt_logprobs
    one.finish_reason = output.finish_reason
    one.stop_reason = output.stop_reason
