"""Prepares one video of a prompt for the engine."""

from __future__ import annotations

import math
from pathlib import Path

from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import VideoSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.media_kinds import most_bytes
from ostinato.runtime.media_files.pyav import has_av, import_av
from ostinato.runtime.types.images import PreparedImages
from ostinato.runtime.video.video_sources import FrameSampling, GivenFrames

__all__ = (
    "VideoContent",
    "check_sampling",
    "max_video_memory",
    "preload_videos",
    "prepare_video",
)

_MAX_FPS = 60.0
_CODE_BYTES = 192 << 20  # FFmpeg's code and buffers, and the times of the frames
_LARGE_FRAMES = 8  # that a decoder keeps
_SMALL_FRAMES, _SMALL_PIXELS = 20, 1 << 21
_BYTES_PER_DECODED_PIXEL = 2
_BYTES_PER_RGB_PIXEL = 12  # converted, as a picture, turned and resized, 3 each

VideoContent = bytes | Path | list[bytes] | GivenFrames
"""An encoded video, its path, its frames as JPEG files, or its decoded frames."""


def preload_videos() -> None:
    """Import what `prepare_video` needs, if it is installed, so that forks share it."""
    import ostinato.runtime.video.prepare_video  # noqa: F401 - it has NumPy and Pillow

    if has_av():
        import_av()


def max_video_memory(images: ImagesConfig, config: VideoConfig) -> int:
    """Bytes of memory that `prepare_video` takes at most, besides its result and the imports.

    Args:
        images: the limits of one frame.
        config: the limits of the video.
    """
    # A video with large frames has fewer that its other frames refer to (H.264, annex A).
    most = images.max_pixels
    decoder = _LARGE_FRAMES * most + _SMALL_FRAMES * min(most, _SMALL_PIXELS)
    return (
        _CODE_BYTES
        + most_bytes(config)
        + _BYTES_PER_DECODED_PIXEL * decoder
        + _BYTES_PER_RGB_PIXEL * most
    )


def check_sampling(
    sampling: FrameSampling, spec: VideoSpec | None, config: VideoConfig, name: str
) -> None:
    """Check which frames a request asks for.

    Args:
        sampling: the frames.
        spec: how the model takes videos; None = it takes none.
        config: the limits.
        name: the name of the video in errors, or of the field that has the values.

    Raises:
        InvalidRequestError: both values are set, there are too many frames or none, or the rate is
            not within 0 to 60.
    """
    number, fps = sampling
    most, setting = config.max_frames, "video.max_frames"
    if spec is not None and spec.max_frames < most:
        most, setting = spec.max_frames, "the limit of the model"
    problem = ""
    if number is not None and fps is not None:
        problem = "num_frames and fps cannot be combined; leave one out"
    elif number is not None and not 1 <= number <= most:
        remedy = "ask for fewer frames" if number > most else "ask for more frames, or leave it out"
        problem = f"num_frames={number} must be from 1 to {most} ({setting}); {remedy}"
    elif fps is not None and not (math.isfinite(fps) and 0 < fps <= _MAX_FPS):
        problem = (
            f"fps={fps:g} must be above 0 and at most {_MAX_FPS:g}; ask for another rate, or leave "
            "it out"
        )
    if problem:
        raise InvalidRequestError(
            f"{name}: {problem}", param=name.partition(":")[0], code="invalid_value"
        )


def prepare_video(
    content: VideoContent,
    sampling: FrameSampling,
    spec: ImageSpec,
    images: ImagesConfig,
    config: VideoConfig,
    name: str,
    *,
    max_tokens: int,
) -> PreparedImages:
    """Decode the frames of a video that the model sees, and resize them.

    Args:
        content: the video.
        sampling: which frames of an encoded video are used, and the rate of JPEG files; has been
            checked by `check_sampling`.
        spec: how the model takes images and videos.
        images: the limits of one frame.
        config: the limits of the video.
        name: the name of the video in errors.
        max_tokens: a video with more embeddings is refused when its first frame is decoded.

    Raises:
        InvalidRequestError: the video is not valid or too large, or PyAV, which decodes it, is not
            installed.
    """
    from ostinato.runtime.video.prepare_video import (
        FrameNeeds,
        file_pairs,
        given_pairs,
        jpeg_pairs,
    )

    needs = FrameNeeds(spec, config, images.max_pixels, max_tokens, name)
    if isinstance(content, GivenFrames):
        return given_pairs(content, needs)
    if isinstance(content, list):
        return jpeg_pairs(content, sampling, needs)
    max_bytes = most_bytes(config)
    data = _content(content, max_bytes, name) if isinstance(content, Path) else content
    return file_pairs(data, sampling, max_bytes, needs)


def _content(path: Path, max_bytes: int, name: str) -> bytes:
    """The bytes of a file. Of a file that is too large, as many are read as show this."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidRequestError(
            f"{name}: the file {path} cannot be read ({error.strerror or error})",
            param=name.partition(":")[0],
            code="invalid_video",
        ) from error
