"""The plan of a model that takes videos: memory for pairs of frames, rows, identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.conf.compose import load_config
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import EXTRA_POSITIONS
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.plan.identity import compute_identity
from ostinato.runtime.startup.plan.model_source import model_skeleton
from tests.runtime.image_engines import ImageModel
from tests.runtime.video_engines import make_video_model

COMMON = (
    "device.name=cpu", "model.dtype=float32", "cache.memory_gib=0.01", "speculation.method=none",
)  # fmt: skip


NO_LIMIT = "video.max_resized_pixels=1000000000"


def plan_of(model: ImageModel, *overrides: str) -> EnginePlan:
    values = {"model.path": str(model.path)}
    return make_plan(load_config([*COMMON, *overrides], values=values).engine, 1)


def images_of(plan: EnginePlan) -> ImageSpec:
    assert plan.source.images is not None
    return plan.source.images


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return make_video_model("qwen2.5-vl", tmp_path_factory.mktemp("model"))


def with_areas(model: ImageModel, least: int, largest: int) -> None:
    path = model.path / "video_preprocessor_config.json"
    size = {"shortest_edge": least, "longest_edge": largest}
    path.write_text(json.dumps({**json.loads(path.read_text()), "size": size}))


def test_the_plan_has_memory_for_the_largest_pair(model: ImageModel):
    with_areas(model, 128, 1024)
    alone, small = plan_of(model, "video.max_per_request=0"), plan_of(model)
    spec = images_of(small)
    # A pair of the size of the largest image has twice its colours: 6 numbers for each pixel.
    assert spec.max_pair_tokens == spec.max_tokens > 0
    num_pixels = spec.max_tokens * spec.unit**2
    assert small.memory.activation_bytes - alone.memory.activation_bytes == 4 * 6 * num_pixels
    with_areas(model, 128, 1 << 20)
    large = plan_of(model, NO_LIMIT)
    assert images_of(large).max_pair_tokens == (1 << 20) // 64
    assert images_of(large).max_tokens == spec.max_tokens
    # For each of 4 patches: values of a layer, rotary tables and colours; then the result, twice.
    per_token = 4 * (4 * (9 * 32 + 3 * 44) + 4 * (2 * 16 + 12 * 4**2) + 2 * 64)
    more = (1 << 20) // 64 - spec.max_tokens
    assert large.memory.activation_bytes - small.memory.activation_bytes == more * per_token
    lowered = plan_of(model, "video.max_resized_pixels=1024")
    assert lowered.memory.activation_bytes == small.memory.activation_bytes
    assert plan_of(model, "images.max_per_request=0").source.images is None


def test_rows_for_at_least_two_pairs(model: ImageModel):
    with_areas(model, 128, 1 << 24)
    assert plan_of(model, NO_LIMIT).source.num_media_rows == 2 * (1 << 24) // 64
    assert plan_of(model).source.num_media_rows == 32_768  # two pairs of 768 embeddings fit
    with_areas(model, 128, 1024)
    assert plan_of(model).source.num_media_rows == 32_768


def test_only_models_with_positions_in_time_have_longer_tables(model: ImageModel, tmp_path: Path):
    def num_positions(plan: EnginePlan) -> int:
        (cos,) = (
            one
            for name, one in model_skeleton(plan.source).named_buffers()
            if "rotary" in name and name.endswith("cos")
        )
        return len(cos)

    assert num_positions(plan_of(model)) == 640 + EXTRA_POSITIONS
    assert num_positions(plan_of(model, "images.max_per_request=0")) == 640
    assert num_positions(plan_of(make_video_model("qwen2-vl", tmp_path))) == 640


def test_the_identity_names_what_videos_depend_on(model: ImageModel):
    with_areas(model, 128, 1024)
    plain = compute_identity(plan_of(model))["images"]
    assert "positions_per_second=4.0" in plain
    assert compute_identity(plan_of(model, "video.max_per_request=0"))["images"] != plain


def test_a_tokenizer_without_the_token_of_videos_is_refused(tmp_path: Path):
    model = make_video_model("qwen2-vl", tmp_path)
    path = model.path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [
        one for one in tokenizer["added_tokens"] if one["content"] != "<|video_pad|>"
    ]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(StartupError, match=r"no added token has the id 191.*video.max_per_request"):
        plan_of(model)
    assert images_of(plan_of(model, "video.max_per_request=0")).video is None
