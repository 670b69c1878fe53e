"""`grid_positions` gives the positions that `get_rope_index` of transformers gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.images.grid_positions import grid_positions
from ostinato.runtime.types.images import PromptImage

MODELS = {
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLModel, 14),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLModel, 14),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLModel, 16),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeModel, 16),
}
TEXT, IMAGE = 5, 151655


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[Any, ImageSpec]:
    """A model without weights, and its spec."""
    config_class, model_class, patch_size = MODELS[request.param]
    text = {
        "vocab_size": 200_000, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "intermediate_size": 8, "head_dim": 8,
    }  # fmt: skip
    with torch.device("meta"):
        model = model_class(config_class(text_config=text))
    return model, make_spec(patch_size)


def make_spec(patch_size: int) -> ImageSpec:
    return ImageSpec(
        sizing=ImageSizing.dynamic, placeholder_id=IMAGE, placeholder="x", marked_placeholder="x",
        mean=(0, 0, 0), std=(1, 1, 1), patch_size=patch_size, merge_size=2, min_pixels=1,
        max_pixels=1 << 20,
    )  # fmt: skip


def image(begin: int, rows: int, columns: int, spec: ImageSpec) -> PromptImage:
    """An image of so many rows and columns of embeddings."""
    unit = spec.patch_size * spec.merge_size
    return PromptImage(
        digest=b"", begin=begin, num_tokens=rows * columns, height=rows * unit, width=columns * unit
    )


edges = st.one_of(st.just(1), st.integers(1, 12))
layouts = st.tuples(
    st.integers(0, 9), st.lists(st.tuples(edges, edges, st.integers(1, 9)), max_size=5),
    st.booleans(),
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(layouts)
def test_positions_are_those_of_transformers(
    model: tuple[Any, ImageSpec], layout: tuple[int, list[tuple[int, int, int]], bool]
):
    reference, spec = model
    num_tokens, parts, ends_with_image = layout
    images: list[PromptImage] = []
    for index, (rows, columns, num_text) in enumerate(parts):
        images.append(image(num_tokens, rows, columns, spec))
        is_last = index == len(parts) - 1
        num_tokens = images[-1].end + (0 if is_last and ends_with_image else num_text)
    num_tokens = max(num_tokens, 1)
    is_image = np.zeros(num_tokens, np.int64)
    for each in images:
        is_image[each.begin : each.end] = 1
    grids = [[1, e.height // spec.patch_size, e.width // spec.patch_size] for e in images]
    types = torch.from_numpy(is_image)[None]
    expected, delta = reference.get_rope_index(
        torch.where(types == 1, IMAGE, TEXT),
        types.int(),
        image_grid_thw=torch.tensor(grids).reshape(-1, 3),
    )
    positions, our_delta = grid_positions(num_tokens, images, spec)
    assert positions.dtype == np.int64
    assert np.array_equal(positions, expected[:, 0].numpy().T)
    assert our_delta == delta.item()


def test_images_next_to_each_other_have_positions_of_their_own():
    spec = make_spec(14)
    positions, delta = grid_positions(5, [image(0, 1, 2, spec), image(2, 2, 1, spec)], spec)
    assert positions.tolist() == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 3, 2], [4, 4, 4]]
    assert delta == 0


def test_an_empty_prompt_has_no_positions():
    positions, delta = grid_positions(0, [], make_spec(14))
    assert (positions.shape, delta) == ((0, 3), 0)


@pytest.mark.parametrize(("begins", "num_tokens"), [((0, 5), 11), ((3, 0), 20), ((-1, 5), 20)])
def test_images_outside_of_their_place_are_refused(begins: tuple[int, int], num_tokens: int):
    spec = make_spec(14)
    images = [image(begin, 2, 3, spec) for begin in begins]
    with pytest.raises(ValueError, match=r"an image at the tokens .* must be between token"):
        grid_positions(num_tokens, images, spec)
