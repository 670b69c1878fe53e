"""Reads single fields of a Hugging Face config.json; every error names the key.

This module imports no torch: processes without torch read how a model takes images and sounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

__all__ = (
    "HFConfig",
    "architecture_of",
    "read_cap",
    "read_count",
    "read_first",
    "read_flag",
    "read_integer",
    "read_layers",
    "read_name",
    "read_number",
    "read_object",
    "read_token_id",
    "read_token_ids",
    "refuse_other_kinds",
    "refuse_other_values",
    "with_defaults",
)

HFConfig = Mapping[str, Any]
"""A config.json as parsed."""

_MOST_PARTS = 10_000


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
    known = list(supported)  # a kind may be of any type
    if not is_list or len(kinds) != num_layers or any(kind not in known for kind in kinds):
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
    hf_config: HFConfig,
    *keys: str,
    default: int | None = None,
    at_least: int = 1,
    at_most: int | None = None,
) -> int:
    """The value of the first of `keys` that is present and not null; else `default`.

    Raises:
        ValueError: no key is present and the default is None, or the value is not an integer from
            `at_least` to `at_most`.
    """
    value = read_first(hf_config, *keys, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        allowed = f"an integer of at least {at_least}"
    elif at_most is not None and value > at_most:
        allowed = f"at most {at_most}"
    else:
        return value
    key = next((key for key in keys if hf_config.get(key) is not None), keys[0])
    raise ValueError(f"config.json: {key} must be {allowed}, got {value!r}")


def read_count(hf_config: HFConfig, *keys: str, default: int | None = None) -> int:
    """`read_integer` for a number of layers or experts, of which each is built.

    Raises:
        ValueError: as `read_integer`, and if the number is above 10,000. Building so many parts
            would not end.
    """
    return read_integer(hf_config, *keys, default=default, at_most=_MOST_PARTS)


def read_number(
    hf_config: HFConfig,
    key: str,
    default: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
) -> float:
    """The number under `key`; the default if it is missing or null.

    Raises:
        ValueError: the value is not a finite number, or not in the range.
    """
    value = read_first(hf_config, key, default=default)
    try:  # YAML reads 1e-5 as a text
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    is_low = (at_least is not None and number < at_least) or (above is not None and number <= above)
    if is_low or not math.isfinite(number):
        limits = (("of at least", at_least), ("above", above))
        allowed = "".join(f" {word} {limit:g}" for word, limit in limits if limit is not None)
        raise ValueError(f"config.json: {key} must be a number{allowed}, got {value!r}")
    return number


def read_cap(hf_config: HFConfig, key: str, default: float | None = None) -> float:
    """The number under `key` that limits values; 0 = no limit, which null and 0 state.

    Raises:
        ValueError: the value is not a number of at least 0.
    """
    return read_number({key: hf_config.get(key, default)}, key, 0.0, at_least=0)


def read_flag(hf_config: HFConfig, key: str, default: bool) -> bool:
    """The flag under `key`; the default if it is missing. Null is false, as in transformers.

    Raises:
        ValueError: the value is neither true nor false.
    """
    value = hf_config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, got {value!r}")
    return bool(value)


def read_name(hf_config: HFConfig, key: str, supported: Collection[str], default: str) -> str:
    """The name under `key`; the default if it is missing.

    Raises:
        ValueError: it is not among `supported`.
    """
    name = hf_config.get(key, default)
    if not isinstance(name, str) or name not in supported:
        raise ValueError(
            f"config.json: {key}={name} is not supported; supported: {', '.join(supported)}"
        )
    return name


def read_object(hf_config: HFConfig, key: str) -> HFConfig:
    """The object under `key`; an empty one if it is missing or null.

    Raises:
        ValueError: the value is something else.
    """
    value = read_first(hf_config, key, default={})
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {key} must be an object, got {value!r}")  # noqa: TRY004 - the file is wrong
    return value


def with_defaults(hf_config: HFConfig, defaults: HFConfig) -> dict[str, Any]:
    """The config, with the values of `defaults` for keys that are missing or null."""
    return {
        **hf_config,
        **{key: read_first(hf_config, key, default=defaults[key]) for key in defaults},
    }


def read_layers(hf_config: HFConfig, key: str, num_layers: int) -> tuple[int, ...] | None:
    """The indices of layers that are listed under `key`; None if it is missing or null.

    Raises:
        ValueError: the value is no list, or an entry is not the index of a layer.
    """
    listed = hf_config.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or any(
        type(one) is not int or one not in range(num_layers) for one in listed
    ):
        raise ValueError(f"config.json: {key}={listed!r} must name layers 0 to {num_layers - 1}")
    return tuple(listed)


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


def read_token_id(config: HFConfig, key: str) -> int | None:
    """The token id under `key`, which may be a list of one; None if there is none.

    Raises:
        ValueError: the value is something else.
    """
    ids = read_token_ids(config, key)
    if len(ids) > 1:
        raise ValueError(f"config.json: {key} must be one integer, got {list(ids)}")
    return ids[0] if ids else None
