"""Checkpoints of `quant_method: fp8`: a scale for each block (DeepSeek, Qwen) or each matrix.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  [out / rows, in / columns], with `weight_block_size` [rows, columns]
    weight_scale      [] or [1], without `weight_block_size`
    input_scale       [] or [1], with `activation_scheme` static

Without `weight_block_size`, transformers writes `weight_scale_inv` and `activation_scale` in place
of the last two (Ministral 3).

A weight is the stored float times its scale. This also holds for `weight_scale_inv`, which is not
an inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.models.quantized_checkpoints.keys import ConfigKeys
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers, names_module
from ostinato.models.quantized_checkpoints.stored_floats import Float4, Float8
from ostinato.models.quantized_checkpoints.stored_groups import InputsStated, static_inputs
from ostinato.models.weight_methods.weight_method import WeightMethod
from ostinato.ops.w8a8.round_rows import InputScales

__all__ = ("FloatPolicy", "from_checkpoint", "per_matrix")


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatPolicy(CheckpointPolicy):
    """One method for all modules but the output head and those that a setting lists as floats."""

    library: str
    method: Float4 | Float8
    key: str  # the setting that lists the floats
    floats: tuple[str, ...]

    @property
    def quantization(self) -> str:
        return f"{self.library} {self.method.name}"

    def marker_of(self, name: str) -> str:
        if isinstance(self.method, Float8):
            return f"{name}.{self.method.scale_name}"
        return f"{name}_blocks" if self.method.library == "gpt-oss" else f"{name}.weight_scale_2"

    def rule_for(self, name: str) -> WeightMethod | str | None:
        if any(names_module(pattern, name) for pattern in self.floats):
            return f"quantization_config.{self.key}"
        return "the format" if name.endswith("lm_head") else self.method


def per_matrix(headers: Headers, inputs: InputsStated) -> Float8:
    """The method of matrices with one scale each.

    Its name, and whether it is [] or [1], differ between libraries.
    """
    for kind in ("weight_scale", "weight_scale_inv"):
        shapes = {len(h.shape) for name, h in headers.items() if name.endswith(f".{kind}")}
        if shapes:
            return Float8(scale_name=kind, scale_dims=min(shapes), inputs=inputs)
    return Float8(scale_dims=0, inputs=inputs)


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> CheckpointPolicy:
    """The methods of a checkpoint of `fp8`.

    Raises:
        ValueError: a key is not supported; the text names it.
    """
    keys = ConfigKeys(stated)
    keys.text("quant_method", one_of=("fp8",), default="fp8")
    keys.must_be("fmt", "e4m3")
    scheme = keys.text("activation_scheme", one_of=("dynamic", "static"), default="dynamic")
    powers = keys.text("scale_fmt", one_of=("ue8m0", "float"), default="float") == "ue8m0"
    size = keys.value("weight_block_size", default=None)
    stored = static_inputs(headers) if scheme == "static" else None
    method = per_matrix(headers, stored or InputsStated(InputScales.row, powers))
    if size is not None:
        is_pair = isinstance(size, list) and len(size) == 2
        if not is_pair or any(each not in (32, 64, 128, 256) for each in size):
            raise keys.error(
                "weight_block_size", f"is {size!r}; it must be two of 32, 64, 128 and 256"
            )
        method = Float8(
            scale_name="weight_scale_inv",
            strategy="block",
            block_rows=size[0],
            group_size=size[1],
            inputs=InputsStated(InputScales.group, powers),
        )
    key = "ignored_layers" if keys.has("ignored_layers") else "modules_to_not_convert"
    policy = FloatPolicy(
        unquantized=unquantized,
        headers=headers,
        library="FP8",
        method=method,
        key=key,
        floats=keys.names(key),
    )
    keys.must_be("dequantize", False)
    keys.must_be("expert_dtype", "fp8")
    keys.without_effect("modules_to_not_convert", "kv_cache_scheme")
    keys.finish()
    return policy
