"""How a checkpoint's model takes audio, and the room for what its decoder reads of it."""

from __future__ import annotations

import torch

from ostinato.conf.engine_config import EngineConfig
from ostinato.models.audio.audio_fields import read_audio_spec
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import CrossSpace
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("cross_space", "read_audio")


def read_audio(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> AudioSpec | None:
    """How a model takes audio; None if it takes none.

    Random weights without a checkpoint take none, because the files that say how are missing.

    Raises:
        StartupError: a file of the checkpoint is missing, or has a value that is not supported.
    """
    if model.audio is None or checkpoint.path is None:
        return None
    token_ids = TokenizerFiles(config.model.tokenizer or checkpoint.path).added_token_ids()
    try:
        return read_audio_spec(
            checkpoint.path,
            checkpoint.hf_config,
            checkpoint.generation_config,
            token_id=token_ids.get,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def cross_space(
    config: EngineConfig, model: ModelConfig, cache_dtype: torch.dtype
) -> CrossSpace | None:
    """The room for keys and values of encoder states; None for a model without cross attention."""
    if model.audio is None:
        return None
    return CrossSpace(
        num_windows=config.audio.cache_windows,
        num_keys=model.audio.num_positions,
        block_size=config.cache.block_size,
        dtype=cache_dtype,
    )
