"""Placeholder tokens are replaced by as many as images have embeddings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.placeholders import expand_placeholders
from ostinato.runtime.types.images import PromptImage

SPEC = ImageSpec(
    sizing=ImageSizing.fixed, placeholder_id=9, placeholder="<image>",
    marked_placeholder="<image>\n", mean=(0, 0, 0), std=(1, 1, 1), patch_size=14,
)  # fmt: skip


def image(num_tokens: int) -> PromptImage:
    digest = bytes([num_tokens])
    return PromptImage(digest=digest, begin=0, num_tokens=num_tokens, height=1, width=1)


texts = st.lists(st.integers(0, 8), max_size=6)


@given(texts, st.lists(st.tuples(st.integers(1, 9), texts), max_size=5))
def test_each_image_gets_its_tokens_in_its_place(
    begin: list[int], parts: list[tuple[int, list[int]]]
):
    images = [image(count) for count, _ in parts]
    prompt = begin + [token for _, text in parts for token in (9, *text)]
    before = list(prompt)
    expanded, placed = expand_placeholders(prompt, images, SPEC, param="messages")
    assert prompt == before
    assert expanded == begin + [t for count, text in parts for t in ([9] * count + text)]
    assert [each.digest for each in placed] == [each.digest for each in images]
    # Without the images' tokens, only the text is left.
    for each in reversed(placed):
        assert expanded[each.begin : each.end] == [9] * each.num_tokens
        del expanded[each.begin : each.end]
    assert expanded == begin + [token for _, text in parts for token in text]


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([1, 9, 2], 0, r"'<image>' 1 times, but 0 images; .*leave '<image>' out of the text"),
        ([9, 9, 9], 2, r"'<image>' 3 times, but 2 images; .*leave '<image>' out of the text"),
        ([1, 2], 1, r"'<image>' 0 times, but 1 images; .*use a chat template that"),
        ([], 1, r"0 times, but 1 images"),
    ],
)
def test_other_numbers_of_placeholders_are_refused(prompt: list[int], count: int, message: str):
    with pytest.raises(InvalidRequestError, match=f"^messages: .*{message}") as caught:
        expand_placeholders(prompt, [image(2)] * count, SPEC, param="messages")
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_image")
