"""Converts the fields of a request to sampling parameters and checks them, for all APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.api.schemas.response_format import constraint_field, constraint_of
from ostinato.runtime.client.requests import check_sampling, fit_prompt, truncate
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.audio import PromptAudio, PromptSound
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import SamplingParams, ThinkingLimit

__all__ = (
    "Generation",
    "GenerationDefaults",
    "check_fields",
    "check_model",
    "make_generations",
    "num_media_bytes",
    "sampling_params",
    "with_thinking",
)

# The parameters that a request body and `SamplingParams` have under the same name. They are copied
# by this name, except the two names below.
_COPIED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationFields.__struct_fields__
    and name not in ("max_tokens", "structured_outputs")
)
# Lists in which order and repetitions have no meaning.
_SETS = tuple(
    name for name in _COPIED if name.endswith("_token_ids") and name != "logprob_token_ids"
)
_NUM_LISTED = 5  # adapters that an error lists
# Defaults of generation_config.json that a beam search does not use.
_NOT_IN_BEAM_SEARCH = ("temperature", "top_p", "top_k", "min_p")


class GenerationDefaults(Protocol):
    """The model and the server's settings that complete the parameters of a request."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def default_max_tokens(self) -> int | None:
        """`sampling.max_tokens`; None = up to the end of the context."""
        ...

    def encode_bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        """The tokens of `bad_words`."""
        ...


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for the engine, with checked parameters."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    bad_words_token_ids: list[list[int]] = []  # the token ids of `sampling.bad_words`
    prediction_token_ids: list[int] = []  # the client's guess of the answer
    images: list[PromptImage] = []  # in the order of the prompt
    audio: PromptAudio | None = None  # what an encoder-decoder model transcribes
    sounds: list[PromptSound] = []  # in the order of the prompt
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: float | None = None  # milliseconds after the request's arrival


def check_model(name: str | None, model: ServedModel, adapters: Sequence[str] = ()) -> None:
    """Raises InvalidRequestError (404) if a request names a model that is not served.

    Args:
        name: the name; None = the served model.
        model: the served model.
        adapters: the names of the loaded adapters.
    """
    if name is not None and name != model.name and name not in adapters:
        raise InvalidRequestError(
            f"the model {name[:200]!r} does not exist; this server has {model.name!r}"
            f"{_listed(adapters)}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _listed(adapters: Sequence[str]) -> str:
    """The first names of the loaded adapters, as the end of a sentence; empty without adapters."""
    if not adapters:
        return ""
    names = ", ".join(repr(name[:80]) for name in adapters[:_NUM_LISTED])
    more = len(adapters) - _NUM_LISTED
    return f" and the adapters {names}{f' and {more} more' if more > 0 else ''}"


def check_fields(fields: GenerationFields) -> None:
    """Raises InvalidRequestError if fields of the request contradict each other."""
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
            "prompt_logprobs needs stream=false: chunks have no field for them",
            param="prompt_logprobs",
            code="invalid_value",
        )


def make_generations(
    fields: GenerationFields,
    prompts_token_ids: Sequence[list[int]],
    defaults: GenerationDefaults,
    *,
    request_id: str,
    max_tokens: int | None,
    reports: Mapping[str, int | None],
    field_names: Mapping[str, str],
) -> list[Generation]:
    """The prompts of a request with its parameters, which are checked once.

    A parameter that the request does not set comes from the model's generation_config.json, else
    from the defaults of `SamplingParams`. `max_tokens` comes from the server's settings instead.

    Args:
        defaults: values of the model and the server for fields that the body leaves out.
        max_tokens: the limit that the request sets; None = `default_max_tokens`.
        reports: `logprobs` and `prompt_logprobs` -> number of alternatives per position; None = no
            log-probabilities.
        field_names: parameter of `SamplingParams`, or `prompt` -> the API's name of it, for error
            messages. Other names are the same.

    Raises:
        InvalidRequestError: a value is out of range, the constraint is not valid, a word of
            `bad_words` is refused, or the prompt does not fit.
    """
    field_names = {**field_names, "structured_outputs": constraint_field(fields)}
    try:
        sampling = sampling_params(fields, defaults.model, max_tokens=max_tokens, **reports)
        check_sampling(sampling, defaults.model)
        fitted = [_fitted(token_ids, sampling, defaults) for token_ids in prompts_token_ids]
        words = defaults.encode_bad_words(sampling.bad_words) if sampling.bad_words else []
    except ValueError as error:
        name = str(error).partition(" must be ")[0]
        raise _refusal(str(error), name, "invalid_value", field_names) from error
    except InvalidRequestError as error:
        raise _refusal(str(error), error.param or "", error.code, field_names) from error
    return [
        Generation(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=own,
            bad_words_token_ids=words,
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            deadline_ms=fields.deadline_ms,
        )
        for prompt_token_ids, own in fitted
    ]


def _fitted(
    prompt_token_ids: list[int], sampling: SamplingParams, defaults: GenerationDefaults
) -> tuple[list[int], SamplingParams]:
    """The prompt after truncation, and the parameters with its `max_tokens`."""
    model, most = defaults.model, defaults.default_max_tokens
    prompt_token_ids = truncate(prompt_token_ids, sampling, model, default_max_tokens=most)
    if sampling.max_tokens is None and most is not None:
        room = model.max_model_len - len(prompt_token_ids)
        sampling = sampling.with_max_tokens(max(1, min(most, room)))
    return prompt_token_ids, fit_prompt(prompt_token_ids, sampling, model)


def sampling_params(
    fields: GenerationFields, model: ServedModel, *, max_tokens: int | None, **reports: int | None
) -> SamplingParams:
    """The sampling parameters of a request; a null field takes the model's default.

    Raises:
        ValueError: a value is out of its range.
        InvalidRequestError: `constraint_of` refuses the constraint.
    """
    model_defaults = {
        name: value
        for name, value in model.default_sampling.items()
        if not (fields.use_beam_search and name in _NOT_IN_BEAM_SEARCH)
    }
    # Numbers of generation_config.json arrive as floats, even top_k, so `strict` is false.
    defaults = msgspec.convert(model_defaults, SamplingParams, strict=False)
    given: dict[str, Any] = {name: getattr(fields, name) for name in _COPIED}
    given["stop"] = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    given["logprob_token_ids"] = fields.logprob_token_ids or None  # an empty list counts as null
    for name in _SETS:
        if given[name] is not None:  # a request can repeat an id a million times
            given[name] = list(dict.fromkeys(given[name]))
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    values |= {**reports, "max_tokens": max_tokens, "structured_outputs": constraint_of(fields)}
    return msgspec.structs.replace(defaults, **values)


def with_thinking(generation: Generation, limit: ThinkingLimit) -> Generation:
    """A copy with a limit on its reasoning.

    Raises:
        InvalidRequestError: the limit cannot be combined with the other parameters.
    """
    try:
        sampling = msgspec.structs.replace(generation.sampling, thinking=limit)
    except ValueError as error:
        raise InvalidRequestError(
            str(error), param="thinking_token_budget", code="invalid_value"
        ) from error
    return msgspec.structs.replace(generation, sampling=sampling)


def num_media_bytes(generations: Sequence[Generation]) -> int:
    """Bytes of the images, videos and audio of a request. Equal ones count once."""
    sizes = {
        medium.digest: len(medium.data)
        for one in generations
        for medium in (*one.images, *one.sounds)
    }
    sizes |= {one.audio.digest: len(one.audio.data) for one in generations if one.audio is not None}
    return sum(sizes.values())


def _refusal(
    message: str, name: str, code: str | None, field_names: Mapping[str, str]
) -> InvalidRequestError:
    """The error, with the API's name of the parameter."""
    param = field_names.get(name, name)
    if message.startswith(name):
        message = param + message.removeprefix(name)
        message = message.replace(f"set {name} to", f"set {param} to")
    return InvalidRequestError(message, param=param or None, code=code)
