"""The fields of the forms of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import msgspec.inspect

from ostinato.api.audio.form_fields import FILE, Form
from ostinato.api.base.unsupported_fields import Unsupported
from ostinato.api.schemas.body_decoding import refusal
from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.runtime.errors import InvalidRequestError

__all__ = (
    "UNSUPPORTED_IN_FORMS",
    "ReadFields",
    "ResponseFormat",
    "TranscriptionFields",
    "TranscriptionForm",
    "read_fields",
)

T = TypeVar("T", bound=msgspec.Struct)
ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
_GRANULARITIES, _INCLUDE = "timestamp_granularities[]", "include[]"


class TranscriptionFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that only these endpoints have. An empty value counts as absent."""

    model: str | None = None  # absent = the served model
    # The spoken language: a code such as "de", or an English name. Absent = it is detected.
    language: str | None = None
    prompt: str = ""  # text before the audio: it shows spelling and style
    response_format: ResponseFormat = "json"
    timestamp_granularities: list[Literal["segment"]] = msgspec.field(
        name=_GRANULARITIES, default_factory=list
    )
    include: list[Literal["logprobs"]] = msgspec.field(name=_INCLUDE, default_factory=list)
    stream: bool = False
    stream_include_usage: bool = True  # has no effect: the last event always has the usage
    chunking_strategy: Literal["auto"] | None = None  # how long audio is always cut
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # of each window


class ReadFields(NamedTuple):
    """The fields of a form, by the types that check them."""

    own: TranscriptionFields
    sampling: GenerationFields


# Numbers of `GenerationFields` that a form does not have.
_OTHER_NUMBERS = (
    "best_of",
    "length_penalty",
    "max_tokens",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "stream_interval",
    "truncate_prompt_tokens",
)
_TEXTS = ("cache_salt", "request_id", "user")


def _is_number(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _is_number(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return all(map(_is_number, kind.types))
    numbers = (msgspec.inspect.IntType, msgspec.inspect.FloatType, msgspec.inspect.NoneType)
    return isinstance(kind, numbers)


def _shared_names() -> tuple[str, ...]:
    described = msgspec.inspect.type_info(GenerationFields)
    assert isinstance(described, msgspec.inspect.StructType), "it is a struct"
    return tuple(
        field.name
        for field in described.fields
        if field.name in _TEXTS or (_is_number(field.type) and field.name not in _OTHER_NUMBERS)
    )


_SHARED = _shared_names()  # the fields of `GenerationFields` that a form has: numbers and labels
_OWN = {field.encode_name: field for field in msgspec.structs.fields(TranscriptionFields)}
_LISTS = {_GRANULARITIES: ("segment",), _INCLUDE: ("logprobs",)}  # and the values of each
_KNOWN = {FILE, *_OWN, *_SHARED}

_File = Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
TranscriptionForm = msgspec.defstruct(
    "TranscriptionForm",
    [
        (FILE, _File),
        *((field.name, field.type, None) for field in msgspec.structs.fields(GenerationFields)
          if field.name in _SHARED),
    ],
    bases=(TranscriptionFields,),
    kw_only=True,
    forbid_unknown_fields=True,
)  # fmt: skip
TranscriptionForm.__doc__ = "All fields of a form, for the OpenAPI document."

_SPEAKERS = "models that tell speakers apart"
_ONE = "several transcripts of one file"
UNSUPPORTED_IN_FORMS: Mapping[str, Unsupported] = {
    "best_of": Unsupported(_ONE, ("1",)),
    "hotwords": Unsupported("words with a higher probability", instead="prompt"),
    "include_stop_str_in_output": Unsupported("stop strings in transcripts", ("false", "False")),
    "keywords": Unsupported("words with a higher probability", instead="prompt"),
    "known_speaker_names": Unsupported(_SPEAKERS),
    "known_speaker_references": Unsupported(_SPEAKERS),
    "languages": Unsupported("a choice among several languages", instead="language"),
    "length_penalty": Unsupported("beam search in transcripts", ("1", "1.0")),
    "max_tokens": Unsupported("this name of the field", instead="max_completion_tokens"),
    "n": Unsupported(_ONE, ("1",)),
    "stream_continuous_usage_stats": Unsupported(
        "the usage in each event", ("false", "False"), instead="stream_include_usage"
    ),
    "to_language": Unsupported("translation into other languages than English", ("en",)),
    "use_beam_search": Unsupported("beam search in transcripts", ("false", "False")),
    "vllm_xargs": Unsupported("custom logits processors"),
}


def read_fields(form: Form) -> ReadFields:
    """Check the fields of a form.

    Raises:
        InvalidRequestError: a field is missing, unknown, not supported, given twice, has a value
            that is not allowed, or contradicts another field. The text and `param` name the field.
    """
    own: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, values in form.texts.items():
        name = f"{name}[]" if f"{name}[]" in _LISTS else name
        if name in _LISTS:
            own.setdefault(name, []).extend(value for value in values if value)
            continue
        value = _only(name, values)
        if (value == "" and name in _KNOWN) or value in _no_ops(name):
            continue
        (shared if name in _SHARED else own)[name] = value
    _refuse_by_value(own)
    fields = ReadFields(_converted(own, TranscriptionFields), _converted(shared, GenerationFields))
    _check(fields.own)
    if form.file is None:
        raise InvalidRequestError(
            f"{FILE} is required: send the audio as a file (curl: -F {FILE}=@speech.wav)",
            param=FILE,
            code="missing_field",
        )
    return fields


def _only(name: str, values: list[str]) -> str:
    if len(values) > 1:
        raise InvalidRequestError(
            f"{name[:100]} is given {len(values)} times; give it once",
            param=name[:100],
            code="invalid_value",
        )
    return values[0]


def _no_ops(name: str) -> tuple[str, ...]:
    return UNSUPPORTED_IN_FORMS[name].no_op_values if name in UNSUPPORTED_IN_FORMS else ()


def _refuse_by_value(own: Mapping[str, Any]) -> None:
    """Refuse values that OpenAI allows, with the remedy, and the parts of nested fields."""
    if "word" in own.get(_GRANULARITIES, ()):
        raise _unsupported(
            f"{_GRANULARITIES}=word is not supported: this server gives the times of segments;"
            f" send {_GRANULARITIES}=segment",
            _GRANULARITIES,
        )
    for name, allowed in _LISTS.items():
        for value in own.get(name, ()):
            if value not in allowed:
                raise _invalid(
                    f"{name}={value[:40]!r} is not allowed; allowed: {', '.join(allowed)}", name
                )
    if own.get("response_format") == "diarized_json":
        raise _unsupported(
            f"response_format=diarized_json is not supported: it needs {_SPEAKERS}; use"
            " verbose_json, which has the times of segments",
            "response_format",
        )
    for name in own:
        base, bracket, _ = name.partition("[")
        if base == "chunking_strategy" and (bracket or own[name].lstrip().startswith("{")):
            raise _unsupported(
                "chunking_strategy must be auto: this server cuts long audio at quiet places, and"
                " has no settings for that; leave the object out",
                "chunking_strategy",
            )
        if bracket and base in UNSUPPORTED_IN_FORMS:
            raise refusal(
                f"Object contains unknown field `{base}`",
                _KNOWN,
                UNSUPPORTED_IN_FORMS,
                schema=TranscriptionFields,
                body=own,
            )
        if name not in _OWN and not name.isidentifier():
            shown = name[:100] or "a field without a name"
            raise InvalidRequestError(
                f"{shown} is not a field of this endpoint; leave it out",
                param=name[:100],
                code="unknown_parameter",
            )


def _converted(values: dict[str, Any], schema: type[T]) -> T:
    try:
        return msgspec.convert(values, schema, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(
            str(error), _KNOWN, UNSUPPORTED_IN_FORMS, schema=schema, body=values
        ) from error


def _check(fields: TranscriptionFields) -> None:
    """Refuse fields that contradict each other."""
    form = fields.response_format
    if fields.timestamp_granularities and form != "verbose_json":
        raise _invalid(
            f"{_GRANULARITIES} needs response_format=verbose_json, which has times; the format is"
            f" {form}",
            _GRANULARITIES,
        )
    if fields.include and form != "json":
        raise _invalid(
            f"{_INCLUDE}=logprobs needs response_format=json; the format is {form}", _INCLUDE
        )
    if fields.stream and form not in ("json", "text"):
        raise _invalid(
            f"stream=true needs response_format=json or text: events have no times; the format is"
            f" {form}",
            "stream",
        )


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_value")


def _unsupported(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="unsupported_parameter")
