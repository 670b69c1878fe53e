"""The section `video`: limits of the videos in prompts, and which of their frames are used."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.schema import Section, setting

__all__ = ("VideoConfig",)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoConfig(Section):
    """Videos in prompts, for models that take them."""

    key = "video"
    max_per_request: int = setting(
        4, "videos of one request; 0 = requests with videos are refused", at_least=0, at_most=64
    )
    max_mib: float = setting(64.0, "MiB of one encoded video", above=0, at_most=1024)
    fps: float | None = setting(
        None,
        "frames of a second of video that the model sees; null = as the model states, mostly 2",
        above=0,
        at_most=60,
    )
    max_frames: int = setting(
        32,
        "frames of one video that the model sees, spread over all of it",
        at_least=2,
        at_most=768,
    )
    max_resized_pixels: int | None = setting(
        None,
        "pixels of one frame after it is resized; null = as the model states, at most those of 768 "
        "embeddings",
        at_least=1,
    )
