"""Finds the files of a model: a directory, a GGUF file, a hub id, the demo, or inline settings.

`open_checkpoint` reads config.json and generation_config.json, or a GGUF file's metadata, and
locates the weights. models/checkpoints/weights.py loads them. Every error of a checkpoint is a
`CheckpointError` of one line.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.conf.environment import expand_user
from ostinato.conf.schema import LoadFormat, ModelSection
from ostinato.models.checkpoints.hub import HubError, HubName, download
from ostinato.models.gguf.gguf_config import read_gguf_config, read_gguf_generation_config
from ostinato.models.gguf.gguf_file import GGUFFile, open_gguf
from ostinato.models.gguf.gguf_paths import GGUFError, find_gguf, is_gguf_path

__all__ = ("Checkpoint", "CheckpointError", "open_checkpoint", "resolve_path")


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or fitted to its model; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a checkpoint is, and the contents of its two small JSON files."""

    path: Path | None  # a directory or a GGUF file; None = everything came from model.config
    # config.json, or its counterpart made from a GGUF file; values of model.config replace its own
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]  # generation_config.json, {} when there is none
    gguf: GGUFFile | None = None  # the opened file, if the checkpoint is a GGUF file

    def weight_files(self) -> list[Path]:
        """The files with the weights.

        Raises:
            CheckpointError: there is no such file, the index names a missing file, or a file cannot
                be opened.
        """
        files = self._weight_files()
        for file in files:  # safetensors would report a file without permission as missing
            try:
                file.open("rb").close()
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {_reason(error)}") from error
        return files

    def _weight_files(self) -> list[Path]:
        if self.path is None:
            raise CheckpointError(
                "there are no weights: model.path is empty; set it, or model.load_format=dummy"
            )
        if self.gguf is not None:
            return list(self.gguf.files)
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = self.path / f"{name}.index.json"
            if index.is_file():
                return _shards(index)
            if (self.path / name).is_file():
                return [self.path / name]
        raise CheckpointError(
            f"no weights in {self.path}: looked for model.safetensors, pytorch_model.bin and "
            "their .index.json; model.load_format=dummy runs without weights"
        )


def open_checkpoint(section: ModelSection) -> Checkpoint:
    """Find a checkpoint and read its configuration.

    Args:
        section: its `path` is a local directory, a GGUF file, a hub id, or empty for the bundled
            demo model; its `config` is laid over config.json, nested objects key by key. With
            `load_format=dummy` and a `config` that names its `architectures`, nothing is read
            unless `path` is a local directory.

    Raises:
        CheckpointError: as `resolve_path`; or config.json is missing or invalid, or a GGUF file is
            broken or not supported.
    """
    inline = section.load_format is LoadFormat.dummy and "architectures" in section.config
    if inline and not expand_user(section.path or "?").is_dir():
        return Checkpoint(path=None, hf_config=dict(section.config), generation_config={})
    directory = resolve_path(
        section.path, section.revision, weights=section.load_format is not LoadFormat.dummy
    )
    if is_gguf_path(directory):
        return _open_gguf(directory, section)
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise CheckpointError(
            f"no config.json and no GGUF file in {directory}: model.path must be a model's "
            "directory or a GGUF file"
        )
    generation_file = directory / "generation_config.json"
    return Checkpoint(
        path=directory,
        hf_config=_laid_over(_read_json(config_file), section.config),
        generation_config=_read_json(generation_file) if generation_file.is_file() else {},
    )


def _open_gguf(file: Path, section: ModelSection) -> Checkpoint:
    try:
        opened = open_gguf(file)
        return Checkpoint(
            path=opened.path,
            hf_config=_laid_over(read_gguf_config(opened), section.config),
            generation_config=read_gguf_generation_config(opened),
            gguf=opened,
        )
    except GGUFError as error:
        raise CheckpointError(str(error)) from error


def resolve_path(
    path: str, revision: str = "", *, weights: bool = True, key: str = "model.path"
) -> Path:
    """The local directory or GGUF file behind a configured path; a hub id is downloaded.

    If a directory has no config.json but one GGUF model, that model's file is returned.

    Args:
        path: a directory, a GGUF file, a hub id, or empty for the bundled demo model. A hub id may
            end in the type or the file of a GGUF model: `owner/repository:Q4_K_M`.
        revision: a hub branch, tag or commit; empty = the default branch.
        weights: False leaves out the weight files of a download.
        key: the setting that `path` came from, for messages.

    Raises:
        CheckpointError: there is no such directory, file or hub id; the path cannot be read, or is
            a file of another kind; a directory has several GGUF models; or the hub cannot be
            reached.
    """
    if not path:
        return Path(__file__).parents[1] / "demo"
    local = expand_user(path)
    try:
        if local.is_dir():
            os.stat(f"{local}/.")  # fails if its files cannot be opened
            return (None if (local / "config.json").is_file() else find_gguf(local)) or local
        is_there = local.exists()
    except OSError as error:
        raise CheckpointError(f"{key}={path!r} cannot be read: {_reason(error)}") from error
    except GGUFError as error:
        raise CheckpointError(f"{key}={path!r}: {error}") from error
    if is_there and is_gguf_path(local):
        return local
    if is_there:
        raise CheckpointError(
            f"{key}={path!r} is a file; it must be a model's directory or a GGUF file (.gguf)"
        )
    name = HubName.parse(path)
    if name is None:
        raise CheckpointError(f"{key}={path!r}: no such directory")
    try:
        return download(name, revision, weights=weights)
    except HubError as error:
        raise CheckpointError(f"{key}={path!r}: {error}") from error


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two objects key by key, nested objects too. Other values are taken from `above`."""
    merged = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _laid_over(below[key], above[key])
    return merged


def _reason(error: OSError) -> str:
    """The system's error text; for a missing permission also the user and the remedy."""
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError) and hasattr(os, "geteuid"):
        reason += (
            f" for user id {os.geteuid()}; change the permissions, or run as the owner of the files"
        )
    return reason


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {_reason(error)}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _shards(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    shards = [index.parent / str(name) for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(
                f"{index.name} names the shard {shard.name}, which is missing from {index.parent}"
            )
    return shards
