"""Makes the parts of a rank that its model needs for images."""

from __future__ import annotations

from typing import NamedTuple

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.base import LanguageModel
from ostinato.models.decoder import Decoder
from ostinato.models.step_tensors import ImageTensors
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.execution.images.image_tensor_writer import ImageTensorWriter
from ostinato.runtime.execution.images.rank_images import RankImages

__all__ = ("ImageParts", "make_image_parts")


class ImageParts(NamedTuple):
    """The parts of a rank for images."""

    images: RankImages | None = None  # None = the engine takes no images
    tensors: ImageTensorWriter | None = None  # None = the model has no step tensors for images


def make_image_parts(
    model: LanguageModel, buffers: StaticBuffers, spec: ImageSpec | None
) -> ImageParts:
    """Make the parts, and compute the embeddings of a small image, so that all kernels are loaded.

    Args:
        model: the loaded model.
        buffers: the static buffers of its steps.
        spec: how the model takes images; None = the engine takes none.
    """
    if not isinstance(model, Decoder) or not isinstance(buffers.host, ImageTensors):
        return ImageParts()
    images = None
    if spec is not None:
        images = RankImages(model.vision, model.image_tables(), spec)
        images.warm_up()
    return ImageParts(images, ImageTensorWriter(buffers, images, spec))
