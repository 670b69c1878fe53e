"""Blocks of prompts with media: equal placeholder tokens make no equal blocks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.kv.block_table import media_extras
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage
from tests.runtime.toy_sounds import toy_sound
from tests.runtime.toy_tower import toy_image, toy_pair, with_ends

BLOCK = 4


def shared_blocks(
    length: int,
    first: Sequence[PromptImage | PromptSound],
    second: Sequence[PromptImage | PromptSound],
) -> int:
    """How many blocks of a prompt with equal tokens and other media are found in the cache."""
    cache = KVCacheManager(64, BLOCK)
    token_ids = [7] * length
    table = cache.new_table(length, media=first)
    assert cache.admit(table, cache.match_prefix(table, token_ids, length), length) is not None
    cache.register(table, token_ids, length)
    other = cache.new_table(length, media=second)
    return len(cache.match_prefix(other, token_ids, length).block_ids)


IMAGES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 3), st.integers(1, 2), st.integers(0, 3)),
    max_size=3,
)


def place(parts: list[tuple[int, int, int, int]]) -> list[PromptImage]:
    """Images one after the other, each after a gap of text. Tokens end the rows of some."""
    images: list[PromptImage] = []
    begin = 0
    for seed, height, width, gap in parts:
        image = toy_image(seed, height, width, begin + gap)
        images.append(with_ends(image) if height == 1 else image)
        begin = images[-1].end
    return images


@given(IMAGES, IMAGES)
def test_blocks_are_shared_up_to_the_first_difference(first, second):
    length = 8 * BLOCK
    ours, theirs = place(first), place(second)

    def contents(images: list[PromptImage]) -> list[tuple[bytes, int] | None]:
        found: list[tuple[bytes, int] | None] = [None] * length
        for image in images:
            for index in range(image.num_tokens):
                found[image.begin + index] = image.digest, index
        return found

    pairs = list(zip(contents(ours), contents(theirs), strict=True))
    equal = next((index for index, (one, two) in enumerate(pairs) if one != two), length)
    assert shared_blocks(length, ours, theirs) == equal // BLOCK


VIDEOS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 3), st.sampled_from([0, 1, 9]), st.booleans()),
    min_size=1,
    max_size=4,
)


def pairs_of(parts: list[tuple[int, int, int, bool]]) -> list[PromptImage]:
    """Pairs one after the other, each the first of a video or not."""
    pairs: list[PromptImage] = []
    begin = 0
    for seed, width, time_offset, first in parts:
        pairs.append(toy_pair(seed, 1, width, begin, time_offset=time_offset, first=first))
        begin = pairs[-1].end
    return pairs


@given(VIDEOS, VIDEOS)
def test_blocks_of_videos_are_shared_if_their_positions_are_equal_too(first, second):
    length = 4 * BLOCK
    ours, theirs = pairs_of(first), pairs_of(second)

    def contents(pairs: list[PromptImage]) -> list[object]:
        found: list[object] = [None] * length
        for one in pairs:
            for index in range(one.num_tokens):
                place = one.time_offset, one.is_continued
                found[one.begin + index] = one.pixels, one.width, index, place
        return found

    both = list(zip(contents(ours), contents(theirs), strict=True))
    equal = next((index for index, (one, two) in enumerate(both) if one != two), length)
    assert shared_blocks(length, ours, theirs) == equal // BLOCK


SOUNDS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 7), st.booleans(), st.integers(0, 3)), max_size=3
)


def sounds_of(parts: list[tuple[int, int, bool, int]]) -> list[PromptSound]:
    """Windows of sounds one after the other, each after a gap of text."""
    sounds: list[PromptSound] = []
    begin = 0
    for seed, num_tokens, is_odd, gap in parts:
        sounds.append(toy_sound(seed, num_tokens, begin + gap, is_odd=is_odd))
        begin = sounds[-1].end
    return sounds


@given(SOUNDS, SOUNDS)
def test_blocks_of_sounds_are_shared_up_to_the_first_difference(first, second):
    """A last state without an embedding makes another sound too: attention has seen it."""
    length = 8 * BLOCK
    ours, theirs = sounds_of(first), sounds_of(second)

    def contents(sounds: list[PromptSound]) -> list[tuple[bytes, int] | None]:
        found: list[tuple[bytes, int] | None] = [None] * length
        for sound in sounds:
            for index in range(sound.num_tokens):
                found[sound.begin + index] = sound.features, index
        return found

    both = list(zip(contents(ours), contents(theirs), strict=True))
    equal = next((index for index, (one, two) in enumerate(both) if one != two), length)
    assert shared_blocks(length, ours, theirs) == equal // BLOCK


def test_the_extras_of_images_alone_are_their_digests_and_places():
    """So blocks on disk stay valid."""
    image = toy_image(1, 2, 3, 2)
    assert media_extras([image], BLOCK) == {
        0: image.digest + b"\2\0\0\0",
        1: image.digest + b"\xfe\xff\xff\xff",
    }
    pair = toy_pair(1, 2, 3, 2)
    assert pair.cache_key == pair.digest
