"""`AudioEncoder`: the audio tower of one rank and the caches of its cross attention."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from ostinato.models.decoder import Decoder
from ostinato.models.layers.mixers.cross_attention_layer import CrossAttention
from ostinato.runtime.execution.executor import BeginEncoding

__all__ = ("AudioEncoder", "copy_features", "positions_per_unit")

# Positions of one unit on a CPU, so that a unit of a large encoder takes some ten milliseconds, and
# a unit of a small one is not divided too finely.
_ROWS, _MOST_ROWS = 64, 256
_SIZE_PER_ROWS = 1024  # an encoder of this hidden size has units of `_ROWS`
_GPU_ROWS = 1 << 20  # on a GPU, a unit is the part of a layer for all positions


class AudioEncoder:
    """Computes the keys and values of cross attention.

    Args:
        model: a model with an audio tower.
    """

    def __init__(self, model: Decoder) -> None:
        assert model.audio is not None, "the model has declared step tensors for audio"
        self._tower = model.audio
        self._layers = [module for module in model.modules() if isinstance(module, CrossAttention)]
        self._device = self._tower.position_embedding.device
        self._rows_per_unit = positions_per_unit(self._tower.config.hidden_size, self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_windows(self) -> int:
        """Windows of the caches, without window 0."""
        return self._layers[0].space.num_windows

    def touch(self) -> None:
        for layer in self._layers:
            for cache in (layer.k_cache, layer.v_cache):
                cache.view(torch.uint8).zero_()

    def begin(self, call: BeginEncoding) -> Generator[None, None, None]:
        (window,) = call.rows
        features = copy_features(call, self._device)
        states = yield from self._tower.encode(features, self._rows_per_unit)
        for layer in self._layers:
            yield from layer.store(states, window, self._rows_per_unit)

    def warm_up(self) -> None:
        config = self._tower.config
        shape = config.num_bins, config.num_frames
        silence = bytes(4 * config.num_bins * config.num_frames)
        for _ in self.begin(BeginEncoding(b"", [0], shape, silence, [])):
            pass
        for layer in self._layers:
            blocks = layer.space.blocks_per_window
            for cache in (layer.k_cache, layer.v_cache):
                cache.view(torch.uint8)[:blocks].zero_()


def positions_per_unit(hidden_size: int, device: torch.device) -> int:
    """Positions of an audio encoder of this size that one unit of work computes."""
    if device.type != "cpu":
        return _GPU_ROWS
    return min(max(_ROWS * _SIZE_PER_ROWS // hidden_size, _ROWS // 2), _MOST_ROWS)


def copy_features(call: BeginEncoding, device: torch.device) -> Tensor:
    """[mel bins, frames] float32 on the device: the spectrogram that is to be encoded."""
    features = np.frombuffer(call.data, dtype=np.float32).reshape(call.shape).copy()
    return torch.from_numpy(features).to(device)
