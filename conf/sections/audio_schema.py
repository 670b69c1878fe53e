"""The section `audio`: limits of audio, and how much encoded audio is kept."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.schema import Section, setting

__all__ = ("AudioConfig",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig(Section):
    """Audio, for models that transcribe it and for models that take sounds in prompts."""

    key = "audio"
    max_mib: float = setting(25.0, "MiB of one audio file", above=0, at_most=1024)
    max_seconds: float = setting(1800.0, "seconds of one audio file", above=0, at_most=86400)
    cache_windows: int = setting(
        16,
        "windows of audio whose keys and values are kept; so many are transcribed at once",
        at_least=1,
        at_most=4096,
    )
    max_per_request: int = setting(
        8,
        "sounds in the prompt of one request; 0 = requests with sounds are refused, and the audio "
        "encoder of a chat model is not loaded",
        at_least=0,
        at_most=1024,
    )
    cache_tokens: int | None = setting(
        None,
        "embeddings of sounds that are kept; null = those of the two longest sounds, or 16384",
        at_least=1,
        at_most=10_000_000,
    )
