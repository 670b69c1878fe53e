"""Finds the quantization settings of a checkpoint, in config.json or in a file of their own.

Libraries write them to `quantization_config` in config.json, and early compressed-tensors to
`compression_config`. Other early libraries wrote a file beside config.json: AutoGPTQ
`quantize_config.json`, AutoAWQ `quant_config.json`, ModelOpt `hf_quant_config.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError

__all__ = ("read_quantization",)

_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_MODELOPT = "hf_quant_config.json"
_OTHER_NAMES = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}


def read_quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The settings, with the key `quant_method`; those of config.json, if it has any.

    `quant_method` is the name of a module of models/quantized_checkpoints, with hyphens, if there
    is one: other names of a method are replaced.

    Returns:
        None when the checkpoint is not quantised.

    Raises:
        CheckpointError: a file is broken, the settings are not an object, or the files name
            different methods.
    """
    config = checkpoint.hf_config
    stated = config.get("quantization_config") or config.get("compression_config")
    found: dict[str, dict[str, Any]] = {}
    if stated:
        if not isinstance(stated, dict):
            raise CheckpointError(
                "config.json: quantization_config (or compression_config) must be an object"
            )
        found["config.json"] = {"quant_method": "unknown", **stated}
    for file, settings in _files_of(checkpoint.path):
        found[file] = settings
    for file, settings in found.items():
        method = str(settings["quant_method"])
        found[file] = {**settings, "quant_method": _OTHER_NAMES.get(method, method)}
    methods = {file: settings["quant_method"] for file, settings in found.items()}
    if len(set(methods.values())) > 1:
        text = ", ".join(f"{file} says {method!r}" for file, method in methods.items())
        raise CheckpointError(
            f"the checkpoint has two quantizations: {text}; keep the settings of one"
        )
    return next(iter(found.values()), None)


def _files_of(directory: Path | None) -> list[tuple[str, dict[str, Any]]]:
    if directory is None:
        return []
    found = []
    for name, method in _FILES.items():
        settings = _read(directory / name)
        if settings is not None:
            found.append((name, {"quant_method": method, **settings}))
    settings = _read(directory / _MODELOPT)
    if settings is not None:
        found.append((_MODELOPT, {**settings, "quant_method": "modelopt"}))
    return found


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value
