"""Turns the frames of a video into pairs of the size that a model takes.

The sizes, the times and the positions are those of the processors of transformers. They resize with
torch, this module with Pillow: a colour can differ by 1 of 255.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import FRAMES_OF_PAIR, VideoSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.decode_picture import (
    ImageLimits,
    decode_picture,
    load_picture,
)
from ostinato.runtime.media_files.resized_size import check_shape, resized_size
from ostinato.runtime.types.images import PreparedImages, PromptImage, image_digest
from ostinato.runtime.video.decode_video import VideoLimits, VideoReader, video_refusal
from ostinato.runtime.video.sample_frames import choose_frames, pair_times, time_offsets
from ostinato.runtime.video.video_sources import FrameSampling, GivenFrames

__all__ = ("FrameNeeds", "file_pairs", "frame_size", "given_pairs", "jpeg_pairs")

_JPEG_FPS = 1.0  # of JPEG files, unless the request states another


class FrameNeeds(NamedTuple):
    """What the frames of a video must meet."""

    spec: ImageSpec  # which takes videos
    config: VideoConfig
    max_pixels: int  # of one frame as it is sent
    max_tokens: int  # embeddings of the video
    name: str  # of the video in errors

    @property
    def video(self) -> VideoSpec:
        """How the model takes videos."""
        assert self.spec.video is not None, "the model takes videos"
        return self.spec.video


def frame_size(
    height: int, width: int, num_frames: int, spec: ImageSpec, name: str
) -> tuple[int, int]:
    """The height and width of a resized frame.

    Args:
        height: of the frame, in pixels.
        width: of the frame, in pixels.
        num_frames: frames that the model sees.
        spec: how the model takes images and videos.
        name: the name of the video in errors.

    Raises:
        InvalidRequestError: the frame is too long and narrow.
    """
    video = spec.video
    assert video is not None, "the model takes videos"
    unit, number, counted = spec.unit, 1, 1
    if video.limits_whole:
        number = max(FRAMES_OF_PAIR, num_frames)
        counted = round(number / FRAMES_OF_PAIR) * FRAMES_OF_PAIR
        if min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
    check_shape(height, width, name, noun="frame", code="invalid_video")
    most = video.largest(number)
    return resized_size(
        height, width, unit, video.min_pixels, most, num_pictures=number, num_counted=counted
    )


def file_pairs(
    data: bytes, sampling: FrameSampling, max_bytes: int, needs: FrameNeeds
) -> PreparedImages:
    """The pairs of a video file.

    Args:
        data: the file.
        sampling: which frames are used.
        max_bytes: a larger file is refused.
        needs: what the frames must meet.

    Raises:
        InvalidRequestError: see `VideoReader`; or the video has too many embeddings.
    """
    limits = VideoLimits(max_bytes=max_bytes, max_pixels=needs.max_pixels)
    reader = VideoReader(data, limits, needs.name)
    indices = choose_frames(reader.num_frames, reader.fps, sampling, needs.video, needs.config)
    frames = _Frames(len(indices), needs, "ask for fewer frames (num_frames)")
    slots = {index: slot for slot, index in enumerate(indices)}
    for index, picture in reader.pictures(indices):
        frames.add(slots[index], picture)
    return frames.finish(indices, reader.num_frames, reader.fps)


def jpeg_pairs(
    files: Sequence[bytes], sampling: FrameSampling, needs: FrameNeeds
) -> PreparedImages:
    """The pairs of frames that are JPEG files. All of them are used.

    Args:
        files: the frames.
        sampling: its `fps` is that of the frames; None = 1.
        needs: what the frames must meet.

    Raises:
        InvalidRequestError: the code is `invalid_video`: a frame is damaged, or too large, or there
            are too many.
    """
    limits = ImageLimits(max_bytes=sum(map(len, files)), max_pixels=needs.max_pixels)

    def decode(file: bytes, name: str) -> Image.Image:
        return decode_picture(file, limits, name)

    given = GivenFrames(files, fps=sampling.fps or _JPEG_FPS)
    return _all_pairs(files, given, decode, needs)


def given_pairs(given: GivenFrames, needs: FrameNeeds) -> PreparedImages:
    """The pairs of frames that a program has decoded. All of them are used.

    Args:
        given: the frames.
        needs: what the frames must meet.

    Raises:
        InvalidRequestError: the code is `invalid_video`: a frame is too large or has another type,
            or there are too many.
    """
    limits = ImageLimits(max_bytes=0, max_pixels=needs.max_pixels)

    def load(frame: Any, name: str) -> Image.Image:
        if isinstance(frame, np.ndarray):
            frame = Image.fromarray(np.ascontiguousarray(frame))
        return load_picture(frame, limits, name)

    return _all_pairs(given.frames, given, load, needs)


def _all_pairs(
    frames: Sequence[Any],
    given: GivenFrames,
    decode: Callable[[Any, str], Image.Image],
    needs: FrameNeeds,
) -> PreparedImages:
    """The pairs of a list of frames, each of which `decode` turns into a picture."""
    most = min(needs.config.max_frames, needs.video.max_frames)
    if not 1 <= len(frames) <= most:
        raise video_refusal(
            needs.name,
            f"the video has {len(frames)} frames; it must have from 1 to {most} "
            "(video.max_frames), because all are used; send fewer",
        )
    row = _Frames(len(frames), needs, "send fewer or smaller frames")
    for slot, frame in enumerate(frames):
        try:
            row.add(slot, decode(frame, f"{needs.name}: frame {slot + 1}"))
        except InvalidRequestError as error:
            code = "invalid_video" if error.code == "invalid_image" else error.code
            raise InvalidRequestError(str(error), param=error.param, code=code) from error
    fps = given.fps or needs.config.fps or needs.video.fps
    indices = given.indices or tuple(range(len(frames)))
    return row.finish(indices, given.num_total or max(indices) + 1, fps)


class _Frames:
    """Resizes the frames of a video, and makes pairs of them.

    Args:
        num_frames: frames that the model sees.
        needs: what the frames must meet.
        remedy: what the client can do about too many embeddings.
    """

    def __init__(self, num_frames: int, needs: FrameNeeds, remedy: str) -> None:
        self._needs = needs
        self._remedy = remedy
        self._pixels = [b""] * num_frames
        self._size = (0, 0)  # height and width; those of the first frame hold for all

    def add(self, slot: int, picture: Image.Image) -> None:
        """Resize a frame.

        Args:
            slot: its number among the frames that the model sees, from 0.
            picture: in mode RGB.

        Raises:
            InvalidRequestError: it is the first one, and the video has too many embeddings, or is
                too long and narrow.
        """
        if self._size == (0, 0):
            self._size = self._first_size(picture)
        height, width = self._size
        resized = picture.resize((width, height), self._needs.spec.resample)
        self._pixels[slot] = resized.tobytes()

    def finish(self, indices: Sequence[int], num_total: int, fps: float) -> PreparedImages:
        """The pairs.

        Args:
            indices: which frames of the video they are.
            num_total: frames of the video.
            fps: frames of a second of it.
        """
        height, width = self._size
        spec, video = self._needs.spec, self._needs.video
        pixels = self._pixels
        if len(pixels) % FRAMES_OF_PAIR:
            pixels = [*pixels, pixels[-1]]
        num_pairs = len(pixels) // FRAMES_OF_PAIR
        offsets = time_offsets(num_pairs, len(indices) / num_total * fps, video)
        pairs: list[PromptImage] = []
        for number, offset in enumerate(offsets):
            begin = number * FRAMES_OF_PAIR
            content = b"".join(pixels[begin : begin + FRAMES_OF_PAIR])
            pairs.append(
                PromptImage(
                    digest=image_digest(height, width, content),
                    begin=0,
                    num_tokens=spec.count_tokens(height, width),
                    height=height,
                    width=width,
                    pixels=content,
                    num_frames=FRAMES_OF_PAIR,
                    time_offset=offset,
                    is_continued=number > 0 and not video.states_times,
                )
            )
        times = pair_times(indices, fps) if video.states_times else ()
        return PreparedImages(
            tuple(pairs), "".join(f"{time}{video.marked_placeholder}" for time in times)
        )

    def _first_size(self, picture: Image.Image) -> tuple[int, int]:
        """The size of the resized frames, checked."""
        needs, num_frames = self._needs, len(self._pixels)
        height, width = frame_size(
            picture.height, picture.width, num_frames, needs.spec, needs.name
        )
        num_pairs = -(-num_frames // FRAMES_OF_PAIR)
        num_tokens = num_pairs * needs.spec.count_tokens(height, width)
        if num_tokens > needs.max_tokens:
            raise InvalidRequestError(
                f"{needs.name}: {num_frames} frames of {width}x{height} pixels have {num_tokens} "
                f"embeddings, and the request can have {needs.max_tokens} more "
                f"(images.cache_tokens); {self._remedy}",
                param=needs.name.partition(":")[0],
                code="too_many_embeddings",
            )
        return height, width
