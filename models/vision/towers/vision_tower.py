"""The interface of vision towers: an image to the embeddings that stand for it in a prompt."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor, nn

from ostinato.models.vision.image_spec import ImageSpec

__all__ = ("VisionTower",)


class VisionTower(nn.Module):
    """Pixels to embeddings of the decoder's hidden size, the projector included."""

    def encode(
        self, pixels: Tensor, spec: ImageSpec, rows_per_unit: int
    ) -> Generator[None, None, Tensor]:
        """Compute the embeddings of one image or pair of frames, in units.

        Other work can be done between the units.

        The generator yields after each unit. A unit is at most one layer's work for
        `rows_per_unit` patches, or for one window or merged square if that is more. In a tower that
        takes images of one size, the embedding of all patches is one unit. The results
        do not depend on `rows_per_unit`, except for the order in which kernels add.

        Args:
            pixels: [height, width, 3] uint8 RGB on the tower's device, as `prepare_image` gives it.
                The towers of Qwen also take a pair of frames of a video, [2, height, width, 3].
            spec: how the colours are scaled.
            rows_per_unit: patches of a unit.

        Returns:
            [num_tokens, (1 + num_deep) * output_size] in the tower's dtype, in the order of the
            placeholder tokens.
        """
        raise NotImplementedError
