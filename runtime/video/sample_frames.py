"""Chooses which frames of a video the model sees, and says when they are shown.

The rules are those of the video processor of Qwen3-VL in transformers. Those of the authors of
Qwen2-VL differ in one point: they take an even number of frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.vision.video_spec import FRAMES_OF_PAIR, VideoSpec
from ostinato.runtime.video.video_sources import FrameSampling

__all__ = ("choose_frames", "pair_times", "time_offsets")


def choose_frames(
    num_total: int, fps: float, sampling: FrameSampling, spec: VideoSpec, config: VideoConfig
) -> list[int]:
    """The indices of the frames that the model sees, spread evenly over the video.

    Args:
        num_total: frames of the video, at least 1.
        fps: frames of a second of it.
        sampling: what the request asks for.
        spec: how the model takes videos.
        config: what the operator has set.
    """
    most = min(config.max_frames, spec.max_frames, num_total)
    if sampling.num_frames is not None:
        number = min(sampling.num_frames, most)
    else:
        wanted_fps = sampling.fps or config.fps or spec.fps
        # As a float, because it can be larger than any integer that NumPy has.
        number = min(max(int(min(num_total / fps * wanted_fps, num_total)), spec.min_frames), most)
    return np.linspace(0, num_total - 1, number).round().astype(int).tolist()


def pair_times(indices: Sequence[int], fps: float) -> tuple[str, ...]:
    """The text of the time of each pair of frames: the mean of both times.

    Args:
        indices: the frames in the video. An odd last one is a pair with itself.
        fps: frames of a second of the video.
    """
    times = [index / fps for index in _whole_pairs(indices)]
    pairs = zip(times[::FRAMES_OF_PAIR], times[1::FRAMES_OF_PAIR], strict=True)
    return tuple(f"<{(first + second) / 2:.1f} seconds>" for first, second in pairs)


def time_offsets(num_pairs: int, sampled_fps: float, spec: VideoSpec) -> list[int]:
    """How many positions in time each pair lies after the first.

    Args:
        num_pairs: pairs of the video.
        sampled_fps: frames of a second that the model sees.
        spec: how the model takes videos.
    """
    if spec.states_times:  # each pair has positions of its own
        return [0] * num_pairs
    if not spec.positions_per_second:
        return list(range(num_pairs))
    # transformers computes in float32, so the result can be one less than the exact one.
    seconds = np.float32(FRAMES_OF_PAIR / sampled_fps)
    interval = np.float32(spec.positions_per_second) * seconds
    return (np.arange(num_pairs).astype(np.float32) * interval).astype(np.int64).tolist()


def _whole_pairs(indices: Sequence[int]) -> list[int]:
    return [*indices, *indices[-1:]] if len(indices) % FRAMES_OF_PAIR else list(indices)
