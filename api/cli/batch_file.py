"""Reads and writes the files of `run batch`: one JSON object a line, as in OpenAI's batch API.

Each answer is appended to the output file as one line. So after an interruption the file shows
which requests have answers. An interruption can leave the last line incomplete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from ostinato.runtime.errors import InvalidRequestError

__all__ = ("BatchInput", "BatchLine", "BatchOutput", "answered_line", "refused_line")


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class _Streams(msgspec.Struct, frozen=True):
    stream: Any = None


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input. A line with a `problem` cannot be sent."""

    number: int  # line number, from 1
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    problem: str | None = None

    @property
    def id(self) -> str:
        """The id of the answer. It is the same in every run."""
        return f"batch_req_{self.number}"


class _Seen(msgspec.Struct, frozen=True):
    id: str
    response: msgspec.Raw  # a request has none
    custom_id: str | None = None


class _Named(msgspec.Struct, frozen=True):
    custom_id: str | None = None


_BEGINNING = b'{"id":"batch_req_'  # of every answer


class BatchInput:
    """The requests of a file, read and checked; blank lines are skipped.

    Args:
        file: the input.
        urls: paths that may be requested.

    Raises:
        InvalidRequestError: the file cannot be read, or two lines have the same custom_id.
    """

    def __init__(self, file: Path, urls: frozenset[str]) -> None:
        try:
            rows = file.read_bytes().splitlines()
        except OSError as error:
            raise InvalidRequestError(
                f"INPUT {file} cannot be read: {error.strerror or error}"
            ) from error
        self.lines = [
            _parse(number, row, urls) for number, row in enumerate(rows, 1) if row.strip()
        ]
        first: dict[str, int] = {}
        for line in self.lines:
            if line.custom_id is None:
                continue
            if line.custom_id in first:
                raise InvalidRequestError(
                    f"{file}: lines {first[line.custom_id]} and {line.number} have the custom_id "
                    f"{line.custom_id!r}; give each line a custom_id of its own, which names its "
                    "answer"
                )
            first[line.custom_id] = line.number


class BatchOutput:
    """The answers in a file. Use it as a context manager.

    Args:
        file: the output file. It is created if it does not exist; its contents are kept.

    Raises:
        InvalidRequestError: the file cannot be written, or holds lines that are not answers.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ids: set[str] = set()
        try:
            self._stream: IO[bytes] = file.open("a+b")
        except OSError as error:
            raise InvalidRequestError(
                f"OUTPUT {file} cannot be written: {error.strerror or error}"
            ) from error
        for number, row in enumerate(self._whole_rows(), 1):
            try:
                seen = msgspec.json.decode(row, type=_Seen)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise self._not_an_answer(number, str(error)) from error
            self._ids.add(seen.id if seen.custom_id is None else f"custom {seen.custom_id}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # closing tries again to write a failed line
            self._stream.close()

    def has(self, line: BatchLine) -> bool:
        """Whether the line is answered."""
        name = line.id if line.custom_id is None else f"custom {line.custom_id}"
        return name in self._ids

    def write(self, answer: bytes) -> None:
        """Append a line and flush it to the operating system.

        Raises:
            InvalidRequestError: the file cannot be written. The next run answers the line again.
        """
        try:
            self._stream.write(answer + b"\n")
            self._stream.flush()
        except OSError as error:
            raise InvalidRequestError(
                f"OUTPUT {self._file} cannot be written: {error.strerror or error}"
            ) from error

    def _not_an_answer(self, number: int, why: str) -> InvalidRequestError:
        self._stream.close()
        return InvalidRequestError(
            f"OUTPUT {self._file}: line {number} is not an answer of a batch ({why}); name another "
            "file"
        )

    def _whole_rows(self) -> Iterator[bytes]:
        """The complete lines of the file. The beginning of an answer at its end is removed."""
        self._stream.seek(0)
        size = 0
        for number, row in enumerate(self._stream, 1):
            if row.endswith(b"\n"):
                size += len(row)
                yield row
            elif row[: len(_BEGINNING)] != _BEGINNING[: len(row)]:
                raise self._not_an_answer(number, "it begins in another way")
        self._stream.truncate(size)
        self._stream.seek(0, os.SEEK_END)


def answered_line(line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """The output line for an answer of the API, also for an error."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encode(line, response, None)


def refused_line(line: BatchLine) -> bytes:
    """The output line for an input line that could not be sent."""
    return _encode(line, None, {"code": "invalid_line", "message": line.problem})


def _encode(line: BatchLine, response: object, error: object) -> bytes:
    return msgspec.json.encode(
        {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
    )


def _parse(number: int, row: bytes, urls: frozenset[str]) -> BatchLine:
    try:
        request = msgspec.json.decode(row, type=_Request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        custom_id = _custom_id(row)
        return BatchLine(number=number, custom_id=custom_id, problem=f"line {number}: {error}")
    problem = None
    if request.method != "POST":
        problem = f"line {number}: method must be POST, got {request.method[:50]!r}"
    elif request.url not in urls:
        problem = (
            f"line {number}: url must be one of {', '.join(sorted(urls))}, got "
            f"{request.url[:100]!r}"
        )
    elif _streams(bytes(request.body)):
        problem = f"line {number}: body.stream must be false; answers in a file are not streamed"
    return BatchLine(
        number=number,
        custom_id=request.custom_id,
        url=request.url,
        body=bytes(request.body),
        problem=problem,
    )


def _custom_id(row: bytes) -> str | None:
    try:
        return msgspec.json.decode(row, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _streams(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Streams).stream)
    except msgspec.MsgspecError:
        return False  # the body is not an object, which the endpoint reports
