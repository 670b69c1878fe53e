"""Reads the rotary embedding of a config.json, in its newer and its older form.

This module also reads which layers do not rotate, and the factor of the queries in these layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_first,
    read_flag,
    read_integer,
    read_number,
    read_object,
)
from ostinato.models.config.model_config import QueryTemperature
from ostinato.models.step_tensors import DEFAULT_ROPE
from ostinato.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)

__all__ = (
    "read_query_temperature",
    "read_rope",
    "read_rope_kinds",
    "rope_by_layer_type",
    "stretched_context",
    "take_query_growth",
    "temperature_of",
    "with_theta",
)

_FORMS = ("rope_parameters", "rope_scaling")  # the newer and the older name
_GROWTH = "llama_4_scaling_beta"
_THETA = 10_000.0  # the default base of the frequencies (arXiv:2104.09864)
_EVERY = {"rope_type", "rope_theta", "partial_rotary_factor"}
_STRETCHED = _EVERY | {"factor", "original_max_position_embeddings"}
_KEYS = {
    "default": _STRETCHED,  # only with `factor` 1
    # The frequencies of this type change only for sequences longer than the stated context. Such
    # sequences are not served. For shorter sequences, the frequencies are the default ones.
    "dynamic": _STRETCHED,
    "linear": _STRETCHED,
    "llama3": _STRETCHED | {"low_freq_factor", "high_freq_factor"},
    "longrope": _STRETCHED | {"attention_factor", "long_factor", "short_factor"},
    "yarn": _STRETCHED
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}
"""Type of rotary embedding -> the keys that it may have."""


def read_rope(
    hf_config: HFConfig,
    head_dim: int,
    max_positions: int,
    *,
    default_fraction: float = 1.0,
    default_theta: float = _THETA,
) -> Rope:
    """The rotary embedding, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    Args:
        hf_config: the parsed config.json.
        head_dim: elements of a head.
        max_positions: the context that the config states. It is the original context of a scaling
            whose `original_max_position_embeddings` is not stated. Divided by the original context,
            it is the `factor` of YaRN and LongRoPE, if the config states no factor.
        default_fraction: the part of each head that is rotated, where the config does not state it.
        default_theta: the base of the frequencies, where the config does not state it.

    Raises:
        ValueError: its type or a key is unknown, or a parameter is missing or not supported.
    """
    parameters = _rope_parameters(hf_config, default_theta)
    kind = parameters.get("rope_type", "default")
    _refuse_unknown(kind, parameters)
    key = "partial_rotary_factor"
    fraction = read_number({**hf_config, **parameters}, key, default_fraction, above=0)
    if fraction > 1:
        raise ValueError(f"config.json: {key} must be at most 1, got {fraction}")
    rotary_dim = int(head_dim * fraction)
    if kind == "default" and parameters.get("factor", 1) != 1:
        raise ValueError(
            f"config.json: rope_type='default' with factor={parameters['factor']!r} is not "
            "supported; name the type of scaling"
        )
    if rotary_dim % 2:
        raise ValueError(f"config.json: the rotary part of a head must be even, got {rotary_dim}")

    def number(key: str, default: float | None = None) -> float:
        if default is None and parameters.get(key) is None:
            raise ValueError(f"config.json: rope_type={kind!r} needs a number {key}")
        return read_number(parameters, key, default or 0.0, above=0)

    original = _original_positions(hf_config, parameters) or max_positions
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=number("factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position=original,
        )
    elif kind == "longrope":
        scaling = LongRopeScaling(
            short_factors=_factors(parameters, "short_factor", rotary_dim // 2),
            long_factors=_factors(parameters, "long_factor", rotary_dim // 2),
            original_max_position=original,
            attention_factor=number(
                "attention_factor",
                default=_longrope_attention(
                    number("factor", default=max_positions / original), original
                ),
            ),
        )
    elif kind == "yarn":
        factor = number("factor", default=max_positions / original)
        scaling = YarnScaling(
            factor=factor,
            original_max_position=original,
            attention_factor=number(
                "attention_factor", default=_yarn_attention(parameters, factor)
            ),
            beta_fast=number("beta_fast", default=32.0),
            beta_slow=number("beta_slow", default=1.0),
            truncate=read_flag(parameters, "truncate", True),
        )
    return Rope(rotary_dim=rotary_dim, theta=number("rope_theta"), scaling=scaling)


def _refuse_unknown(kind: str, parameters: HFConfig) -> None:
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported; supported: {', '.join(_KEYS)}"
        )
    unknown = parameters.keys() - _KEYS[kind]
    if unknown:
        raise ValueError(
            f"config.json: rope_type={kind!r} with {', '.join(sorted(unknown))} is not supported; "
            f"its keys are {', '.join(sorted(_KEYS[kind]))}"
        )


def with_theta(hf_config: HFConfig, theta: float) -> HFConfig:
    """The config, with this base of the frequencies if it states none.

    Raises:
        ValueError: `rope_parameters` or `rope_scaling` is not an object.
    """
    stated = (hf_config, *(read_object(hf_config, name) for name in _FORMS))
    if any(each.get("rope_theta") is not None for each in stated):
        return hf_config
    return {**hf_config, "rope_theta": theta}


def rope_by_layer_type(
    hf_config: HFConfig, *, theta: float, local_theta: float
) -> tuple[HFConfig, HFConfig]:
    """The rotary keys as two configs for `read_rope`: for layers without and with a window.

    Newer configs have `rope_parameters` by layer type; null is a type without parameters. Older
    ones have `rope_theta` and `rope_scaling`. In both forms, these two keys are those of layers
    without a window.

    Args:
        hf_config: the parsed config.json.
        theta: the base of layers without a window, where it is not stated.
        local_theta: the base of layers with a window, where their `rope_parameters` do not state
            it.

    Raises:
        ValueError: `rope_parameters`, one of its layer types or `rope_scaling` is no object, a
            layer type is missing, or `rope_theta` is not a number above 0.
    """
    by_type = read_object(hf_config, "rope_parameters")
    missing = {"full_attention", "sliding_attention"} - by_type.keys()
    if missing and hf_config.get("rope_parameters") is not None:
        raise ValueError(f"config.json: rope_parameters has no {' and no '.join(sorted(missing))}")
    full, local = (by_type.get(f"{kind}_attention") for kind in ("full", "sliding"))
    everywhere = {"rope_parameters": full, "rope_scaling": hf_config.get("rope_scaling")}
    # In transformers too, the base beside the parameters by layer type is only a default.
    theta = read_number(hf_config, "rope_theta", theta, above=0)
    return with_theta(everywhere, theta), with_theta({"rope_parameters": local}, local_theta)


def read_rope_kinds(hf_config: HFConfig, num_layers: int) -> tuple[str | None, ...]:
    """`ModelConfig.rope_kinds` of a model with layers that do not rotate.

    `no_rope_layers` has a 0 for each such layer. Without this list, every
    `no_rope_layer_interval`-th layer does not rotate. The list may be longer than the model.

    Raises:
        ValueError: the list is shorter than the model or has other values, or the interval is not
            an integer of at least 1.
    """
    interval = read_integer(hf_config, "no_rope_layer_interval", default=4)
    default = [(layer + 1) % interval for layer in range(num_layers)]
    rotates = read_first(hf_config, "no_rope_layers", default=default)
    if not isinstance(rotates, list | tuple) or any(not isinstance(one, int) for one in rotates):
        raise ValueError(f"config.json: no_rope_layers must have 0 or 1 for each layer: {rotates}")
    rotates = rotates or default
    if len(rotates) < num_layers:
        raise ValueError(
            f"config.json: no_rope_layers has {len(rotates)} entries for {num_layers} layers"
        )
    return tuple(DEFAULT_ROPE if one else None for one in rotates[:num_layers])


def read_query_temperature(hf_config: HFConfig) -> QueryTemperature | None:
    """The factor of queries in layers that do not rotate; None if the config turns it off.

    Raises:
        ValueError: a value is not supported.
    """
    # Published files have 4 here.
    is_on = hf_config.get("attn_temperature_tuning", True)
    if is_on is not None and not isinstance(is_on, int):
        raise ValueError(
            f"config.json: attn_temperature_tuning must be true or false, got {is_on!r}"
        )
    if not is_on:
        return None
    return QueryTemperature(
        scale=read_number(hf_config, "attn_scale", 0.1, at_least=0),
        floor=read_number(hf_config, "floor_scale", 8192, above=0),
    )


def take_query_growth(
    hf_config: HFConfig, max_positions: int
) -> tuple[dict[str, Any], QueryTemperature]:
    """Separate the factor of the queries of Ministral 3 from the rotary parameters.

    Args:
        hf_config: the parsed config.json.
        max_positions: the context that it states. The factor grows at each multiple of the original
            context, which is this one if no other is stated.

    Returns:
        The config without the key of the factor, and the factor.

    Raises:
        ValueError: `llama_4_scaling_beta` is not a number.
    """
    parameters = _rope_parameters(hf_config)
    if parameters.get(_GROWTH) is None:
        raise ValueError(
            f"config.json: rope_parameters must have a number {_GROWTH}, got None; with 0 "
            "queries do not grow"
        )
    scale = read_number(parameters, _GROWTH, 0.0, at_least=0)
    floor = _original_positions(hf_config, parameters) or max_positions
    # transformers does not read the context among the rotary parameters.
    unread = (_GROWTH, "max_position_embeddings")
    cleaned = dict(hf_config)
    for name in _FORMS:
        if isinstance(stated := hf_config.get(name), Mapping):
            cleaned[name] = {key: each for key, each in stated.items() if key not in unread}
    temperature = QueryTemperature(scale=scale, floor=float(floor), offset=0, in_all_layers=True)
    return cleaned, temperature


def _rope_parameters(hf_config: HFConfig, default_theta: float = _THETA) -> dict[str, Any]:
    """The newer and the older form, merged. If both have a key, its values must be equal.

    A base in `rope_scaling` has priority over the one beside it, as in transformers.
    """
    scaling = _typed(hf_config.get("rope_scaling"))
    older = dict(scaling)
    if hf_config.get("rope_theta") is not None:
        older.setdefault("rope_theta", hf_config["rope_theta"])
    newer = _typed(hf_config.get("rope_parameters"))
    for key in older.keys() & newer.keys():
        if older[key] != newer[key]:
            both = [name for name in ("rope_scaling", "rope_theta") if hf_config.get(name)]
            source = "rope_scaling" if key in scaling else key
            removed = " and ".join(f"model.config.{name}=null" for name in both)
            raise ValueError(
                f"config.json: rope_parameters has {key}={newer[key]!r}, but {source} says "
                f"{older[key]!r}; to use rope_parameters set {removed}, to ignore it set "
                "model.config.rope_parameters=null"
            )
    nested = [key for key, value in newer.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"config.json: rope_parameters by layer type ({nested}) is not supported")
    return {"rope_theta": default_theta, **older, **newer}


def _typed(parameters: HFConfig | None) -> dict[str, Any]:
    """The fields without nulls, with the type as `rope_type`; older configs call it `type`."""
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(
            f"config.json: rope_parameters and rope_scaling must be objects, got {parameters!r}"
        )
    stated = {key: value for key, value in (parameters or {}).items() if value is not None}
    if stated:
        stated.setdefault("rope_type", stated.pop("type", "default"))
    return stated


def _original_positions(hf_config: HFConfig, parameters: HFConfig) -> int | None:
    """The context before scaling, which is stated beside the parameters or among them."""
    key = "original_max_position_embeddings"
    outer, inner = hf_config.get(key), parameters.get(key)
    if outer is not None and inner is not None and outer != inner:
        raise ValueError(
            f"config.json: {key}={outer}, but its rotary parameters say {inner}; they must agree"
        )
    found = parameters if outer is None else hf_config
    # Some files have an integer as a float.
    return None if found.get(key) is None else int(read_number(found, key, 0.0, at_least=2))


def _factors(parameters: HFConfig, key: str, count: int) -> tuple[float, ...]:
    """LongRoPE's divisor of each pair."""
    factors = parameters.get(key)
    if not isinstance(factors, list | tuple) or len(factors) != count:
        got = f"{len(factors)}" if isinstance(factors, list | tuple) else f"{factors!r}"
        raise ValueError(
            f"config.json: rope_type='longrope' needs {count} numbers in {key}, one for each "
            f"rotated pair, got {got}"
        )
    return tuple(read_number({key: factor}, key, 0.0, above=0) for factor in factors)


def _longrope_attention(factor: float, original: float) -> float:
    """LongRoPE's factor on cosines and sines when the config does not state it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_attention(parameters: HFConfig, factor: float) -> float:
    """YaRN's factor on cosines and sines when the config does not state it.

    The formula is that of arXiv:2309.00071, section 3.4.
    """
    one, all_dims = (
        read_number(parameters, key, 0.0, at_least=0) for key in ("mscale", "mscale_all_dim")
    )
    if one and all_dims:
        return _yarn_magnitude(one, factor) / _yarn_magnitude(all_dims, factor)
    return _yarn_magnitude(1.0, factor)


def _yarn_magnitude(weight: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def temperature_of(hf_config: HFConfig) -> float:
    """DeepSeek's factor on the scale of attention, from YaRN's `mscale_all_dim`.

    It is a temperature for all elements of a head, rotated or not. The factor for the rotated
    elements alone is in the rotary tables (`read_rope`).
    """
    parameters = _rope_parameters(hf_config)
    weight = read_number(parameters, "mscale_all_dim", 0.0, at_least=0)
    if parameters.get("rope_type", "default") == "default" or not weight:
        return 1.0
    return _yarn_magnitude(weight, read_number(parameters, "factor", 1.0, above=0)) ** 2


def stretched_context(rope: Rope | None, max_positions: int) -> int:
    """The longest context of a model, with its rotary scaling.

    Args:
        rope: the rotary embedding; None = the model has none.
        max_positions: the context that the config states. Configs of type linear state the context
            before scaling, those of YaRN the context before or after it, and those of llama3 and
            longrope the context after it. Type dynamic is served up to the stated context. Up to
            there its frequencies are the default ones.
    """
    match rope:
        case Rope(scaling=LinearScaling(factor=factor)):
            return int(max_positions * factor)
        case Rope(scaling=YarnScaling() as yarn):
            return max(max_positions, int(yarn.original_max_position * yarn.factor))
    return max_positions
