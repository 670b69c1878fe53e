"""Images whose rows end with tokens (Pixtral), in the bodies of requests."""

from __future__ import annotations

import json

import msgspec
import pytest

from ostinato.api.openai.preparation import prepare_tokenization
from ostinato.api.preparation.preparation import Arrival
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from tests.api.media.image_apps import (
    PARTS_TEMPLATE,
    image_part,
    image_spec,
    png,
    text_part,
)
from tests.api.media.test_image_requests import Model, refusal, user


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("parts") / "model", PARTS_TEMPLATE)


def spec_of(model: Model, edge: int = 32) -> ImageSpec:
    return image_spec(
        model.placeholder_id,
        sizing=ImageSizing.shrunk,
        max_edges=(edge, edge),
        row_ends=(3, 5),
    )


def test_tokens_end_rows_in_prompts_and_counts(model: Model):
    content = [text_part("red"), image_part(png(12, 8)), text_part("a")]
    generation = model.chat(content, spec=spec_of(model))
    (image,) = generation.images
    token, ids = model.placeholder_id, generation.prompt_token_ids
    assert ids[image.begin : image.end] == [token, token, token, 3, token, token, token, 5]
    assert token not in (ids[image.begin - 1], ids[image.end])
    body = json.dumps({"messages": [user(content)]}).encode()
    preparation = model.preparation(spec=spec_of(model))
    answer = msgspec.json.decode(prepare_tokenization(preparation, body, Arrival()))
    assert answer["tokens"] == ids


def test_the_limit_is_one_of_embeddings(model: Model):
    parts, spec = [image_part(png(32, 32))] * 2, spec_of(model)
    exact = {"media_cache_tokens": 128}
    assert [one.num_tokens for one in model.chat(parts, spec=spec, model=exact).images] == [
        72,
        72,
    ]
    error = refusal(model.chat, parts, spec=spec, model={"media_cache_tokens": 127})
    assert "the first 2 images have 128 embeddings, and a request can have 127" in str(error)


def test_low_is_at_most_512_x_512(model: Model):
    spec = msgspec.structs.replace(spec_of(model, 1000), patch_size=14)
    room = {"media_cache_tokens": 5000, "max_model_len": 5000}
    parts = [image_part(png(1000, 300)), image_part(png(1000, 300), detail="low")]
    whole, low = model.chat(parts, spec=spec, model=room).images
    assert (whole.height, whole.width) == (308, 1008)
    assert (low.height, low.width) == (168, 504)
    large = msgspec.structs.replace(spec, patch_size=300)
    assert refusal(model.chat, parts, spec=large).code == "unsupported_parameter"
