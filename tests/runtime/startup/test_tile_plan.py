"""The plan of an engine whose model cuts images into tiles."""

from __future__ import annotations

import json

import msgspec
import pytest

from ostinato.runtime.memory.footprint import MeasuredMemory
from ostinato.runtime.startup.plan.image_source import count_media_rows
from ostinato.runtime.startup.plan.planning import plan_engine
from tests.runtime.image_engines import ImageModel, make_image_model
from tests.runtime.startup.test_video_plan import images_of, plan_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return make_image_model("internvl", tmp_path_factory.mktemp("model"))


def with_tiles(model: ImageModel, most: int) -> None:
    path = model.path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_patches": most}))


def test_the_plan_has_memory_for_one_tile_and_rows_for_all(model: ImageModel) -> None:
    with_tiles(model, 3)
    few = plan_of(model, "images.cache_tokens=100")
    with_tiles(model, 999)
    many = plan_of(model, "images.cache_tokens=100")
    assert (images_of(few).max_tokens, images_of(many).max_tokens) == (4 * 4, 1000 * 4)
    assert many.memory.activation_bytes == few.memory.activation_bytes
    # For each of 16 patches: values of a layer, rotary tables and colours; then the result, twice.
    alone = plan_of(model, "images.max_per_request=0")
    per_patch = 4 * (9 * 32 + 3 * 48) + 4 * (2 * 16 + 6 * 7**2)
    one_tile = 16 * per_patch + 4 * 2 * 4 * 64
    assert few.memory.activation_bytes - alone.memory.activation_bytes == one_tile


def test_a_measured_step_leaves_the_memory_for_encoding(model: ImageModel) -> None:
    """On a GPU a step is measured, and no image is encoded in it."""
    with_tiles(model, 3)
    plan, alone = plan_of(model), plan_of(model, "images.max_per_request=0")
    encoding = plan.memory.activation_bytes - alone.memory.activation_bytes
    for step, expected in ((encoding - 1, encoding), (encoding + 1, encoding + 1)):
        measured = MeasuredMemory(used_bytes=0, step_bytes=step)
        found = plan_engine(plan.config, plan.source, measured=measured)
        assert found.activation_bytes == expected


def test_the_rows_hold_two_of_the_largest_images(model: ImageModel) -> None:
    with_tiles(model, 999)
    plan = plan_of(model)
    assert plan.source.num_media_rows == 32_768
    wide = msgspec.structs.replace(images_of(plan), num_tokens=256)
    assert count_media_rows(plan.config, wide) == 2 * 1000 * 256
