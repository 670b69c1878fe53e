"""The section `audio`: limits of audio that is transcribed, and the windows that are kept."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.schema import Section, setting

__all__ = ("AudioConfig",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig(Section):
    """Audio files, for models that transcribe them."""

    key = "audio"
    max_mib: float = setting(25.0, "MiB of one audio file", above=0, at_most=1024)
    max_seconds: float = setting(1800.0, "seconds of one audio file", above=0, at_most=86400)
    cache_windows: int = setting(
        16,
        "windows of audio whose keys and values are kept; so many are transcribed at once",
        at_least=1,
        at_most=4096,
    )
