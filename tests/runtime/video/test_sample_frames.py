"""Which frames are used, their times and their positions, as transformers computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.vision.video_spec import VideoSpec
from ostinato.runtime.video.sample_frames import choose_frames, pair_times, time_offsets
from ostinato.runtime.video.video_sources import FrameSampling
from tests.runtime.video.video_files import video_spec

LARGEST = VideoConfig(max_frames=768)
totals = st.integers(1, 3000)
rates = st.floats(0.1, 240)


def reference_frames(total: int, file_fps: float, spec: VideoSpec, **wanted: Any) -> list[int]:
    """What the video processor of Qwen3-VL chooses."""
    processor: Any = SimpleNamespace(
        fps=spec.fps, min_frames=spec.min_frames, max_frames=spec.max_frames
    )
    metadata = VideoMetadata(total_num_frames=total, fps=file_fps)
    return Qwen3VLVideoProcessor.sample_frames(processor, metadata, **wanted).tolist()


@given(totals, rates, st.none() | st.floats(0.05, 60), st.integers(2, 20), st.integers(2, 768))
def test_frames_of_a_rate(
    total: int, file_fps: float, fps: float | None, min_frames: int, max_frames: int
):
    spec = video_spec(min_frames=min_frames, max_frames=max_frames)
    found = choose_frames(total, file_fps, FrameSampling(fps=fps), spec, LARGEST)
    assert found == reference_frames(total, file_fps, spec, fps=fps)
    # The operator's rate holds if the request has none, and the checkpoint's if neither has one.
    other = VideoConfig(max_frames=768, fps=fps)
    assert choose_frames(total, file_fps, FrameSampling(), spec, other) == found
    kept = choose_frames(
        total, file_fps, FrameSampling(fps=fps), spec, VideoConfig(fps=7.0, max_frames=768)
    )
    assert kept == (
        found if fps else choose_frames(total, file_fps, FrameSampling(fps=7.0), spec, LARGEST)
    )


@given(totals, rates, st.integers(1, 768))
def test_a_number_of_frames(total: int, file_fps: float, number: int):
    found = choose_frames(total, file_fps, FrameSampling(num_frames=number), video_spec(), LARGEST)
    number = min(number, total)  # the processor would repeat frames
    assert found == reference_frames(total, file_fps, video_spec(), num_frames=number)


@given(totals, rates, st.none() | st.integers(1, 50), st.integers(2, 50))
@example(total=10**6, file_fps=1e-3, number=None, most=32)
def test_every_choice(total: int, file_fps: float, number: int | None, most: int):
    """The frames are in their order and spread over the video, and none comes twice."""
    sampling = FrameSampling(num_frames=number)
    found = choose_frames(total, file_fps, sampling, video_spec(), VideoConfig(max_frames=most))
    assert found == sorted(set(found))
    assert 1 <= len(found) <= min(most, total)
    assert found[0] == 0
    assert found[-1] == total - 1 or len(found) == 1
    gaps = np.diff(found)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


@given(st.lists(st.integers(0, 10**5), min_size=1, max_size=40), rates)
def test_the_texts_of_times(indices: list[int], fps: float):
    indices = sorted(indices)
    processor: Any = SimpleNamespace()
    times = Qwen3VLProcessor._calculate_timestamps(processor, list(indices), fps)
    assert pair_times(indices, fps) == tuple(f"<{time:.1f} seconds>" for time in times)


@given(st.integers(1, 40), st.floats(0.01, 60), st.sampled_from([1, 2, 4, 25]), st.integers(0, 100))
def test_positions_in_time(num_pairs: int, sampled_fps: float, per_second: int, start: int):
    """Those of Qwen2.5-VL in transformers, whose processor makes float32 of the seconds."""
    spec = video_spec(positions_per_second=float(per_second))
    seconds = torch.tensor([2 / sampled_fps])
    grid = torch.tensor([num_pairs, 2, 2])
    model: Any = SimpleNamespace()
    ids = Qwen2_5_VLModel.get_vision_position_ids(
        model, start, grid, 1, 2, per_second * next(iter(seconds))
    )
    assert time_offsets(num_pairs, sampled_fps, spec) == (ids[0] - start).tolist()


def test_positions_of_the_other_models():
    spec = video_spec()
    assert time_offsets(4, 0.5, spec) == [0, 1, 2, 3]
    spec = msgspec.structs.replace(spec, states_times=True)
    assert time_offsets(4, 0.5, spec) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("total", "fps", "expected"),
    [(300, 30.0, 20), (30, 30.0, 4), (3, 30.0, 3), (1, 30.0, 1), (10**5, 30.0, 32)],
)
def test_how_many_frames_the_defaults_give(total: int, fps: float, expected: int):
    assert len(choose_frames(total, fps, FrameSampling(), video_spec(), VideoConfig())) == expected
