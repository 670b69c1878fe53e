"""Where a sound of a prompt comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

__all__ = ("GivenSamples", "SoundSource")


class GivenSamples(NamedTuple):
    """Samples that a program has decoded itself."""

    samples: Any  # an array of NumPy, [n], [n, channels] or [channels, n]
    rate: int | None = None  # Hz; None = that of the model


class SoundSource(NamedTuple):
    """One sound of a prompt. It has a URL, base64, a file or samples."""

    url: str = ""  # data:, http: or https:
    base64: str | None = None  # the encoded audio
    file: bytes | Path | None = None  # the encoded audio
    samples: GivenSamples | None = None
