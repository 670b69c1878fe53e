"""Finds the files of a low-rank adapter in PEFT's format, and gives them a digest.

No torch is imported here, because processes without torch compute digests.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from ostinato.conf.errors import first_line

__all__ = (
    "AdapterError",
    "AdapterFiles",
    "adapter_digest",
    "digest_of_parts",
    "find_adapter_files",
    "reason_of",
)

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the first that exists is read
_MOST_CHARACTERS = 2000  # of a message


class AdapterError(ValueError):
    """An adapter cannot be found, read or fitted to the model; the message is one line.

    Names in files and paths can have any characters, so those that do not print are escaped here.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


class AdapterFiles(NamedTuple):
    """The two files of an adapter."""

    config: Path  # adapter_config.json
    weights: Path  # adapter_model.safetensors or adapter_model.bin


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read, without its path."""
    return getattr(error, "strerror", None) or first_line(error)


def find_adapter_files(directory: Path) -> AdapterFiles:
    """The files of the adapter in a directory.

    Raises:
        AdapterError: the directory or one of the files is missing or is of another kind.
    """
    try:
        if not directory.is_dir():
            raise AdapterError(
                f"{directory} is not a directory; name the directory of an adapter, which has "
                f"{_CONFIG}"
            )
        # A pipe or a device would block its reader.
        if not (directory / _CONFIG).is_file():
            raise AdapterError(
                f"{directory} has no file {_CONFIG}; name the directory that PEFT's "
                "save_pretrained wrote"
            )
        for name in _WEIGHTS:
            if (directory / name).is_file():
                return AdapterFiles(directory / _CONFIG, directory / name)
    except OSError as error:
        raise AdapterError(f"{directory} cannot be read: {reason_of(error)}") from error
    raise AdapterError(
        f"{directory} has neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}; copy the adapter's weights there"
    )


def adapter_digest(directory: Path) -> str:
    """The SHA-256 digest, in hexadecimal, of the adapter in a directory.

    Equal digests mean that both files have equal bytes.

    Raises:
        AdapterError: a file is missing or cannot be read.
    """
    return digest_of_parts(*(_digest_of_file(file) for file in find_adapter_files(directory)))


def digest_of_parts(config: bytes, weights: bytes) -> str:
    """The digest of an adapter from the SHA-256 digests of its two files."""
    return hashlib.sha256(config + weights).hexdigest()


def _digest_of_file(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {reason_of(error)}") from error
