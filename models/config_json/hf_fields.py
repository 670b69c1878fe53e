"""Reads single fields of a Hugging Face config.json; every error names the key."""

from __future__ import annotations

import math
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
    "read_layers",
    "read_number",
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
    key: str, kinds: object, supported: Collection[str], num_layers: int
) -> None:
    """Refuse a list with a kind for each layer, if a kind is not supported or a layer has none.

    Args:
        key: the key of the list.
        kinds: the list.
        supported: the supported kinds.
        num_layers: layers of the model.

    Raises:
        ValueError: it is no list, a kind is not among `supported`, or the list has another length.
    """
    is_list = isinstance(kinds, list | tuple)
    if not is_list or len(kinds) != num_layers or any(kind not in supported for kind in kinds):
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


def read_integer(
    hf_config: HFConfig, *keys: str, default: int | None = None, at_least: int = 1
) -> int:
    """The value of the first of `keys` that is present and not null; else `default`.

    Raises:
        ValueError: no key is present and the default is None, or the value is not an integer of
            `at_least`.
    """
    value = read_first(hf_config, *keys, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(
            f"config.json: {keys[0]} must be an integer of at least {at_least}, got {value!r}"
        )
    return value


def read_number(hf_config: HFConfig, key: str, default: float) -> float:
    """The number under `key`; the default if it is missing or null.

    Raises:
        ValueError: the value is not a finite number.
    """
    value = read_first(hf_config, key, default=default)
    try:  # YAML reads 1e-5 as a text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"config.json: {key} must be a number, got {value!r}")
    return number


def read_layers(hf_config: HFConfig, key: str, num_layers: int) -> tuple[int, ...] | None:
    """The indices of layers that are listed under `key`; None if it is missing or null.

    Raises:
        ValueError: the value is no list, or an entry is not the index of a layer.
    """
    listed = hf_config.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or any(one not in range(num_layers) for one in listed):
        raise ValueError(f"config.json: {key}={listed!r} must name layers 0 to {num_layers - 1}")
    return tuple(listed)


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


def read_token_ids(config: HFConfig, key: str) -> tuple[int, ...]:
    """The token ids under `key`: none, one or several.

    Raises:
        ValueError: the value is neither an integer nor a list of integers.
    """
    value = config.get(key)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if any(type(one) is not int for one in ids):
        raise ValueError(f"config.json: {key} must be an integer or several, got {value!r}")
    return ids
