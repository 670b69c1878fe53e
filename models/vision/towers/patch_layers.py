"""The layers at both ends of a vision tower: patches to states, and states to embeddings."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence

import torch
from torch import Tensor, nn

from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm
from ostinato.models.media.tower_layers import Rows, TowerBlock, TowerLinear, run_block, units
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.ops.activation import activate

__all__ = ("Merger", "PatchEmbedding", "Projector", "run_features", "run_squares")


class PatchEmbedding(TowerLinear):
    """Colours of patches to hidden states. A checkpoint stores the matrix as a convolution.

    Args:
        config: the tower's hyperparameters.
        options: dtype and device.
        bias: whether there is a bias.
    """

    def __init__(self, config: VisionConfig, options: BuildOptions, *, bias: bool) -> None:
        size = 3 * config.num_frames * config.patch_size**2
        super().__init__(size, config.hidden_size, options, bias=bias)
        self.num_frames = config.num_frames
        frames = (config.num_frames,) if config.has_frames else ()
        self.kernel = (3, *frames, config.patch_size, config.patch_size)

    def embed(self, patches: Tensor, spec: ImageSpec) -> Tensor:
        """Scale the colours of patches and embed them.

        Args:
            patches: [T, 3 * F * patch_size ** 2] uint8, as `split_patches` gives them. F is 1, or
                the frames of a patch. A still image has F = 1, and stands for all frames.
            spec: how colours are scaled.

        Returns:
            [T, hidden_size].
        """
        device = patches.device
        mean, std = (torch.tensor(each, device=device)[:, None] for each in (spec.mean, spec.std))
        colours = patches.view(len(patches), 3, -1).float()
        scaled = ((colours * spec.rescale - mean) / std).to(self.spec.dtype)
        if patches.shape[1] < self.spec.in_features:
            scaled = scaled.unsqueeze(2).expand(-1, -1, self.num_frames, -1)
        return self(scaled.reshape(len(patches), -1))


class Merger(nn.Module):
    """Merges the patches of each square into an embedding, with a norm and an MLP.

    Args:
        config: the tower's hyperparameters.
        options: dtype and device.
        norm_of_square: whether the norm is that of a whole square, not of each patch.
    """

    def __init__(
        self, config: VisionConfig, options: BuildOptions, *, norm_of_square: bool = False
    ) -> None:
        super().__init__()
        self.num_merged = config.merge_size**2
        size = config.hidden_size * self.num_merged
        self.norm_of_square = norm_of_square
        norm = RMSNorm if config.is_gated else LayerNorm
        self.norm = norm(size if norm_of_square else config.hidden_size, config.norm_eps, options)
        self.fc1 = TowerLinear(size, size, options, bias=True)
        self.fc2 = TowerLinear(size, config.output_size, options, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[squares * num_merged, D] -> [squares, output_size]."""
        shape = (len(hidden) // self.num_merged, -1)
        if self.norm_of_square:
            normal = self.norm(hidden.view(shape))
        else:
            normal = self.norm(hidden).view(shape)
        return self.fc2(activate(self.fc1(normal), "gelu"))

    def run(self, hidden: Tensor, rows_per_unit: int) -> Generator[None, None, Tensor]:
        """All hidden states [T, D] -> [T / num_merged, output_size], in units."""
        return (yield from run_squares(self, hidden, self.num_merged, rows_per_unit))


class Projector(nn.Module):
    """Two matrices with an activation between them, from states of the tower to embeddings."""

    def __init__(self, config: VisionConfig, options: BuildOptions) -> None:
        super().__init__()
        self.activation = config.projector_activation
        bias = config.projector_bias
        size = config.hidden_size * len(config.feature_layers)
        self.linear_1 = TowerLinear(size, config.output_size, options, bias=bias)
        self.linear_2 = TowerLinear(config.output_size, config.output_size, options, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """[T, hidden_size * states] -> [T, output_size]."""
        return self.linear_2(activate(self.linear_1(features), self.activation))


def run_features(
    blocks: Iterable[nn.Module],
    hidden: Tensor,
    rope: Rows | None,
    layers: Sequence[int],
    rows_per_unit: int,
) -> Generator[None, None, Tensor]:
    """Run the blocks of a tower, in units, and keep the states that its projector reads.

    Args:
        blocks: `TowerBlock`s whose patches see the whole image.
        hidden: [T, D] the states before the first block. The blocks replace them.
        rope: cosines and sines of the patches; None = the blocks rotate nothing.
        layers: the layers whose results are wanted. 0 = the states before the first layer.
        rows_per_unit: patches of a unit.

    Returns:
        [T, D * len(layers)] the states after these layers, one beside the other.
    """
    states = {0: hidden.clone()} if 0 in layers else {}
    yield
    for number, block in enumerate(blocks, 1):
        assert isinstance(block, TowerBlock), "the list has blocks only"
        yield from run_block(block, hidden, rope, rows_per_unit)
        if number in layers:
            states[number] = hidden.clone()
    return torch.cat([states[number] for number in layers], dim=1)


def run_squares(
    merge: Callable[[Tensor], Tensor], hidden: Tensor, num_merged: int, rows_per_unit: int
) -> Generator[None, None, Tensor]:
    """Compute the embeddings of all squares of patches, in units. A square can be one patch.

    Args:
        merge: [squares * num_merged, D] -> [squares, output_size].
        hidden: [T, D], the patches of each square one after the other.
        num_merged: patches of a square.
        rows_per_unit: patches of a unit.

    Returns:
        [T / num_merged, output_size].
    """
    parts: list[Tensor] = []
    step = max(1, rows_per_unit // num_merged) * num_merged
    for rows in units(len(hidden), step):
        parts.append(merge(hidden[rows]))
        yield
    return torch.cat(parts)
