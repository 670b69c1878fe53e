"""Checkpoints of NVIDIA's ModelOpt: FP8 with a scale for each matrix, and NVFP4.

The settings are in `hf_quant_config.json`, under `quantization`, or in config.json.

    FP8    weight float8_e4m3fn [out, in]; weight_scale []; input_scale []
    NVFP4  weight uint8 [out, in / 2]; weight_scale float8_e4m3fn [out, in / 16]; weight_scale_2 []
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.models.quantized_checkpoints.fp8 import FloatPolicy, per_matrix
from ostinato.models.quantized_checkpoints.keys import ConfigKeys
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers
from ostinato.models.quantized_checkpoints.stored_floats import Float4
from ostinato.models.quantized_checkpoints.stored_groups import InputsStated, static_inputs
from ostinato.models.weight_methods.weight_method import WeightMethod
from ostinato.ops.w8a8.round_rows import InputScales

__all__ = ("from_checkpoint",)


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> CheckpointPolicy:
    """The methods of a checkpoint of ModelOpt.

    Raises:
        ValueError: a key is not supported; the text names it.
    """
    outer = ConfigKeys(stated)
    outer.text("quant_method", one_of=("modelopt",), default="modelopt")
    outer.without_effect("producer", "config_groups", "kv_cache_scheme")
    nested = outer.value("quantization", default=None)
    keys = outer if nested is None else ConfigKeys(nested, "quantization")
    algorithm = keys.text("quant_algo", one_of=("fp8", "nvfp4"))
    method = per_matrix(headers, static_inputs(headers) or InputsStated(InputScales.row))
    if algorithm == "nvfp4":
        size = keys.integer("group_size", one_of=(16,), default=16)
        method = Float4(group_size=size, scale_dtype="float32", library="modelopt")
    keys.must_be("kv_cache_quant_algo", "FP8")
    key = "exclude_modules" if keys.has("exclude_modules") else "ignore"
    policy = FloatPolicy(
        unquantized=unquantized,
        headers=headers,
        library="ModelOpt",
        method=method,
        key=key,
        floats=keys.names(key),
    )
    keys.finish()
    if nested is not None:
        outer.finish()
    return policy
