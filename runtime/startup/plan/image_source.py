"""How a checkpoint's model takes images and videos, and how many embeddings an engine can keep."""

from __future__ import annotations

from ostinato.conf.engine_config import EngineConfig
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.vision.image_fields import read_image_spec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("count_media_rows", "limits_for_images", "read_images")

_LEAST_ROWS = 32_768  # rows of the media tables, if images.cache_tokens is null


def read_images(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> ImageSpec | None:
    """How a model takes images and videos; None if it takes none.

    Random weights without a checkpoint take none, because the files that say how are missing.

    Raises:
        StartupError: a file of the checkpoint is missing, or has a value that is not supported.
    """
    if model.vision is None or checkpoint.path is None or not config.images.max_per_request:
        return None
    files = TokenizerFiles(config.model.tokenizer or checkpoint.path)

    def token_text(token_id: int) -> str:
        text = files.added_token(token_id)
        if text is None:
            raise ValueError(
                f"{files.path}: no added token has the id {token_id}, which config.json names; set"
                " images.max_per_request=0 to serve texts alone"
            )
        return text

    try:
        return read_image_spec(
            checkpoint.path,
            checkpoint.hf_config,
            max_resized_pixels=config.images.max_resized_pixels,
            max_frame_pixels=config.video.max_resized_pixels,
            takes_videos=config.video.max_per_request > 0,
            token_text=token_text,
            token_id=files.added_token_ids().get,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def count_media_rows(config: EngineConfig, spec: ImageSpec | None) -> int:
    """Embeddings of images and videos that can be kept at once; 0 = the model takes none."""
    if spec is None:
        return 0
    largest = max(spec.max_tokens, spec.max_pair_tokens)
    return config.images.cache_tokens or max(2 * largest, _LEAST_ROWS)


def limits_for_images(
    config: EngineConfig, limits: StepLimits, spec: ImageSpec | None
) -> StepLimits:
    """The limits of steps. If tokens of an image see each other, a step has room for an image.

    It has this room beside one token of every other sequence, so an image waits for one step only.

    Raises:
        StartupError: the configured step is too small.
    """
    if spec is None or not spec.sees_ahead:
        return limits
    image_tokens, seqs = spec.max_tokens, limits.max_num_seqs
    tokens = max(limits.max_num_batched_tokens, image_tokens + seqs)
    if config.scheduler.max_num_batched_tokens not in (None, tokens):
        raise StartupError(
            f"scheduler.max_num_batched_tokens={limits.max_num_batched_tokens} is too small: a "
            f"step computes all {image_tokens} tokens of an image at once, and one token of each "
            f"of scheduler.max_num_seqs={seqs} sequences; raise it to at least {tokens}, or set "
            "images.max_per_request=0"
        )
    return limits._replace(max_num_batched_tokens=tokens, image_tokens=image_tokens)
