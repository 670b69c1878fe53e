"""Reads single fields of a Hugging Face config.json; every error names the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ostinato.models.config.model_config import DTYPES, HFConfig
from ostinato.ops.activation import ACTIVATIONS

__all__ = (
    "architecture_of",
    "read_activation",
    "read_first",
    "read_integer",
    "read_token_ids",
    "refuse_other_kinds",
    "refuse_other_values",
    "stated_dtype",
)


def architecture_of(hf_config: HFConfig) -> str:
    """The class name under `architectures`.

    Raises:
        ValueError: there is none.
    """
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list | tuple) or not architectures:
        raise ValueError(
            f"config.json: architectures must name the model's class, got {architectures!r}; "
            'set it with model.config.architectures=["LlamaForCausalLM"] or the like'
        )
    return str(architectures[0])


def refuse_other_values(hf_config: HFConfig, must_be: Mapping[str, Any]) -> None:
    """Refuse values that would change the output if they were ignored.

    Args:
        hf_config: the parsed config.json.
        must_be: key -> the only supported value, which is also the value of a missing key.

    Raises:
        ValueError: a key has another value.
    """
    for key, only in must_be.items():
        if hf_config.get(key, only) != only:
            raise ValueError(f"config.json: {key}={hf_config[key]} is not supported, only {only}")


def refuse_other_kinds(
    key: str, kinds: Collection[str], supported: Collection[str], num_layers: int
) -> None:
    """Refuse a list with a kind for each layer, if a kind is not supported or a layer has none.

    Args:
        key: the key of the list.
        kinds: the list.
        supported: the supported kinds.
        num_layers: layers of the model.

    Raises:
        ValueError: a kind is not among `supported`, or the list has another length.
    """
    if set(kinds) - set(supported) or len(kinds) != num_layers:
        raise ValueError(
            f"config.json: {key} must have {' or '.join(sorted(supported))} for each of the "
            f"{num_layers} layers, got {kinds}"
        )


def read_first(hf_config: HFConfig, *keys: str, default: Any = None) -> Any:
    """The value of the first of `keys` that is present and not null; else `default`."""
    for key in keys:
        if hf_config.get(key) is not None:
            return hf_config[key]
    return default


def read_integer(hf_config: HFConfig, *keys: str, default: int | None = None) -> int:
    """The value of the first of `keys` that is present and not null; else `default`.

    Raises:
        ValueError: no key is present and the default is None, or the value is not an integer >= 1.
    """
    value = read_first(hf_config, *keys, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {keys[0]} must be an integer of at least 1, got {value!r}")
    return value


def read_activation(hf_config: HFConfig, key: str, default: str) -> str:
    """The activation function under `key`.

    Raises:
        ValueError: it is unknown.
    """
    name = hf_config.get(key, default)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {key}={name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return str(name)


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


def read_token_ids(config: HFConfig, key: str) -> tuple[int, ...]:
    """The token ids under `key`: none, one or several."""
    value = config.get(key)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
