"""Where the videos of a prompt come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

__all__ = (
    "MAX_RATE",
    "MAX_SECONDS",
    "FrameSampling",
    "GivenFrames",
    "VideoSource",
)

MAX_RATE = 1_000.0  # frames of a second of a video
MAX_SECONDS = 86_400.0  # of a video


class FrameSampling(NamedTuple):
    """Which frames of its videos a request asks for; at most one of the values is set."""

    num_frames: int | None = None  # frames of a video, spread over all of it
    fps: float | None = None  # frames of a second of video


class GivenFrames(NamedTuple):
    """Frames that a program has decoded itself. All of them are used."""

    frames: Any  # [n, height, width, 3] uint8, or a list of images of Pillow
    # Of the video from which they were taken; None = that at which the model samples.
    fps: float | None = None
    indices: tuple[int, ...] = ()  # which frames of that video they are; empty = the first ones
    num_total: int | None = None  # frames of that video; None = that of `frames`


class VideoSource(NamedTuple):
    """One video of a prompt. It has a URL, a file or frames."""

    url: str = ""  # data:, http: or https:
    file: bytes | Path | None = None  # the encoded video
    frames: GivenFrames | None = None
    sampling: FrameSampling = FrameSampling()  # has no effect on given frames
