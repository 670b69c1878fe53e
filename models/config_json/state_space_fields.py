"""Reads the Mamba-2 mixers of a config.json: the keys of Bamba and Granite 4, and of Nemotron-H."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer, refuse_other_values
from ostinato.models.config.recurrent_spec import StateSpaceSpec
from ostinato.models.config_json.hybrid_layers import read_conv_width

__all__ = ("read_nemotron_state_space", "read_state_space")

# Key of Nemotron-H in older files -> its key in newer ones.
_OLDER = {
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
}


def read_state_space(
    hf_config: HFConfig, layers: tuple[bool, ...], norm_eps: float
) -> StateSpaceSpec | None:
    """The recurrent mixers of a model.

    Args:
        hf_config: the parsed config.json.
        layers: for each layer, whether it is recurrent.
        norm_eps: that of the model's norms, as the config states it.

    Returns:
        None if no layer is recurrent.

    Raises:
        ValueError: a size does not fit the others, or a value is not supported; the text names it.
    """
    # It is also the activation after the convolution, which is part of the kernels.
    refuse_other_values(hf_config, {"hidden_act": "silu"})
    if not any(layers):
        return None
    num_heads = read_integer(hf_config, "mamba_n_heads", default=128)
    num_groups = read_integer(hf_config, "mamba_n_groups", default=1)
    conv_width = read_conv_width(hf_config, "mamba_d_conv", 4)
    inner = read_integer(hf_config, "mamba_expand", default=2)
    inner *= read_integer(hf_config, "hidden_size")
    head_dim = inner // num_heads
    if hf_config.get("mamba_d_head", "auto") != "auto":
        head_dim = read_integer(hf_config, "mamba_d_head")
    if num_heads * head_dim != inner:
        raise ValueError(
            f"config.json: mamba_expand * hidden_size={inner} must be mamba_n_heads={num_heads} "
            f"times mamba_d_head={head_dim}"
        )
    _refuse_uneven_groups("mamba_n_heads", num_heads, "mamba_n_groups", num_groups)
    return StateSpaceSpec(
        layers=layers,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=read_integer(hf_config, "mamba_d_state", default=256),
        num_groups=num_groups,
        conv_width=conv_width,
        has_conv_bias=read_flag(hf_config, "mamba_conv_bias", True),
        has_bias=read_flag(hf_config, "mamba_proj_bias", False),
        step_limits=_step_limits(hf_config),
        norm_eps=norm_eps,
    )


def read_nemotron_state_space(
    hf_config: HFConfig, layers: tuple[bool, ...], norm_eps: float
) -> StateSpaceSpec | None:
    """The recurrent mixers of Nemotron-H.

    Time steps have the limits of `time_step_limit`, as in the model's published code. The class of
    transformers 5.24 takes `time_step_min` as the lower limit, which is a value for training
    (https://github.com/huggingface/transformers/pull/48989).

    Args, Returns, Raises: as `read_state_space`.
    """
    older = {new: hf_config[old] for old, new in _OLDER.items() if old in hf_config}
    stated = {**hf_config, **older}
    must_be = {"mamba_hidden_act": "silu", "mamba_proj_bias": False}
    refuse_other_values(stated, {**must_be, "mamba_ssm_cache_dtype": "float32"})
    if not any(layers):
        return None
    num_heads = read_integer(stated, "mamba_num_heads", default=128)
    num_groups = read_integer(stated, "n_groups", default=8)
    state_size = read_integer(stated, "ssm_state_size", default=128)
    _refuse_uneven_groups("mamba_num_heads", num_heads, "n_groups", num_groups)
    # Some published files state these values again.
    refuse_other_values(stated, {"mamba_num_groups": num_groups, "mamba_state_dim": state_size})
    return StateSpaceSpec(
        layers=layers,
        num_heads=num_heads,
        head_dim=read_integer(stated, "mamba_head_dim", default=64),
        state_size=state_size,
        num_groups=num_groups,
        conv_width=read_conv_width(stated, "conv_kernel", 4),
        has_conv_bias=read_flag(stated, "use_conv_bias", True),
        has_bias=read_flag(stated, "use_bias", False),
        step_limits=_step_limits(stated),
        norm_eps=norm_eps,
    )


def _refuse_uneven_groups(heads_key: str, num_heads: int, groups_key: str, num_groups: int) -> None:
    if num_heads % num_groups:
        raise ValueError(
            f"config.json: {heads_key}={num_heads} is not a multiple of {groups_key}={num_groups}"
        )


def _step_limits(hf_config: HFConfig) -> tuple[float, float]:
    stated = hf_config.get("time_step_limit", (0.0, math.inf))
    numbers = [_number(one) for one in stated] if isinstance(stated, list | tuple) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise ValueError(
            "config.json: time_step_limit must be the smallest and the largest time step, two "
            f"numbers of at least 0, got {stated!r}"
        )
    return numbers[0], numbers[1]


def _number(value: Any) -> float:
    """A number as transformers writes it: infinity is `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    try:
        return float(value)  # pyright: ignore[reportArgumentType] - checked by trying
    except (OverflowError, TypeError, ValueError):
        return math.nan
