"""Engines that take videos, against transformers on the same weights and frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from ostinato import LLM
from ostinato.models.vision.video_spec import EXTRA_POSITIONS
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.types.request import Request
from tests.runtime.image_engines import GREEDY, ImageModel, image_llm, picture, run
from tests.runtime.video_engines import (
    Clip,
    check_answer,
    clip,
    make_video_model,
    video_prompt,
)

CAT = picture(1)
RUN, JUMP = clip(1, 3), clip(2, 2, width=40, height=8)
FAMILIES = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5"]


class Served(NamedTuple):
    model: ImageModel
    llm: LLM


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = make_video_model(request.param, tmp_path_factory.mktemp("model"))
    with image_llm(model, "scheduler.max_num_batched_tokens=16") as llm:
        yield Served(model, llm)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with positions in time."""
    model = make_video_model("qwen2.5-vl", tmp_path_factory.mktemp("model"))
    with image_llm(model) as llm:
        yield Served(model, llm)


def check(served: Served, prompts, answers, **options) -> None:
    spec = served.llm.model.images
    assert spec is not None
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        assert len(answer) == GREEDY.max_tokens
        check_answer(served.model, spec, token_ids, images, answer, **options)


def hits(llm: LLM) -> int:
    return llm._engine.stats().prefix_hits


def test_answers_are_those_of_transformers(served):
    """Steps of 16 tokens divide each of these videos."""
    llm = served.llm
    prompts = [
        video_prompt(llm, [3, 4, 5], RUN, [6]),
        video_prompt(llm, RUN, [8, 9], JUMP, [10, 11]),
        video_prompt(llm, [20, 21, 22], CAT, [25], JUMP, [24], CAT, [23]),
        video_prompt(llm, JUMP, JUMP, [7]),
        video_prompt(llm, [30, 31, 32]),
    ]
    check(served, prompts, run(llm._engine, prompts))


def test_positions_are_those_of_transformers_where_height_or_width_is_the_longest_axis(served):
    """Then transformers 5.24 continues at the position that the paper says."""
    llm = served.llm
    prompts = [
        video_prompt(llm, [3, 4, 5], clip(1, 3, pair_seconds=0.1), [6]),
        video_prompt(llm, [3], clip(3, 4, 32, 8, pair_seconds=0.1), [8], CAT, [10, 11]),
    ]
    check(served, prompts, run(llm._engine, prompts), own_positions=False, pair_seconds=0.1)


def test_other_frames_give_another_answer(served):
    llm = served.llm
    last = RUN.frames.copy()
    last[-1, 1] = 255 - last[-1, 1]  # the second frame of the last pair
    prompts = [video_prompt(llm, [3], one, [6]) for one in (RUN, Clip(last))]
    assert prompts[0][0] == prompts[1][0]
    one, two = run(llm._engine, prompts)
    assert one != two
    assert run(llm._engine, prompts[::-1]) == [two, one]


def test_equal_pairs_are_encoded_once(served):
    llm = served.llm
    fresh = clip(50, 2)
    doubled = Clip(np.concatenate((fresh.frames, fresh.frames)))
    before = llm._engine.stats().num_inputs_encoded
    prompts = [video_prompt(llm, [1], doubled, [2]), video_prompt(llm, [3], fresh, [4])]
    check(served, prompts, run(llm._engine, prompts))
    assert llm._engine.stats().num_inputs_encoded - before == 2


def test_a_cached_prefix_with_a_video_is_used(served):
    llm = served.llm
    llm.reset_prefix_cache()
    token_ids, images = video_prompt(llm, [1, 2, 3], RUN, [4] * 12)
    run(llm._engine, [(token_ids, images)])
    before = hits(llm)
    longer = [*token_ids[:-4], 5, 6]
    answers = run(llm._engine, [(longer, images)])
    assert images[-1].end <= hits(llm) - before <= len(longer)
    check(served, [(longer, images)], answers)


def test_a_cached_prefix_can_end_inside_a_video(served):
    llm = served.llm
    llm.reset_prefix_cache()
    changed = RUN.frames.copy()
    changed[2] = clip(60, 1).frames[0]
    first = video_prompt(llm, [1, 2, 3], RUN, [4] * 8)
    second = video_prompt(llm, [1, 2, 3], Clip(changed), [4] * 8)
    run(llm._engine, [first])
    before = hits(llm)
    answers = run(llm._engine, [second])
    common = hits(llm) - before
    assert first[1][0].begin < common <= first[1][2].begin
    check(served, [second], answers)


def test_a_cached_prefix_can_end_inside_a_pair(served):
    llm = served.llm
    llm.reset_prefix_cache()
    one = clip(61, 2, 40, 16)
    first, second = (video_prompt(llm, [1, 2, 3], one, [last] * 8) for last in (4, 5))
    run(llm._engine, [first])
    before = hits(llm)
    answers = run(llm._engine, [second])
    common = hits(llm) - before
    assert common > first[1][0].end
    check(served, [second], answers)


def test_videos_of_equal_frames_at_other_times_share_the_first_pair_only(timed):
    """Only the positions of the later pairs differ, so the tokens and the pixels are equal."""
    llm = timed.llm
    frames = clip(70, 4, 40, 16).frames
    slow, fast = Clip(frames, 2.0), Clip(frames, 0.5)
    prompts = [video_prompt(llm, [1, 2, 3], one, [4] * 8) for one in (slow, fast)]
    assert prompts[0][0] == prompts[1][0]
    assert [one.time_offset for one in prompts[0][1]] == [0, 8, 16, 24]
    assert [one.time_offset for one in prompts[1][1]] == [0, 2, 4, 6]
    encoded = llm._engine.stats().num_inputs_encoded
    answers = run(llm._engine, prompts[:1])
    before = hits(llm)
    answers += run(llm._engine, prompts[1:])
    assert 0 < hits(llm) - before <= prompts[0][1][0].end
    assert llm._engine.stats().num_inputs_encoded - encoded == 4
    check(timed, prompts, answers)


def test_a_pair_that_continues_shares_no_blocks_with_one_that_begins(timed):
    """A prompt of token ids can have two videos next to each other."""
    llm = timed.llm
    joined, images = video_prompt(llm, [1, 2, 3], clip(71, 2, 40, 16, pair_seconds=0.1), [4] * 8)
    assert images[1].time_offset == 0
    apart = [images[0], msgspec.structs.replace(images[1], is_continued=False)]
    prompts = [(joined, images), (joined, apart)]
    answers = run(llm._engine, prompts[:1])
    before = hits(llm)
    answers += run(llm._engine, prompts[1:])
    assert 0 < hits(llm) - before <= images[0].end
    check(timed, prompts, answers)


def test_a_long_video_has_positions_beyond_the_context(timed):
    """The model's context has 640 positions."""
    llm = timed.llm
    longest = (EXTRA_POSITIONS + 2 * 6 - 1) / 4  # seconds between two pairs of 6 embeddings
    prompts = [
        video_prompt(llm, [1, 2], clip(72, 3, pair_seconds=400.0), [5, 6]),
        video_prompt(llm, [1, 2], clip(72, 2, pair_seconds=longest), [5, 6]),
    ]
    assert prompts[0][1][-1].time_offset == 3200
    check(timed, prompts, run(llm._engine, prompts))


def test_videos_that_last_too_long_are_refused(timed):
    llm = timed.llm
    longest = (EXTRA_POSITIONS + 2 * 6 - 1) / 4
    for parts in (
        ([1], clip(72, 2, pair_seconds=longest + 0.25), [2]),
        ([1], clip(72, 2, pair_seconds=5000), [2], clip(72, 2, pair_seconds=5000), [3]),
    ):
        token_ids, images = video_prompt(llm, *parts)
        request = Request(
            request_id="a", prompt_token_ids=token_ids, sampling=GREEDY, images=images
        )
        with pytest.raises(InvalidRequestError, match="send shorter videos"):
            llm._engine.add_request(request)
    assert not llm._engine.has_work


def test_preempted_sequences_keep_their_videos(tmp_path: Path):
    model = make_video_model("qwen2.5-vl", tmp_path)
    with image_llm(model, "cache.memory_gib=0.00008", "model.max_model_len=64") as llm:
        spec = llm.model.images
        assert spec is not None
        prompts = [video_prompt(llm, [seed], clip(seed, 2), [seed + 9]) for seed in range(6)]
        long = msgspec.structs.replace(GREEDY, max_tokens=24)
        answers = run(llm._engine, prompts, long)
        assert llm._engine.stats().num_preemptions > 0
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        check_answer(model, spec, token_ids, images, answer)


WAYS = [
    "graphs.mode=eager",
    "graphs.mode=captured",
    "speculation.method=ngram speculation.max_tokens=3",
    "scheduler.max_num_batched_tokens=5 scheduler.max_num_seqs=3",
    "images.cache_tokens=24",
]
# They start processes, so the quick tests run one model with them.
LONG_WAYS = ["parallel.tensor=2", "parallel.pipeline=2"]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in ("qwen2.5-vl", "qwen3-vl") for way in WAYS),
        *(("qwen3-vl", way) for way in LONG_WAYS),
        *(pytest.param("qwen2.5-vl", way, marks=pytest.mark.slow) for way in LONG_WAYS),
        pytest.param("qwen3-vl", "graphs.form=model", marks=pytest.mark.slow),
    ],
)
def test_every_way_to_run_gives_the_same_answers(name: str, way: str, tmp_path):
    model = make_video_model(name, tmp_path)
    with image_llm(model, *way.split()) as llm:
        prompts = [
            video_prompt(llm, [3, 4, 5], RUN, [6]),
            video_prompt(llm, [20, 21], JUMP, [24], CAT, [25]),
            video_prompt(llm, [30, 31, 32]),
        ]
        answers = run(llm._engine, prompts)
        check(Served(model, llm), prompts, answers)


def test_int8_weights_and_cache_see_the_video(tmp_path: Path):
    """Answers are those of the same engine without chunks and prefix cache."""
    model = make_video_model("qwen2.5-vl", tmp_path)
    rounded = ("model.quantization=int8", "cache.dtype=int8", "model.dtype=bfloat16")
    results: list[list[list[int]]] = []
    for tokens in (16, 64):
        with image_llm(model, *rounded, f"scheduler.max_num_batched_tokens={tokens}") as llm:
            prompts = [video_prompt(llm, [3, 4], one, [6]) for one in (RUN, clip(80, 3))]
            results.append(run(llm._engine, prompts))
            assert run(llm._engine, prompts) == results[-1]
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def test_settings_of_videos(tmp_path: Path):
    model = make_video_model("qwen2-vl", tmp_path)
    with image_llm(model, "video.max_per_request=0") as llm:
        assert llm.model.images is not None
        assert llm.model.images.video is None
    with image_llm(model, "video.max_resized_pixels=512") as llm:
        assert llm.model.images is not None
        assert llm.model.images.video is not None
        assert llm.model.images.video.max_pixels == 512
    with pytest.raises(StartupError, match=r"video\.max_resized_pixels=100 must be at least 128"):
        image_llm(model, "video.max_resized_pixels=100")
    (model.path / "video_preprocessor_config.json").write_text('{"patch_size": 8}')
    with pytest.raises(StartupError, match=r"patch_size=8 .*set video\.max_per_request=0"):
        image_llm(model)
