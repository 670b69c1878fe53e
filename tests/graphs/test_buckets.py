"""The bucket table rounds up, prefers the decode bucket, and misses legally."""

import pytest

from ostinato.graphs.buckets import (
    BucketTable,
    GraphKey,
    default_decode_sizes,
    default_mixed_sizes,
    name_buckets,
    why_incomplete,
)


def make_table() -> BucketTable:
    return BucketTable(decode_sizes=[8, 1, 4], mixed_sizes=[32, 64], max_num_seqs=8)


def test_decode_rounds_up_to_the_smallest_bucket() -> None:
    table = make_table()
    assert table.round_up(1, 1, uniform_decode=True) == GraphKey(1, 1, True)
    assert table.round_up(3, 3, uniform_decode=True) == GraphKey(4, 4, True)
    assert table.round_up(8, 8, uniform_decode=True) == GraphKey(8, 8, True)


def test_mixed_steps_use_the_token_count() -> None:
    table = make_table()
    assert table.round_up(20, 3, uniform_decode=False) == GraphKey(32, 8, False)
    assert table.round_up(33, 3, uniform_decode=False) == GraphKey(64, 8, False)


def test_a_decode_step_too_large_for_decode_buckets_uses_a_mixed_one() -> None:
    table = BucketTable(decode_sizes=[1], mixed_sizes=[16], max_num_seqs=8)
    assert table.round_up(5, 5, uniform_decode=True) == GraphKey(16, 8, False)


def test_a_miss_is_none() -> None:
    table = make_table()
    assert table.round_up(65, 2, uniform_decode=False) is None
    assert table.round_up(40, 9, uniform_decode=False) is None


def test_keys_are_largest_first() -> None:
    assert make_table().keys == [
        GraphKey(64, 8, False),
        GraphKey(32, 8, False),
        GraphKey(8, 8, True),
        GraphKey(4, 4, True),
        GraphKey(1, 1, True),
    ]


def test_default_sizes_cover_the_largest_batch() -> None:
    assert default_decode_sizes(3, exact=True) == [1, 2, 3]
    assert default_decode_sizes(20, exact=False) == [1, 2, 4, 8, 16, 20]
    assert default_decode_sizes(1, exact=False) == [1]
    assert default_decode_sizes(320, exact=False)[-3:] == [256, 288, 320]
    assert default_mixed_sizes(100) == [32, 64]
    assert default_mixed_sizes(1 << 20)[-1] == 1024


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([], None),
        ([1, 2, 8], None),
        (
            [4, 2],
            "graphs.capture_sizes=[2, 4]: decode steps of 5 to 8 sequences have no decode bucket; "
            "add 8 to it, or leave it empty, to capture them",
        ),
        (
            [8, 32],
            "graphs.capture_sizes=[8, 32]: 32 can not occur with scheduler.max_num_seqs=8 and is "
            "left out",
        ),
    ],
)
def test_a_list_of_sizes_that_does_not_fit_is_explained(sizes: list[int], text: str | None) -> None:
    assert why_incomplete(sizes, max_num_seqs=8) == text


def test_buckets_in_words() -> None:
    keys = [GraphKey(8, 8, True), GraphKey(64, 8, False), GraphKey(4, 4, True)]
    assert name_buckets(keys) == "decode of 8, 4 sequences, mixed of 64 tokens"
    assert name_buckets(keys[1:2]) == "mixed of 64 tokens"
