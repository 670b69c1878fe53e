"""Requests with images that are cut into tiles, up to the request that the engine gets.

An image of 8 x 4 pixels is two tiles of 4 pixels, and the whole image.
"""

from __future__ import annotations

import json

import pytest

from ostinato.api.openai.preparation import prepare_tokenization
from ostinato.api.preparation.preparation import Arrival
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.tile_spec import TileGrid, TileSpec
from tests.api.media.image_apps import (
    PARTS_TEMPLATE,
    PLACEHOLDER,
    image_part,
    image_spec,
    png,
    text_part,
)
from tests.api.media.test_image_requests import Model, refusal, user


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tiles") / "model", PARTS_TEMPLATE)


def spec_of(model: Model) -> ImageSpec:
    tiles = TileSpec(grid=TileGrid.nearest, edge=4, max_tiles=4, start="<|begin|>", end="<|end|>")
    return image_spec(model.placeholder_id, sizing=ImageSizing.tiles, num_tokens=3, tiles=tiles)


def test_each_tile_has_its_embeddings(model: Model):
    content = [text_part("red"), image_part(png(8, 4)), image_part(png(4, 4, 1))]
    found = model.chat(content, spec=spec_of(model))
    assert [(one.num_tokens, one.height, one.width) for one in found.images] == [(3, 4, 4)] * 4
    shown = [f"[<|begin|>{PLACEHOLDER * count}<|end|>]" for count in (3, 1)]
    assert f"red{''.join(shown)}" in model.text(found)
    body = json.dumps({"messages": [user(content)]}).encode()
    preparation = model.preparation(spec=spec_of(model))
    reply = json.loads(prepare_tokenization(preparation, body, Arrival()))
    assert reply["tokens"] == found.prompt_token_ids


def test_an_image_of_low_detail_is_one_tile(model: Model):
    content = [image_part(png(8, 4), detail="low")]
    assert len(model.chat(content, spec=spec_of(model)).images) == 1


def test_all_tiles_count(model: Model):
    content = [image_part(png(8, 4)), image_part(png(8, 4))]
    few = {"media_cache_tokens": 17}
    error = refusal(model.chat, content, spec=spec_of(model), model=few)
    assert error.code == "too_many_embeddings"
    assert "the first 2 images have 18 embeddings, and a request can have 17" in str(error)
    few = {"media_cache_tokens": 18}
    assert len(model.chat(content, spec=spec_of(model), model=few).images) == 6


def test_videos_are_refused_by_name(model: Model):
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    error = refusal(model.chat, [part], spec=spec_of(model))
    assert "vision takes no videos; send text and images only" in str(error)
