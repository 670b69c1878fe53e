"""Makes the parts of a rank that its model needs for images or audio."""

from __future__ import annotations

from typing import NamedTuple

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.base import LanguageModel
from ostinato.models.decoder import Decoder
from ostinato.models.step_tensors import AudioTensors, ImageTensors
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.execution.encoding.audio_encoder import AudioEncoder
from ostinato.runtime.execution.encoding.audio_tensor_writer import AudioTensorWriter
from ostinato.runtime.execution.encoding.image_encoder import ImageEncoder
from ostinato.runtime.execution.encoding.image_tensor_writer import ImageTensorWriter
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder

__all__ = ("EncoderParts", "make_encoder_parts")


class EncoderParts(NamedTuple):
    """The parts of a rank for images or audio."""

    encoder: RankEncoder | None = None  # None = the engine takes text only
    # None = the model has no step tensors for images or audio
    tensors: ImageTensorWriter | AudioTensorWriter | None = None


def make_encoder_parts(
    model: LanguageModel, buffers: StaticBuffers, spec: ImageSpec | None
) -> EncoderParts:
    """Make the parts, and encode a small input, so that all kernels are loaded.

    Args:
        model: the loaded model.
        buffers: the static buffers of its steps.
        spec: how the model takes images; None = the engine takes none.
    """
    if not isinstance(model, Decoder):
        return EncoderParts()
    if isinstance(buffers.host, AudioTensors):
        audio = AudioEncoder(model)
        encoder = RankEncoder(audio)
        encoder.warm_up()
        return EncoderParts(encoder, AudioTensorWriter(buffers, encoder, audio.num_windows))
    if not isinstance(buffers.host, ImageTensors):
        return EncoderParts()
    encoder = None
    if spec is not None:
        tower, tables = model.vision, model.image_tables()
        encoder = RankEncoder(None if tower is None else ImageEncoder(tower, tables, spec))
        encoder.warm_up()
    return EncoderParts(encoder, ImageTensorWriter(buffers, encoder, spec))
