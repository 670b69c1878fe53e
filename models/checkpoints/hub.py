"""Downloads a model from a hub: a directory in Hugging Face's format, or one GGUF model.

A repository of GGUF files often has the same model in many types. `owner/repository:Q4_K_M` names
one by its type, `owner/repository:file.gguf` by its file.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ostinato.conf.errors import first_line
from ostinato.models.gguf.gguf_paths import split_files

__all__ = ("HubError", "HubName", "choose_gguf", "download", "download_adapter")

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([\w./-]+))?")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_SAFETENSORS = ["*.safetensors"]
_PICKLES = ["pytorch_model*.bin"]
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_GGUF = "*.gguf"
_NOT_WEIGHTS = ["original/*", "consolidated*", "onnx/*", "*/*.safetensors"]
_MAX_NAMED = 12


class HubError(ValueError):
    """A model cannot be downloaded from the hub; the message is one line."""


class HubName(NamedTuple):
    """A repository, and perhaps one GGUF model of it."""

    repository: str
    gguf: str  # a type, such as Q4_K_M, or a file; empty = no GGUF model is named

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a configured path. None = it cannot name a repository of a hub."""
        match = _HUB_NAME.fullmatch(text)
        return None if match is None else cls(match[1], match[2] or "")


def download(name: HubName, revision: str, *, weights: bool) -> Path:
    """The directory of a downloaded model, or its first GGUF file.

    Args:
        name: as configured. Without a GGUF type the repository may also have one GGUF model and no
            config.json.
        revision: a branch, tag or commit; empty = the default branch.
        weights: False leaves out weight files, except those of GGUF models.

    Raises:
        HubError: the hub did not give the model, or the repository has no such GGUF model.
    """
    # Imported here, because it takes 0.2 s, and a start from a local directory does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(patterns: list[str], *, is_offline: bool = False) -> Path:
        return Path(
            snapshot_download(
                name.repository,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=_NOT_WEIGHTS,
                local_files_only=is_offline,
            )
        )

    try:
        if name.gguf:
            return _download_gguf(name, revision, fetch)
        directory = fetch(_SMALL_FILES + (_SAFETENSORS if weights else []))
        is_tokenizer = not weights and (directory / "tokenizer.json").is_file()
        if not is_tokenizer and not (directory / "config.json").is_file():
            return _download_gguf(name, revision, fetch)
        if weights and not any(directory.glob("*.safetensors")):
            directory = fetch(_SMALL_FILES + _PICKLES)
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise _hub_error(error, revision) from error
    return directory


def download_adapter(repository: str) -> Path:
    """The directory of a downloaded low-rank adapter in PEFT's format.

    Raises:
        HubError: the hub did not give the repository, or it has no adapter.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    directory = Path()
    try:
        for weights in _ADAPTER_WEIGHTS:  # the first that the repository has
            patterns = [_ADAPTER_CONFIG, weights]
            directory = Path(snapshot_download(repository, allow_patterns=patterns))
            if (directory / weights).is_file():
                break
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise _hub_error(error, "") from error
    for files in ((_ADAPTER_CONFIG,), _ADAPTER_WEIGHTS):
        if not any((directory / file).is_file() for file in files):
            raise HubError(f"the repository {repository} has no {' or '.join(files)}")
    return directory


def _hub_error(error: Exception, revision: str) -> HubError:
    """The error for a download that failed with an error of the hub's library."""
    at = f" at revision {revision!r}" if revision else ""
    reason = first_line(error)
    if reason.startswith("Got: "):  # there is no connection, and no copy on this machine
        reason = reason.removeprefix("Got: ")
        reason += "; check the connection to the hub, or give the path of a local directory"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC):
        reason += "; set HF_HOME to a directory for downloads that can be written"
    return HubError(f"no such directory, and the hub did not give it{at}: {reason}")


def _download_gguf(name: HubName, revision: str, fetch: Callable[..., Path]) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = HfApi().model_info(name.repository, revision=revision or None).siblings or ()
        files = [each.rfilename for each in found]
    except Exception as error:  # the package's connection errors have no common base class
        try:
            directory = fetch(_SMALL_FILES, is_offline=True)
        except LocalEntryNotFoundError:
            raise HubError(f"the hub did not answer: {first_line(error)}") from error
        files = [str(file.relative_to(directory)) for file in directory.rglob(_GGUF)]
    chosen = choose_gguf(files, name)
    directory = fetch(chosen)
    # After a failed connection the package gives a directory with the files that it has.
    missing = [file for file in chosen if not (directory / file).is_file()]
    if missing:
        raise HubError(f"the hub did not give {', '.join(missing)}")
    return directory / chosen[0]


def choose_gguf(files: list[str], name: HubName) -> list[str]:
    """The files of one GGUF model of a repository; several if the model is split.

    Files `mmproj*` are left out: they are projectors of images.

    Args:
        files: paths in the repository.
        name: its `gguf` is a file's path or name, or a type with which the file's name or its
            folder's name ends. Upper and lower case are equal. Empty = the only model.

    Raises:
        HubError: none or several fit.
    """
    models: dict[str, list[str]] = {}
    for file in files:
        path = PurePosixPath(file)
        if path.suffix == ".gguf" and not path.name.startswith("mmproj"):
            parts = [str(path.with_name(part)) for part in split_files(path.name)] or [file]
            models[parts[0]] = parts
    wanted = name.gguf.lower()
    ending = re.compile(rf"(^|.*[-._]){re.escape(wanted)}")

    def fits(first: str, parts: list[str]) -> bool:
        if wanted.endswith(".gguf"):
            return any(wanted in (part.lower(), PurePosixPath(part).name.lower()) for part in parts)
        path = PurePosixPath(re.sub(r"(-00001-of-\d{5})?\.gguf$", "", first.lower()))
        return any(ending.fullmatch(each) for each in (path.name, path.parent.name))

    found = [parts for first, parts in models.items() if not wanted or fits(first, parts)]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} GGUF models" if found else "no GGUF model"
    what += f" {name.gguf}" if name.gguf else ""
    if not models:
        raise HubError(f"the repository has {what}")
    known = sorted(parts[0] for parts in found or models.values())
    shown = ", ".join(known[:_MAX_NAMED]) + (", ..." if len(known) > _MAX_NAMED else "")
    raise HubError(f"the repository has {what}; it has {shown}. Name one: {name.repository}:FILE")
