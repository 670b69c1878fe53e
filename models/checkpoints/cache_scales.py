"""Reads the scales of keys and values for a KV cache of 8 bits from a checkpoint.

The names differ between the libraries that write them:

    <attention>.k_scale, .v_scale                  compressed-tensors
    <attention>.attn.k_scale, .v_scale             Quark
    <attention>.k_proj.k_scale, .v_proj.v_scale    ModelOpt
    <attention>.qkv_proj.k_scale, .v_scale         stacked projections
    <attention>.kv_scale                           one scale for both

If a layer has only one of the two scales, that scale is used for keys and for values. A negative
number means that there is no scale.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.layers.mixers.attention_layer import Attention

__all__ = ("CacheScales",)

_NAME = re.compile(r"^(.*?)(?:\.attn|\.(?:k|v|qkv)_proj)?\.(k|v|kv)_scale$")


class CacheScales:
    """The scales of a model's layers while a checkpoint is read.

    Args:
        model: as `build_model` made it. Layers that do not use scales are skipped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, Tensor] = {
            name: module.cache_scales
            for name, module in model.named_modules()
            if isinstance(module, Attention) and module.cache_scales is not None
        }
        self._found: dict[str, dict[str, float]] = {}

    def take(self, name: str, stored_name: str, tensor: Tensor) -> bool:
        """Keep a tensor if it is a scale.

        Args:
            name: the tensor's name, without the checkpoint's prefix.
            stored_name: for messages.
            tensor: as stored.

        Returns:
            Whether the tensor is a scale of a layer of this model.

        Raises:
            CheckpointError: the tensor is not one finite number other than zero.
        """
        found = _NAME.match(name)
        if found is None or found[1] not in self._places:
            return False
        value = float(tensor) if tensor.numel() == 1 else math.nan
        if not math.isfinite(value) or value == 0:
            raise CheckpointError(
                f"{stored_name} is {value if tensor.numel() == 1 else list(tensor.shape)}; a scale "
                "of keys or values must be one finite number that is not zero; set "
                "cache.dtype=auto, which needs none"
            )
        if value > 0:
            self._found.setdefault(found[1], {})[found[2]] = value
        return True

    def finish(self) -> None:
        """Set the scales of all layers; 1.0 where the checkpoint has none."""
        for name, place in self._places.items():
            scales = self._found.get(name, {})
            both = max(scales.values(), default=1.0)
            place.copy_(torch.tensor([scales.get(kind, both) for kind in ("k", "v")]))
