"""Reads a body of multipart/form-data: one file, and fields with texts.

It runs in a fork (`api/preparation/preparer.py`), which has limits of time and memory.
"""

from __future__ import annotations

from typing import NamedTuple

from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from ostinato.runtime.errors import InvalidRequestError

__all__ = ("FILE", "Form", "parse_form")

FILE = "file"  # the field that has the file
_MAX_FIELDS = 256
_MAX_TEXT_BYTES = 64 << 10  # of one field
_MAX_BOUNDARY = 200  # characters; RFC 2046 allows 70
_MAX_HEADERS = 16  # of one field
_MAX_HEADER_BYTES = 4096
_SHOWN = 100  # characters of a name in errors


class Form(NamedTuple):
    """The parts of a form."""

    file: bytes | None  # None = there is no file
    texts: dict[str, list[str]]  # name of a field -> its values, in the order of the body


def parse_form(data: bytes, content_type: str) -> Form:
    """The parts of a form.

    Args:
        data: the body.
        content_type: the header, which has the boundary between the parts.

    Raises:
        InvalidRequestError: the body is not a complete form, it has too many fields, a text is too
            long or not in UTF-8, there are several files, or a file has another name than `FILE`.
    """
    form = Form(None, {})
    segment: MultipartSegment | None = None
    value = bytearray()
    parser = _parser(content_type)
    try:
        for event in parser.parse(data):
            if isinstance(event, MultipartSegment):
                segment, value = event, bytearray()
            elif event is None:
                assert segment is not None, "a part begins with its headers"
                form = _with_part(form, segment, value)
            else:
                value += event
                _check_size(segment, len(value))
        parser.close()
    except ParserLimitReached as error:
        raise _invalid(
            f"the form has more than {_MAX_FIELDS} fields, or a field with more than"
            f" {_MAX_HEADERS} headers or a header of more than {_MAX_HEADER_BYTES} bytes; send less"
        ) from error
    except MultipartError as error:
        raise _invalid(
            f"the body cannot be read as multipart/form-data: {str(error)[:_SHOWN]}; it must be"
            " complete and end with its boundary"
        ) from error
    return form


def _parser(content_type: str) -> PushMultipartParser:
    _, options = parse_options_header(content_type)
    boundary = options.get("boundary", "")
    if not 1 <= len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise _invalid(
            f"the header Content-Type has the boundary {boundary[:_SHOWN]!r}; it must be 1 to"
            f" {_MAX_BOUNDARY} ASCII characters (clients such as curl -F make one)"
        )
    try:
        return PushMultipartParser(
            boundary,
            max_header_size=_MAX_HEADER_BYTES,
            max_header_count=_MAX_HEADERS,
            max_segment_count=_MAX_FIELDS,
        )
    except MultipartError as error:
        raise _invalid(f"the boundary in the header Content-Type: {error}") from error


def _with_part(form: Form, segment: MultipartSegment, value: bytearray) -> Form:
    name = segment.name or ""
    if segment.filename is None and name != FILE:
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            shown = name[:_SHOWN]
            raise _invalid(f"{shown} is not text in UTF-8; send UTF-8", name) from error
        form.texts.setdefault(name, []).append(text)
        return form
    if name != FILE:
        raise _invalid(
            f"{name[:_SHOWN]} is a file; only the field {FILE} can be one: send the others as text",
            name,
        )
    if segment.filename is None:
        raise _invalid(
            f"{FILE} is a text; send the audio as a file (curl: -F {FILE}=@speech.wav)", FILE
        )
    if form.file is not None:
        raise _invalid(f"the form has several fields {FILE}; send one file in a request", FILE)
    return form._replace(file=bytes(value))


def _check_size(segment: MultipartSegment | None, size: int) -> None:
    assert segment is not None, "a part begins with its headers"
    if size > _MAX_TEXT_BYTES and segment.name != FILE:
        name = segment.name or ""
        raise _invalid(
            f"{name[:_SHOWN]} has more than {_MAX_TEXT_BYTES} bytes, the most of a field; shorten"
            " it",
            name,
        )


def _invalid(message: str, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(
        message, param=None if param is None else param[:_SHOWN], code="invalid_form"
    )
