"""Videos for the models of `image_models`, and what transformers computes of them.

A video is a tensor [pairs, 2, height, width, 3] uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.vision.image_models import MEAN, STD, spec_of
from tests.models.vision.image_variants import ImageVariant

VIDEO = 191  # the token that stands for an embedding


def random_video(
    variant: ImageVariant, num_pairs: int, rows: int = 4, columns: int = 6, seed: int = 0
) -> Tensor:
    """Frames with random pixels; the size is given in patches."""
    patch = spec_of(variant).patch_size
    size = (num_pairs, 2, rows * patch, columns * patch, 3)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator)


def hf_video_inputs(videos: Sequence[Tensor], patch: int, merge: int = 2) -> dict[str, Tensor]:
    """The keyword arguments of transformers for these videos.

    Args:
        videos: the videos.
        patch: pixels of a patch's edge.
        merge: patches of the edge of a merged square.
    """
    patches, grids = [], []
    for video in videos:
        scaled = ((video.double() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).float()
        pairs, rows, columns = len(video), video.shape[2] // patch, video.shape[3] // patch
        # As `patchify` of the video processors, which has the colours before rows and columns.
        cut = scaled.permute(0, 1, 4, 2, 3).reshape(
            pairs, 2, 3, rows // merge, merge, patch, columns // merge, merge, patch
        )
        ordered = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        patches.append(ordered.reshape(pairs * rows * columns, -1))
        grids.append([pairs, rows, columns])
    return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}


@torch.no_grad()
def hf_video_features(
    variant: ImageVariant, model: PreTrainedModel, videos: Sequence[Tensor]
) -> list[Tensor]:
    """What the tower of transformers gives for each video: [tokens, (1 + num_deep) * D]."""
    inputs = hf_video_inputs(videos, spec_of(variant).patch_size)
    outputs: Any = model
    outputs = outputs.model.get_video_features(**inputs, return_dict=True)
    # By layer of the decoder, then by video.
    deep = getattr(outputs, "deepstack_features", None) or []
    return [
        torch.cat(of_video, dim=1) for of_video in zip(outputs.pooler_output, *deep, strict=True)
    ]
