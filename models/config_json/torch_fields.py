"""Reads the dtype and activation functions that a config.json names. They are of torch."""

from __future__ import annotations

import torch

from ostinato.models.config.hf_fields import HFConfig, read_first
from ostinato.models.config.model_config import DTYPES
from ostinato.ops.activation import ACTIVATIONS

__all__ = ("read_activation", "stated_dtype")


def read_activation(hf_config: HFConfig, key: str, default: str) -> str:
    """The activation function under `key`.

    Raises:
        ValueError: it is unknown.
    """
    name = hf_config.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {key}={name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return name


def stated_dtype(hf_config: HFConfig) -> torch.dtype:
    """The dtype of the checkpoint's weights; float32 if the config states none.

    Raises:
        ValueError: the dtype is not supported.
    """
    stated = read_first(hf_config, "dtype", "torch_dtype", default="float32")
    name = str(stated).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"config.json: dtype={name!r} is not supported; supported: {', '.join(DTYPES)}; "
            "choose one with model.config.dtype"
        )
    return DTYPES[name]
