"""Checkpoints of `quant_method: mxfp4`: gpt-oss, whose experts are floats of 4 bits.

<module>_blocks  uint8 [experts, out, in / 32, 16]: two floats in a byte
<module>_scales  uint8 [experts, out, in / 32]: a scale is 2 to the power of (byte - 127)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.models.quantized_checkpoints.fp8 import FloatPolicy
from ostinato.models.quantized_checkpoints.keys import ConfigKeys
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers
from ostinato.models.quantized_checkpoints.stored_floats import Float4
from ostinato.models.weight_methods.weight_method import WeightMethod

__all__ = ("from_checkpoint",)


def from_checkpoint(
    stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> CheckpointPolicy:
    """The methods of a checkpoint of gpt-oss.

    Raises:
        ValueError: a key is not supported; the text names it.
    """
    keys = ConfigKeys(stated)
    keys.text("quant_method", one_of=("mxfp4",), default="mxfp4")
    policy = FloatPolicy(
        unquantized=unquantized,
        headers=headers,
        library="MXFP4",
        method=Float4(group_size=32, scale_dtype="bfloat16", library="gpt-oss"),
        key="modules_to_not_convert",
        floats=keys.names("modules_to_not_convert"),
    )
    keys.must_be("dequantize", False)
    keys.finish()
    return policy
