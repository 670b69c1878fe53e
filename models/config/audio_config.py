"""The hyperparameters of an audio encoder (Whisper, arXiv:2212.04356) and of what follows it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("AudioEncoderConfig", "SoundConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEncoderConfig:
    """What an audio encoder is built from; hashable."""

    num_bins: int  # mel bins of a spectrogram
    num_positions: int  # states of a window; each stands for two frames of the spectrogram
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str  # a key of ops.activation.ACTIVATIONS
    norm_eps: float
    is_gated: bool = False  # the MLPs are gated, and the norms are RMS norms
    has_biases: bool = True  # of the matrices of the layers

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_heads

    @property
    def num_frames(self) -> int:
        """Frames of the spectrogram of a window."""
        return 2 * self.num_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundConfig:
    """What turns sounds into embeddings: an encoder, the mean of states, and a projector."""

    encoder: AudioEncoderConfig
    output_size: int  # the hidden size of the decoder
    has_hidden_layer: bool = False  # the projector has two layers with an activation between them
    projector_activation: str = "gelu"
    projector_bias: bool = True
