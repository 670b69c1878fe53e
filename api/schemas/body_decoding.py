"""Decodes a JSON body into a schema, with errors that name the field.

A schema has exactly the supported fields. A known field that is not supported is refused with a 400
that names the field. A value without effect (`functions: []`, any null) is accepted. Unknown keys
of chat messages are passed to the chat template.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ostinato.api.base.unsupported_fields import (
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    UNSUPPORTED_WITHIN,
    Unsupported,
    is_no_op,
)
from ostinato.api.schemas.allowed_values import allowed_values, shown_value
from ostinato.api.schemas.conversation import with_gathered_keys
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("decode", "refusal")

T = TypeVar("T", bound=msgspec.Struct)


def decode(body: bytes, schema: type[T], unsupported: Mapping[str, Unsupported] = UNSUPPORTED) -> T:
    """Decode a body as `schema`.

    Args:
        body: the JSON.
        schema: the type of the body.
        unsupported: fields of the API that this server does not support.

    Raises:
        InvalidRequestError: the body is not JSON in UTF-8, or a field is missing, unknown, not
            supported, or has a value that the schema does not allow. The text and `param` name the
            field.
    """
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        return _decode_without_no_ops(body, schema, unsupported, error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(body, error) from error


def _not_json(body: bytes, error: Exception) -> InvalidRequestError:
    why = str(error) if body.strip() else "it is empty"
    return InvalidRequestError(
        f"the body cannot be read as JSON in UTF-8: {why}", code="invalid_json"
    )


def _decode_without_no_ops(
    body: bytes,
    schema: type[T],
    unsupported: Mapping[str, Unsupported],
    first: msgspec.ValidationError,
) -> T:
    """Decode again without nulls and without unsupported fields whose values have no effect."""
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError as error:  # valid JSON with a number that Python cannot hold
        raise InvalidRequestError(
            "the body has a number that is out of range: whole numbers have at most 4300 digits, "
            "and others are less than 1.8e308 away from 0",
            code="invalid_value",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(body, error) from error
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    if isinstance(raw, dict):
        raw = _without_no_ops(raw, known, unsupported)
        messages = raw.get("messages")
        if isinstance(messages, list):
            raw["messages"] = [_message(one, schema, unsupported) for one in messages]
    try:
        return msgspec.json.decode(msgspec.json.encode(raw), type=schema)
    except RecursionError as error:  # unknown keys of a message are one level deeper in `raw`
        raise _not_json(body, error) from error
    except msgspec.ValidationError as error:
        raise refusal(str(error), known, unsupported, schema=schema, body=raw) from first


def _message(
    message: Any, schema: type[msgspec.Struct], unsupported: Mapping[str, Unsupported]
) -> Any:
    """One message, without fields that have no effect. Unknown keys go to `template_fields`."""
    if not isinstance(message, dict):
        return message
    if not getattr(schema, "has_template_fields", False):
        return _without_no_ops(message, set(), unsupported)
    asked = _without_no_ops(message, set(), UNSUPPORTED_IN_MESSAGES)
    return with_gathered_keys(asked, UNSUPPORTED_IN_MESSAGES)


def _without_no_ops(
    fields: dict[str, Any], known: set[str], unsupported: Mapping[str, Unsupported]
) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if (value is not None if name in known else not is_no_op(name, value, unsupported))
    }


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)


_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)


def refusal(
    text: str,
    known: set[str],
    unsupported: Mapping[str, Unsupported],
    *,
    schema: Any,
    body: Any,
    prefix: str = "",
) -> InvalidRequestError:
    """The 400 for the text of a validation error: "Expected `int`, got `str` - at `$.n`".

    Args:
        text: the text of msgspec.
        known: names of the fields of the body.
        unsupported: see `decode`.
        schema: the type that was wanted.
        body: what was decoded.
        prefix: where `body` is in the whole body; "" = it is the whole body.
    """
    problem, _, place = text.partition(" - at ")
    inner = place.replace("`key` in ", "").strip("`").removeprefix("$").removeprefix(".")
    inner = inner.removesuffix("[...]")
    path = ".".join(part for part in (prefix, inner) if part)
    if missing := _MISSING_FIELD.match(problem):
        param = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequestError(f"{param} is required", param=param, code="missing_field")
    if unknown := _UNKNOWN_FIELD.match(problem):
        return _unknown_field(unknown[1][:100], path, known, unsupported)
    subject = path or "the body"
    if place.startswith("`key` in "):
        problem = f"its keys must be whole numbers as text, got {_wrong_key(body, inner)}"
    elif path.endswith(".type") and ".content[" in path:
        problem += f"; parts are {{'type': 'text', 'text': ...}} or {_media_parts(schema)}"
    elif problem.startswith("Invalid ") and (allowed := allowed_values(schema, inner)):
        problem += f"; allowed: {', '.join(allowed)}"
    elif inner and (value := shown_value(body, inner)) is not None:
        subject += f"={value}"
    return InvalidRequestError(f"{subject}: {problem}", param=path or None, code="invalid_value")


def _media_parts(schema: Any) -> str:
    """The parts of a message that are not text."""
    image = "an image (docs/images.md)"
    if not getattr(schema, "takes_all_media", False):
        return image
    return f"{image}, a video (docs/video.md) or audio (docs/audio.md)"


def _wrong_key(body: Any, path: str) -> str:
    """The first key of an object that is not a whole number in its usual form."""
    keys = body.get(path) if isinstance(body, dict) else None
    wrong = (key for key in keys or {} if not re.fullmatch(r"-?(0|[1-9]\d*)", key))
    return repr(next(wrong, "another"))[:100]


def _unknown_field(
    name: str, path: str, known: set[str], unsupported: Mapping[str, Unsupported]
) -> InvalidRequestError:
    param = f"{path}.{name}".lstrip(".")
    unsupported = {**unsupported, **UNSUPPORTED_WITHIN.get(path, {})}
    if name in unsupported:
        entry = unsupported[name]
        return InvalidRequestError(
            f"{param} is not supported: "
            + (
                f"give {entry.instead} instead"
                if entry.instead
                else f"it needs {entry.missing_feature}, which this server does not have yet;"
                " leave it out"
            ),
            param=param,
            code="unsupported_parameter",
        )
    close = difflib.get_close_matches(name, known, n=1) if not path else []
    hint = f"; did you mean {close[0]}?" if close else "; leave it out"
    return InvalidRequestError(
        f"{param} is not a field of this endpoint{hint}", param=param, code="unknown_parameter"
    )
