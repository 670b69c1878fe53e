"""Reads the videos that a Python program gives: frames, the bytes of files, paths, and URLs."""

from __future__ import annotations

import math
import operator
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.part_keys import check_keys
from ostinato.runtime.video.video_sources import (
    MAX_RATE,
    MAX_SECONDS,
    FrameSampling,
    GivenFrames,
    VideoSource,
)

__all__ = ("VIDEO_KINDS", "VideoInput", "video_list", "video_of_part")

VideoInput = Any
"""Frames, `(frames, metadata)`, the bytes of a file, or a path.

Frames are an array of NumPy or torch, [n, height, width, 3] uint8, or a list of images of Pillow.
The metadata are those of vLLM. A path is an `os.PathLike`.
"""

VIDEO_KINDS = ("video_url", "video")
"""The types of parts of a message that are videos."""

_METADATA = {"fps", "frames_indices", "total_num_frames"}
# Metadata that follow from the others, or have no effect on frames that are given.
_IGNORED = {"duration", "video_backend", "width", "height", "do_sample_frames"}


def video_list(value: object, param: str) -> list[VideoSource]:
    """The videos of `multi_modal_data`.

    Args:
        value: one video, a list of videos, or an array [videos, n, height, width, 3].
        param: the name of the videos in errors.

    Raises:
        InvalidRequestError: a video has another type.
    """
    if isinstance(value, list) and not _are_pictures(cast("list[object]", value)):
        return [_source(one, param) for one in cast("list[object]", value)]
    array = _array(value)
    if array is not None and array.ndim == 5:
        return [_source(one, param) for one in array]
    return [_source(value, param)]


def video_of_part(part: Mapping[str, Any], place: str) -> VideoSource:
    """The video of a part of a message.

    Args:
        part: `{"type": "video_url", "video_url": URL or {"url": URL}}`, or `{"type": "video",
            "video": VIDEO}` with a URL as text or a `VideoInput`. Both can have `fps` or
            `num_frames`, and `uuid`, which has no effect.
        place: the name of the part in errors.

    Raises:
        InvalidRequestError: the part has another key, or a value of another type.
    """
    kind = str(part["type"])
    check_keys(part, {"type", kind, "uuid", "fps", "num_frames"}, place)
    sampling = FrameSampling(
        num_frames=_number(part, "num_frames", int, place), fps=_number(part, "fps", float, place)
    )
    value = part.get(kind)
    if kind == "video_url" and isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        check_keys(fields, {"url"}, f"{place}.video_url")
        value = fields.get("url")
    if isinstance(value, str):
        return VideoSource(url=value, sampling=sampling)
    if kind == "video_url":
        raise _refusal(place, f".video_url must be a URL as text, got {type(value).__name__}")
    source = _source(value, f"{place}.video")
    if source.frames is not None and sampling != FrameSampling():
        raise _refusal(
            place, ": fps and num_frames choose frames of a file; give the frames that you want"
        )
    return source._replace(sampling=sampling)


def _source(value: object, param: str) -> VideoSource:
    """One video without a URL."""
    if isinstance(value, bytes | bytearray | memoryview):
        return VideoSource(file=bytes(value))
    if isinstance(value, os.PathLike):
        return VideoSource(file=Path(cast("os.PathLike[str]", value)))
    metadata: Mapping[str, Any] = {}
    if isinstance(value, tuple):
        pair = cast("tuple[object, ...]", value)
        if len(pair) != 2 or not isinstance(pair[1], Mapping):
            raise _refusal(
                param, f" must be (frames, metadata) if it is a tuple, got {reprlib.repr(pair)}"
            )
        value, metadata = pair[0], cast("Mapping[str, Any]", pair[1])
    frames = _frames(value, param)
    return VideoSource(frames=_with_metadata(frames, metadata, param))


def _frames(value: object, param: str) -> Any:
    """An array [n, height, width, 3] uint8, or a list of images of Pillow."""
    if isinstance(value, list | tuple) and _are_pictures(cast("Sequence[object]", value)):
        return list(cast("Sequence[object]", value))
    array = _array(value)
    if array is None:
        raise _refusal(
            param,
            " must be an array of frames, a list of images of Pillow, (frames, metadata), the bytes"
            f" of a file or a path, got {type(value).__name__}",
        )
    if array.ndim != 4 or array.shape[3] != 3 or not array.size or str(array.dtype) != "uint8":
        raise _refusal(
            param,
            f" is an array of the shape {list(array.shape)} of {array.dtype}; it must be [frames,"
            " height, width, 3] of uint8, with the colours R, G, B",
        )
    return array


def _with_metadata(frames: Any, metadata: Mapping[str, Any], param: str) -> GivenFrames:
    """The frames, and which ones of a video they are."""
    unknown = [key for key in metadata if key not in _METADATA | _IGNORED]
    if unknown:
        raise _refusal(
            param,
            f" has the metadata {unknown[0]!r:.60}, which are not supported; supported: "
            f"{', '.join(sorted(_METADATA | _IGNORED))}",
        )
    if metadata.get("do_sample_frames"):
        raise _refusal(
            param,
            " has the metadata do_sample_frames=True, but all given frames are used; choose the"
            " frames, or give the file",
        )
    number = len(frames)
    fps = _number(metadata, "fps", float, param)
    total = _number(metadata, "total_num_frames", int, param)
    indices = tuple(range(number))
    is_stated = metadata.get("frames_indices") is not None
    if is_stated:
        indices = _indices(metadata["frames_indices"])
    last = max(indices, default=0)
    problem = ""
    if len(indices) != number or min(indices, default=0) < 0:
        problem = f"frames_indices must have {number} integers from 0, one for each frame"
    elif list(indices) != sorted(indices):
        problem = "frames_indices must be sorted"
    elif total is not None and not last < total:
        problem = f"total_num_frames={total} must be above frames_indices, which go to {last}"
    elif fps is not None and not (0 < fps <= MAX_RATE):
        problem = f"fps={fps:g} must be above 0 and at most {MAX_RATE:g}"
    elif fps is not None and max(last + 1, total or 0) / fps > MAX_SECONDS:
        problem = f"fps={fps:g} makes the video longer than {MAX_SECONDS:g} s"
    if problem:
        raise _refusal(param, f": {problem}")
    if not is_stated:
        return GivenFrames(frames, fps=fps)
    return GivenFrames(frames, fps=fps, indices=indices, num_total=total)


def _indices(value: object) -> tuple[int, ...]:
    """The integers of an array or a sequence; empty if it has others."""
    array = _array(value)
    try:
        return tuple(operator.index(one) for one in (value if array is None else array.tolist()))  # type: ignore[union-attr]
    except TypeError:
        return ()


def _array(value: object) -> Any:
    """An array of NumPy; None = the value is none of NumPy or torch."""
    if hasattr(value, "detach"):  # a tensor of torch, which this module does not import
        value = cast("Any", value).detach().cpu().numpy()
    return value if hasattr(value, "ndim") and hasattr(value, "dtype") else None


def _are_pictures(values: Sequence[object]) -> bool:
    return bool(values) and all(hasattr(value, "convert") for value in values)


def _number(fields: Mapping[str, Any], key: str, kind: type, place: str) -> Any:
    """A number of `fields`, or None."""
    value = fields.get(key)
    allowed = (int, float) if kind is float else int
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        noun = "a number" if kind is float else "an integer"
        raise _refusal(place, f".{key} must be {noun}, got {value!r:.60}")
    return kind(value)


def _refusal(place: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place}{problem}", param=place, code="invalid_video")
