"""How a checkpoint's model takes images and videos, and how many embeddings an engine can keep."""

from __future__ import annotations

import logging

from ostinato.conf.engine_config import EngineConfig
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.vision.image_fields import read_image_spec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("count_media_rows", "limits_for_images", "read_images")

_LOG = logging.getLogger(__name__)
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
    largest, given = max(spec.max_tokens, spec.max_pair_tokens), config.images.cache_tokens
    if given is not None and given < largest:
        _LOG.warning(
            "images.cache_tokens=%d is less than the %d embeddings of the largest image; requests "
            "with larger images get a 400",
            given,
            largest,
        )
    return config.images.cache_tokens or max(2 * largest, _LEAST_ROWS)


def limits_for_images(
    config: EngineConfig, limits: StepLimits, model: ModelConfig, spec: ImageSpec | None
) -> StepLimits:
    """The limits of steps. If tokens of an image see each other, a step has room for an image.

    It has this room beside one token of every other sequence. So an image waits only for prompts
    that precede it in the order of the policy.

    Raises:
        StartupError: the configured step is too small.
    """
    if spec is None or model.vision is None or not model.vision.sees_ahead:
        return limits
    image_tokens, seqs = spec.max_tokens, limits.max_num_seqs
    tokens = limits.max_num_batched_tokens
    if config.scheduler.max_num_batched_tokens is None:
        tokens = max(tokens, image_tokens + seqs)
    elif config.scheduler.max_num_seqs is None:
        seqs = max(1, min(seqs, tokens - image_tokens))
    if tokens < image_tokens + seqs:
        fewer = tokens - image_tokens
        lower = f"lower scheduler.max_num_seqs to {fewer}, " if fewer >= 1 else ""
        raise StartupError(
            f"scheduler.max_num_batched_tokens={tokens} is too small: a step computes all "
            f"{image_tokens} tokens of an image at once, and one token of each of {seqs} sequences "
            f"(scheduler.max_num_seqs); raise it to at least {image_tokens + seqs}, {lower}or set "
            "images.max_per_request=0"
        )
    return limits._replace(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, image_tokens=image_tokens
    )
