"""Reads the pooling settings of a checkpoint, in the files that sentence-transformers writes.

`modules.json` lists the model and the steps after it (pooling, perhaps normalisation), each with
its folder. `sentence_bert_config.json` has the length that the model was trained for.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.models.checkpoints.checkpoint import CheckpointError

__all__ = ("PoolingFiles", "read_pooling_files")

# The library's name of a mode -> our name. Earlier versions of the library write one flag for each
# mode, later versions the name of the mode.
_MODES = {"cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean"}
_MODES |= {"lasttoken": "last", "last_token": "last"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFiles:
    """The settings of the files. Without `modules.json` all of them have their defaults."""

    mode: str | None = None  # mean, last or cls
    normalize: bool = True
    max_seq_length: int | None = None  # tokens
    unsupported: str | None = None  # why the checkpoint's pooling is not supported


def read_pooling_files(directory: Path | None) -> PoolingFiles:
    """Read the pooling settings of a checkpoint.

    Args:
        directory: the directory of the checkpoint; None = it has none.

    Raises:
        CheckpointError: a file is broken.
    """
    if directory is None or not (directory / "modules.json").is_file():
        return PoolingFiles()
    mode, unsupported, normalize = None, None, False
    modules = _read(directory / "modules.json", list)
    if not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(
            f"{directory / 'modules.json'} must hold an array of JSON objects, got "
            f"{reprlib.repr(modules)}; take the file of the original checkpoint"
        )
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = str(module.get("path", ""))
        if kind == "Pooling":
            mode, unsupported = _mode(_read(directory / path / "config.json", dict))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            unsupported = f"modules.json has a {kind} module, which is not supported"
    length = None
    file = directory / "sentence_bert_config.json"
    if file.is_file():
        length = _read(file, dict).get("max_seq_length")
        if not isinstance(length, int | None):
            raise CheckpointError(
                f"{file}: max_seq_length must be null or an integer, got {length!r}; correct it"
            )
    return PoolingFiles(
        mode=mode, normalize=normalize, max_seq_length=length, unsupported=unsupported
    )


def _mode(config: dict[str, Any]) -> tuple[str | None, str | None]:
    """(the mode as in `PoolingFiles`, None), or (None, why the mode is not supported)."""
    stated = config.get("pooling_mode")
    prefix = "pooling_mode_"
    names = [
        key.removeprefix(prefix)
        for key, value in config.items()
        if key.startswith(prefix) and value is True
    ]
    if isinstance(stated, str):
        names = [stated]
    if len(names) == 1 and names[0] in _MODES:
        return _MODES[names[0]], None
    asked = " and ".join(names) or "no mode"
    return None, f"the checkpoint's pooling is {asked}; only cls, mean and last token are supported"


def _read(file: Path, kind: type) -> Any:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{file} must hold a JSON {'array' if kind is list else 'object'}")
    return value
