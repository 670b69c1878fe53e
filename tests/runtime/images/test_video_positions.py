"""`grid_positions` for videos: against a slow reading of the paper, and against transformers.

After a video, transformers 5.24 continues at the position max(height, width) after its begin, also
if its last pair lies later in time. The paper (arXiv:2409.12191, section 2.1) continues after the
highest position of all axes. So transformers is only compared where both are the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.images.grid_positions import grid_positions
from ostinato.runtime.types.images import PromptImage, count_extra_positions

TEXT, IMAGE, VIDEO, PATCH = 5, 151655, 151656, 14
MODELS = {
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLModel),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLModel),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLModel),
}
SPEC = ImageSpec(
    sizing=ImageSizing.dynamic, placeholder_id=IMAGE, placeholder="x", marked_placeholder="x",
    mean=(0, 0, 0), std=(1, 1, 1), patch_size=PATCH, merge_size=2, min_pixels=1,
    max_pixels=1 << 20,
)  # fmt: skip


class Part(NamedTuple):
    """A text of `num_text` tokens, then an image or a video."""

    num_text: int
    rows: int  # of embeddings
    columns: int
    num_pairs: int  # 0 = an image
    interval: float  # positions between pairs


class Layout(NamedTuple):
    """A prompt."""

    parts: list[Part]
    num_last: int  # tokens after the last part

    @property
    def num_tokens(self) -> int:
        sizes = (p.num_text + p.rows * p.columns * max(p.num_pairs, 1) for p in self.parts)
        return sum(sizes) + self.num_last

    def images(self, *, is_continued: bool = True) -> list[PromptImage]:
        """The images of the prompt, as an engine gets them."""
        found: list[PromptImage] = []
        end = 0
        for part in self.parts:
            end += part.num_text
            for number in range(max(part.num_pairs, 1)):
                found.append(
                    PromptImage(
                        digest=b"",
                        begin=end,
                        num_tokens=part.rows * part.columns,
                        height=part.rows * PATCH * 2,
                        width=part.columns * PATCH * 2,
                        num_frames=2 if part.num_pairs else 1,
                        time_offset=_offset(number, part.interval) if is_continued else 0,
                        is_continued=number > 0 and is_continued,
                    )
                )
                end = found[-1].end
        return found


def _offset(number: int, interval: float) -> int:
    return math.floor(np.float32(number) * np.float32(interval))


def layouts(
    *, intervals: st.SearchStrategy[float], most_text: int = 5, least_text: int = 0
) -> st.SearchStrategy[Layout]:
    edges = st.one_of(st.just(1), st.integers(1, 6))
    part = st.builds(
        Part, st.integers(least_text, most_text), edges, edges, st.integers(0, 5), intervals
    )
    return st.builds(Layout, st.lists(part, max_size=4), st.integers(1, 5))


def as_the_paper_says(layout: Layout) -> list[list[int]]:
    """Each token's positions, one after the other."""
    found: list[list[int]] = []

    def following() -> int:
        return max((max(each) for each in found), default=-1) + 1

    def add_text(count: int) -> None:
        for _ in range(count):
            found.append([following()] * 3)

    for part in layout.parts:
        add_text(part.num_text)
        base = following()
        for number in range(max(part.num_pairs, 1)):
            for row in range(part.rows):
                for column in range(part.columns):
                    time = _offset(number, part.interval)
                    found.append([base + time, base + row, base + column])
    add_text(layout.num_last)
    return found


INTERVALS = st.one_of(st.just(1.0), st.floats(0.0625, 40, width=32))


@settings(deadline=None)
@given(layouts(intervals=INTERVALS))
def test_positions_are_those_of_the_paper(layout: Layout):
    images = layout.images()
    positions, delta = grid_positions(layout.num_tokens, images, SPEC)
    expected = as_the_paper_says(layout)
    assert positions.tolist() == expected
    assert delta == max(map(max, expected)) + 1 - layout.num_tokens


@settings(deadline=None)
@given(layouts(intervals=INTERVALS), st.integers(1, 30))
def test_no_position_is_beyond_the_extra_ones(layout: Layout, cut: int):
    """Whatever follows, a prompt of n tokens has positions below n plus the extra ones."""
    images = layout.images()
    extra = count_extra_positions(images)
    positions, delta = grid_positions(layout.num_tokens, images, SPEC)
    assert positions.max() < layout.num_tokens + extra
    assert delta <= extra
    whole = [one for one in images if one.end <= cut]
    positions, delta = grid_positions(max(cut, 1), whole, SPEC)
    assert positions.max() < max(cut, 1) + count_extra_positions(whole)
    if all(one.time_offset < one.num_tokens for one in images):
        assert extra == 0


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A model without weights."""
    config_class, model_class = MODELS[request.param]
    text = {
        "vocab_size": 200_000, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "intermediate_size": 8, "head_dim": 8,
    }  # fmt: skip
    with torch.device("meta"):
        return request.param, model_class(config_class(text_config=text))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_positions_are_those_of_transformers_where_they_follow_the_paper(
    model: tuple[str, Any], data: st.DataObject
):
    name, reference = model
    per_second = {"qwen2_5_vl": 4}.get(name)
    seconds = st.floats(0.03125, 2, width=32)
    intervals = st.just(1.0) if per_second is None else seconds.map(lambda each: 4 * each)
    layout = data.draw(layouts(intervals=intervals, least_text=1))
    if name == "qwen3_vl":  # each pair is an image of its own, after a text
        layout = Layout([p._replace(num_pairs=min(p.num_pairs, 1)) for p in layout.parts], 1)
    layout = Layout([_agreeing(part) for part in layout.parts], layout.num_last)
    kinds = torch.zeros(1, layout.num_tokens, dtype=torch.int32)
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    end = 0
    for part in layout.parts:
        kind, size = 2 if part.num_pairs else 1, max(part.num_pairs, 1)
        end += part.num_text
        kinds[0, end : end + size * part.rows * part.columns] = kind
        end += size * part.rows * part.columns
        grids[kind].append([size, 2 * part.rows, 2 * part.columns])
    options = {}
    if per_second is not None:
        times = [part.interval / per_second for part in layout.parts if part.num_pairs]
        options = {"second_per_grid_ts": torch.tensor(times)}
    expected, delta = reference.get_rope_index(
        torch.tensor([TEXT, IMAGE, VIDEO])[kinds.long()],
        kinds,
        image_grid_thw=torch.tensor(grids[1], dtype=torch.int64).reshape(-1, 3),
        video_grid_thw=torch.tensor(grids[2], dtype=torch.int64).reshape(-1, 3),
        **options,
    )
    images = layout.images(is_continued=name != "qwen3_vl")
    positions, our_delta = grid_positions(layout.num_tokens, images, SPEC)
    assert np.array_equal(positions, expected[:, 0].numpy().T)
    assert our_delta == delta.item()


def _agreeing(part: Part) -> Part:
    """The part with so few pairs that no position in time is beyond the height and the width."""
    pairs = part.num_pairs
    while pairs > 1 and _offset(pairs - 1, part.interval) >= max(part.rows, part.columns):
        pairs -= 1
    return part._replace(num_pairs=pairs)


def test_the_text_after_a_long_video_continues_after_its_last_pair():
    layout = Layout([Part(1, 1, 2, 3, 2.5)], 2)
    positions, delta = grid_positions(9, layout.images(), SPEC)
    times = [0, 1, 1, 3, 3, 6, 6, 7, 8]
    assert positions[:, 0].tolist() == times
    assert positions[:, 2].tolist() == [0, 1, 2, 1, 2, 1, 2, 7, 8]
    assert delta == 0
    assert count_extra_positions(layout.images()) == 0
    longer = Layout([Part(1, 1, 2, 3, 25)], 2).images()
    assert [one.time_offset for one in longer] == [0, 25, 50]
    assert count_extra_positions(longer) == 45
    assert grid_positions(9, longer, SPEC)[1] == 45


def test_a_pair_that_continues_nothing_is_refused():
    first, second = Layout([Part(0, 1, 2, 2, 1)], 1).images()
    for images in (
        [msgspec.structs.replace(first, is_continued=True)],
        [first, msgspec.structs.replace(second, begin=3)],
    ):
        with pytest.raises(ValueError, match=r"continues a video, and must begin at its end"):
            grid_positions(9, images, SPEC)
