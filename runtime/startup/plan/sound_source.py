"""How a checkpoint's model takes sounds, and how many embeddings of them an engine can keep."""

from __future__ import annotations

from ostinato.conf.engine_config import EngineConfig
from ostinato.models.audio.sound_fields import read_sound_spec
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("count_sound_rows", "read_sounds")

_LEAST_ROWS = 16_384  # rows of the media tables, if audio.cache_tokens is null


def read_sounds(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> SoundSpec | None:
    """How a model takes sounds; None if it takes none.

    Random weights without a checkpoint take none, because the files that say how are missing.

    Raises:
        StartupError: a file of the checkpoint is missing, or has a value that is not supported.
    """
    if model.sound is None or checkpoint.path is None or not config.audio.max_per_request:
        return None
    files = TokenizerFiles(config.model.tokenizer or checkpoint.path)

    def token_text(token_id: int) -> str:
        text = files.added_token(token_id)
        if text is None:
            raise ValueError(
                f"{files.path}: no added token has the id {token_id}, which config.json names; set"
                " audio.max_per_request=0 to serve texts alone"
            )
        return text

    try:
        return read_sound_spec(
            checkpoint.path,
            checkpoint.hf_config,
            model.sound,
            token_text=token_text,
            token_id=files.added_token_ids().get,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def count_sound_rows(config: EngineConfig, spec: SoundSpec | None) -> int:
    """Embeddings of sounds that can be kept at once; 0 = the model takes none."""
    if spec is None:
        return 0
    return config.audio.cache_tokens or max(2 * spec.max_tokens, _LEAST_ROWS)
