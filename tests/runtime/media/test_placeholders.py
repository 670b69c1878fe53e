"""Placeholder tokens are replaced by as many as images and videos have embeddings."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.placeholders import (
    expand_placeholders,
    expand_sounds,
    place_media,
)
from ostinato.runtime.media.prompt_media import PreparedMedium
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.video.sample_frames import pair_times
from tests.api.media.image_apps import served
from tests.api.media.sound_apps import served_sounds, sound_spec
from tests.runtime.video.video_files import video_spec, with_times

SPEC = ImageSpec(
    sizing=ImageSizing.fixed, placeholder_id=9, placeholder="<image>",
    marked_placeholder="<image>\n", mean=(0, 0, 0), std=(1, 1, 1), patch_size=14,
)  # fmt: skip


def image(num_tokens: int) -> PromptImage:
    digest = bytes([num_tokens])
    return PromptImage(digest=digest, begin=0, num_tokens=num_tokens, height=1, width=1)


def media(images: list[PromptImage]) -> list[PreparedMedium]:
    return [PreparedMedium((one,)) for one in images]


def no_text(text: str) -> list[int]:
    raise AssertionError("these media have no text")


texts = st.lists(st.integers(0, 8), max_size=6)


@given(texts, st.lists(st.tuples(st.integers(1, 9), texts), max_size=5))
def test_each_image_gets_its_tokens_in_its_place(
    begin: list[int], parts: list[tuple[int, list[int]]]
):
    images = [image(count) for count, _ in parts]
    prompt = begin + [token for _, text in parts for token in (9, *text)]
    before = list(prompt)
    expanded, placed = expand_placeholders(prompt, media(images), SPEC, no_text, param="messages")
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
        ([1, 9, 2], 0, r"'<image>' once, but 0 images; .*leave '<image>' out of the text"),
        ([9, 9, 9], 2, r"'<image>' 3 times, but 2 images; .*leave '<image>' out of the text"),
        ([1, 2], 1, r"'<image>' 0 times, but 1 image; .*use a chat template that"),
        ([], 1, r"0 times, but 1 image"),
    ],
)
def test_other_numbers_of_placeholders_are_refused(prompt: list[int], count: int, message: str):
    with pytest.raises(InvalidRequestError, match=f"^messages: .*{message}") as caught:
        expand_placeholders(prompt, media([image(2)] * count), SPEC, no_text, param="messages")
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_image")


VIDEO_2 = msgspec.structs.replace(SPEC, video=video_spec())
VIDEO_3 = msgspec.structs.replace(SPEC, video=video_spec(states_times=True))


def video(num_pairs: int, num_tokens: int, *, times: bool) -> PreparedMedium:
    pairs = tuple(
        PromptImage(
            digest=bytes([number]), begin=0, num_tokens=num_tokens, height=1, width=1, num_frames=2
        )
        for number in range(num_pairs)
    )
    shown = [f"<{number}.5 seconds>" for number in range(num_pairs)] if times else []
    return PreparedMedium(pairs, MediaKind.video, with_times(*shown))


SPECIAL = {"<image>": 9, "<|video_pad|>": 21, "<|vision_start|>": 22, "<|vision_end|>": 23}


def letters(text: str) -> list[int]:
    """A token for each letter, and one for each special token."""
    pieces = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text)
    return [
        token
        for piece in pieces
        for token in ([SPECIAL[piece]] if piece in SPECIAL else [1000 + ord(one) for one in piece])
    ]


# (is it a video, its pairs, embeddings of an image or pair, the text after it)
pieces = st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(1, 5), texts), max_size=6)


@given(texts, pieces)
def test_videos_among_images(begin: list[int], parts: list[tuple[bool, int, int, list[int]]]):
    """Images and videos are counted apart, and the result has them in the order of the prompt."""
    prompt, expected, media_list, order = list(begin), list(begin), [], []
    for is_video, num_pairs, num_tokens, text in parts:
        medium = video(num_pairs, num_tokens, times=False) if is_video else PreparedMedium(
            (image(num_tokens),)
        )  # fmt: skip
        media_list.append(medium)
        token = 21 if is_video else 9
        prompt += [token, *text]
        for one in medium.parts:
            order.append((one.digest, len(expected), one.num_tokens))
            expected += [token] * num_tokens
        expected += text
    apart = sorted(media_list, key=lambda medium: medium.kind is MediaKind.video)
    for listed in (media_list, apart):
        expanded, placed = expand_placeholders(prompt, listed, VIDEO_2, no_text, param="messages")
        assert expanded == expected
        assert [(one.digest, one.begin, one.num_tokens) for one in placed] == order


@pytest.mark.parametrize("is_marked", [True, False])
def test_pairs_with_times(is_marked: bool):
    """The processor of Qwen3-VL in transformers puts the same text into the prompt."""
    prompt = [1, 22, 21, 23, 2, 22, 9, 23] if is_marked else [1, 21, 2, 22, 9, 23]
    listed = [video(2, 3, times=True), PreparedMedium((image(2),))]
    expanded, placed = expand_placeholders(prompt, listed, VIDEO_3, letters, param="messages")
    shown = []
    for number in range(2):
        shown += [*letters(f"<{number}.5 seconds>"), 22, 21, 21, 21, 23]
    assert expanded == [1, *shown, 2, 22, 9, 9, 23]
    assert [expanded[one.begin : one.end] for one in placed] == [[21] * 3, [21] * 3, [9] * 2]


@given(
    texts,
    st.lists(st.tuples(st.lists(st.tuples(st.text("ab"), st.integers(1, 5)), min_size=1),
                       st.text("ab"), texts), max_size=4),
)  # fmt: skip
def test_tiles_with_texts(
    begin: list[int], parts: list[tuple[list[tuple[str, int]], str, list[int]]]
):
    """An image of several tiles has texts before each tile and after the last."""
    prompt, expected, listed, order = list(begin), list(begin), [], []
    for tiles, last, text in parts:
        shown = "".join(f"{before}<image>" for before, _ in tiles) + last
        listed.append(PreparedMedium(tuple(image(count) for _, count in tiles), text=shown))
        prompt += [9, *text]
        for before, count in tiles:
            expected += letters(before)
            order.append((len(expected), count))
            expected += [9] * count
        expected += [*letters(last), *text]
    expanded, placed = expand_placeholders(prompt, listed, SPEC, letters, param="messages")
    assert expanded == expected
    assert [(one.begin, one.num_tokens) for one in placed] == order


def test_a_tokenizer_that_does_not_know_the_placeholder_is_refused():
    medium = PreparedMedium((image(2), image(3)), text="a<image>b<image>")
    with pytest.raises(ValueError, match=r"makes 0 tokens 9 of a text with 2 placeholders; copy"):
        expand_placeholders([9], [medium], SPEC, lambda text: [1, 2], param="messages")


def test_two_videos_side_by_side():
    prompt = [22, 21, 23, 22, 21, 23]
    one = video(1, 2, times=True)
    shown = [*letters("<0.5 seconds>"), 22, 21, 21, 23]
    expanded, placed = expand_placeholders(prompt, [one, one], VIDEO_3, letters, param="messages")
    assert expanded == shown * 2
    assert [pair.begin for pair in placed] == [14, 31]


def test_the_text_of_a_video_is_that_of_transformers():
    """Compared after the tokens are turned into text again."""
    metadata = SimpleNamespace(fps=24.0, frames_indices=[0, 30, 61, 90, 200])
    processor: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="(",
        vision_end_token=")",
        video_token="v",
    )
    processor._calculate_timestamps = partial(Qwen3VLProcessor._calculate_timestamps, processor)
    inputs = {"video_grid_thw": [torch.tensor([3, 4, 6])], "video_metadata": [metadata]}
    expected = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
    pairs = video(3, 6, times=False).parts
    text = with_times(*pair_times([0, 30, 61, 90, 200], 24.0))
    medium = PreparedMedium(pairs, MediaKind.video, text)
    expanded, _ = expand_placeholders([22, 21, 23], [medium], VIDEO_3, letters, param="messages")
    names = {22: "(", 21: "v", 23: ")"}
    assert "".join(names.get(token, chr(max(0, token - 1000))) for token in expanded) == expected


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([1, 21, 2], 0, r"video placeholder '<\|video_pad\|>' once, but 0 videos; .*leave"),
        ([1, 2], 1, r"0 times, but 1 video; .*use a chat template that writes"),
    ],
)
def test_other_numbers_of_videos_are_refused(prompt: list[int], count: int, message: str):
    listed = [video(1, 2, times=False)] * count
    with pytest.raises(InvalidRequestError, match=f"^messages: .*{message}") as caught:
        expand_placeholders(prompt, listed, VIDEO_2, no_text, param="messages")
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_video")


def test_the_token_of_videos_is_a_word_for_other_models():
    expanded, placed = expand_placeholders([21, 22], [], SPEC, no_text, param="messages")
    assert (expanded, placed) == ([21, 22], [])


def sound(*counts: int) -> PreparedMedium:
    """A sound whose windows have so many embeddings."""
    windows = tuple(
        PromptSound(digest=bytes([n]), begin=0, num_tokens=n, num_bins=1, num_frames=4 * n)
        for n in counts
    )
    return PreparedMedium(windows, MediaKind.sound)


@given(
    texts,
    st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), texts), max_size=5),
)
def test_each_sound_gets_its_tokens_in_its_place(
    begin: list[int], parts: list[tuple[list[int], list[int]]]
):
    sounds = [sound(*counts) for counts, _ in parts]
    prompt = begin + [token for _, text in parts for token in (9, *text)]
    expanded, placed = expand_sounds(prompt, sounds, sound_spec(9), param="messages")
    assert expanded == begin + [t for counts, text in parts for t in ([9] * sum(counts) + text)]
    assert [one.digest for one in placed] == [
        window.digest for medium in sounds for window in medium.parts
    ]
    for one in placed:
        assert expanded[one.begin : one.end] == [9] * one.num_tokens
    ends = [one.end for one in placed]
    assert all(one.begin >= end for one, end in zip(placed[1:], ends, strict=False))
    assert place_media(
        prompt, sounds, served_sounds(Path(), sound_spec(9)), no_text, param="messages"
    ) == (expanded, [], placed)


def test_other_numbers_of_sounds_are_refused():
    for prompt, sounds, text in (
        ([1, 9, 2], [], r"'<|AUDIO|>' once, but 0 sounds; the numbers must be equal; leave"),
        ([1, 2], [sound(3)], "0 times, but 1 sound; the numbers must be equal; use a chat"),
        ([9, 9], [sound(3)], "2 times, but 1 sound"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            expand_sounds(prompt, sounds, sound_spec(9), param="messages")
        assert (caught.value.param, caught.value.code) == ("messages", "invalid_audio")
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("param", "prompt", "count", "remedy"),
    [
        ("messages", [9], 2, "but 2 sounds; the numbers must be equal; send each sound in a "
         "message of its own, or use a chat template that writes the placeholder for each sound"),
        ("messages", [], 1, "but 1 sound; the numbers must be equal; use a chat template that "
         "writes the placeholder for each sound"),
        ("multi_modal_data", [9], 2, "write '<|AUDIO|>' in the prompt once for each sound"),
        ("multi_modal_data", [9, 9], 1, "write '<|AUDIO|>' in the prompt once for each sound"),
    ],
)  # fmt: skip
def test_the_remedy_is_for_who_writes_the_placeholders(
    param: str, prompt: list[int], count: int, remedy: str
):
    with pytest.raises(InvalidRequestError) as caught:
        expand_sounds(prompt, [sound(3)] * count, sound_spec(9), param=param)
    assert str(caught.value).endswith(remedy)


def test_a_model_for_text_has_no_placeholders():
    assert place_media([9, 9], [], served(Path(), None), no_text, param="x") == ([9, 9], [], [])
