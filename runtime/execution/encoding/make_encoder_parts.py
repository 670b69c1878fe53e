"""Makes the parts of a rank that its model needs for images or audio."""

from __future__ import annotations

from typing import NamedTuple

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.base import LanguageModel
from ostinato.models.decoder import Decoder
from ostinato.models.step_tensors import AudioTensors, MediaTensors
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.execution.encoding.audio_encoder import AudioEncoder
from ostinato.runtime.execution.encoding.audio_tensor_writer import AudioTensorWriter
from ostinato.runtime.execution.encoding.image_encoder import ImageEncoder
from ostinato.runtime.execution.encoding.media_tensor_writer import MediaTensorWriter
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
from ostinato.runtime.execution.encoding.sound_encoder import SoundEncoder

__all__ = ("EncoderParts", "make_encoder_parts")


class EncoderParts(NamedTuple):
    """The parts of a rank for images or audio."""

    encoder: RankEncoder | None = None  # None = the engine takes text only
    # None = the model has no step tensors for images or audio
    tensors: MediaTensorWriter | AudioTensorWriter | None = None


def make_encoder_parts(
    model: LanguageModel,
    buffers: StaticBuffers,
    images: ImageSpec | None,
    sounds: SoundSpec | None,
) -> EncoderParts:
    """Make the parts, and encode a small input, so that all kernels are loaded.

    Args:
        model: the loaded model.
        buffers: the static buffers of its steps.
        images: how the model takes images; None = the engine takes none.
        sounds: how the model takes sounds; None = the engine takes none.
    """
    if not isinstance(model, Decoder):
        return EncoderParts()
    if isinstance(buffers.host, AudioTensors):
        audio = AudioEncoder(model)
        encoder = RankEncoder(audio)
        encoder.warm_up()
        return EncoderParts(encoder, AudioTensorWriter(buffers, encoder, audio.num_windows))
    if not isinstance(buffers.host, MediaTensors):
        return EncoderParts()
    encoder = _media_encoder(model, images, sounds)
    if encoder is not None:
        encoder.warm_up()
    return EncoderParts(encoder, MediaTensorWriter(buffers, encoder, images))


def _media_encoder(
    model: Decoder, images: ImageSpec | None, sounds: SoundSpec | None
) -> RankEncoder | None:
    """What encodes images or sounds; None = the engine takes text only."""
    tables = model.media_tables()
    if images is not None:
        tower = model.vision
        return RankEncoder(None if tower is None else ImageEncoder(tower, tables, images))
    if sounds is not None:
        tower, (table,) = model.sound, tables
        if tower is None or table is None:  # a later stage of a pipeline
            return RankEncoder(None)
        return RankEncoder(SoundEncoder(tower, table, sounds))
    return None
