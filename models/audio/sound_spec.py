"""How a model takes sounds: audio that stands in a prompt, beside its text.

The process that prepares a request decodes a sound, cuts it into windows and computes a log-mel
spectrogram of each window (runtime/audio). The engine computes the embeddings of a window, one for
each placeholder token. This module imports no torch.
"""

from __future__ import annotations

from ostinato.models.audio.mel_spec import MelSpec

__all__ = ("FRAMES_OF_STATE", "STATES_OF_EMBEDDING", "SoundSpec")

FRAMES_OF_STATE = 2  # frames of the spectrogram for one state of the encoder
STATES_OF_EMBEDDING = 2  # states of the encoder whose mean gives one embedding


class SoundSpec(MelSpec, frozen=True, kw_only=True):
    """How a model takes sounds (Qwen2-Audio, arXiv:2407.10759; Audio Flamingo 3, 2507.08128)."""

    placeholder_id: int  # the token that stands for one embedding
    placeholder: str  # its text
    # What stands for a sound in the prompt if the chat template reads no sounds: the placeholder
    # once, with the tokens before and after a sound.
    marked_placeholder: str
    max_windows: int  # windows of one sound; a longer sound is refused

    @property
    def max_seconds(self) -> int:
        """Seconds of the longest sound."""
        return self.max_windows * self.window_s

    @property
    def max_window_tokens(self) -> int:
        """Embeddings of a full window."""
        return self.num_frames // (FRAMES_OF_STATE * STATES_OF_EMBEDDING)

    @property
    def max_tokens(self) -> int:
        """Embeddings of the longest sound."""
        return self.max_windows * self.max_window_tokens
