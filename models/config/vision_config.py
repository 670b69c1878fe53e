"""The hyperparameters of a vision tower, under one set of names for all families.

The readers in models/config_json/towers take them from a config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ("TowerKind", "VisionConfig")


class TowerKind(StrEnum):
    """The architecture of a vision tower."""

    clip = "clip"  # of LLaVA: learned positions, a class token, a projector
    siglip = "siglip"  # of LLaVA: as CLIP, without class token and first norm
    gemma3 = "gemma3"  # as SigLIP, with a norm and a matrix after the means of squares
    qwen2 = "qwen2"  # rotary positions, a merger of patches
    qwen2_5 = "qwen2.5"  # as Qwen2, with windows, gated MLPs and RMS norms
    qwen3 = "qwen3"  # rotary and interpolated positions, mergers for layers of the decoder
    pixtral = "pixtral"  # rotary positions, gated MLPs, RMS norms, no biases, a projector
    mistral3 = "mistral3"  # as Pixtral, with a merger of patches before the projector
    internvl = "internvl"  # as CLIP, with scales after each layer, and a merger of patches
    idefics3 = "idefics3"  # as SigLIP, with positions for any size, and a merger of patches


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """What a vision tower is built from; hashable."""

    kind: TowerKind
    output_size: int  # the hidden size of the decoder
    # Layers of the decoder, counted from the first, whose result gets states of the tower added
    # (DeepStack, arXiv:2406.04334). The tower returns (1 + num_deep) * output_size values.
    num_deep: int = 0
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str  # a key of ops.activation.ACTIVATIONS
    norm_eps: float
    patch_size: int  # pixels of a patch's edge
    # CLIP, SigLIP, Pixtral, and the towers of Gemma 3, InternVL and Idefics3
    # Pixels of an image's edge; 0 = images of all sizes. Idefics3: those for which positions are
    # stored.
    image_size: int = 0
    # The states that the projector reads, one after the other: 0 = the embeddings of the patches,
    # i = the result of layer i - 1. Later layers than the largest of them are not computed.
    feature_layers: tuple[int, ...] = ()
    drops_first: bool = False  # the first state, which is CLIP's class token, is not read
    projector_activation: str = "gelu"
    projector_bias: bool = True
    merger_norm_eps: float = 0.0  # of the norm before the merger of Mistral 3
    # InternVL
    has_positions: bool = True  # there is a table of positions
    has_last_norm: bool = False  # there is a norm after the last layer
    qkv_bias: bool = True  # queries, keys and values have biases
    qk_norm: bool = False  # queries and keys have RMS norms over all heads
    has_rms_norms: bool = False  # the norms of the layers are RMS norms
    # Gemma 3, InternVL, Idefics3, Mistral 3 and Qwen
    merge_size: int = 1  # patches of the edge of the square that gives one embedding
    # Qwen
    num_frames: int = 1  # frames of a patch; a still image is repeated
    rope_theta: float = 10_000.0
    window: int = 0  # embeddings of a window's edge; 0 = no windows
    full_layers: tuple[int, ...] = ()  # with windows: the layers that see the whole image
    num_positions: int = 0  # rows of the table of positions, which is a square
    # The layers whose results are merged for the decoder, one for each merger of the checkpoint.
    deep_layers: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_heads

    @property
    def sees_ahead(self) -> bool:
        """Whether the tokens of an image see each other in the decoder, also later ones."""
        return self.kind is TowerKind.gemma3

    @property
    def is_gated(self) -> bool:
        """Whether the MLPs are gated, and the norms are RMS norms."""
        return self.kind is TowerKind.qwen2_5 or not self.has_biases

    @property
    def has_biases(self) -> bool:
        """Whether the matrices of the layers have biases."""
        return self.kind not in (TowerKind.pixtral, TowerKind.mistral3)

    @property
    def has_frames(self) -> bool:
        """Whether the convolution of the patches has a dimension of frames, also for one frame."""
        return self.kind in (TowerKind.qwen2, TowerKind.qwen2_5, TowerKind.qwen3)

    @property
    def num_used_layers(self) -> int:
        """Layers that are computed."""
        return max(self.feature_layers) if self.feature_layers else self.num_layers
