"""The bucket table rounds up, prefers decode buckets, and gives None for steps too large for it."""

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
    assert table.round_up(1, 1, 1, tokens_per_seq=1) == GraphKey(1, 1, 1)
    assert table.round_up(3, 3, 3, tokens_per_seq=1) == GraphKey(4, 4, 1)
    assert table.round_up(8, 8, 8, tokens_per_seq=1) == GraphKey(8, 8, 1)


def test_mixed_steps_use_the_token_count() -> None:
    table = make_table()
    assert table.round_up(20, 3, 3, tokens_per_seq=0) == GraphKey(32, 8, 0)
    assert table.round_up(33, 3, 3, tokens_per_seq=0) == GraphKey(64, 8, 0)


def test_a_decode_step_too_large_for_decode_buckets_uses_a_mixed_one() -> None:
    table = BucketTable(decode_sizes=[1], mixed_sizes=[16], max_num_seqs=8)
    assert table.round_up(5, 5, 5, tokens_per_seq=1) == GraphKey(16, 8, 0)


def test_a_miss_is_none() -> None:
    table = make_table()
    assert table.round_up(65, 2, 2, tokens_per_seq=0) is None
    assert table.round_up(40, 9, 9, tokens_per_seq=0) is None


def test_a_verification_takes_a_bucket_of_its_own_length_or_a_mixed_one() -> None:
    table = BucketTable(
        decode_sizes=[4], mixed_sizes=[32], max_num_seqs=8, verify_sizes={2: [1, 4], 4: [2]}
    )
    assert table.round_up(6, 3, 6, tokens_per_seq=2) == GraphKey(8, 4, 2)
    assert table.round_up(8, 2, 8, tokens_per_seq=4) == GraphKey(8, 2, 4)
    assert GraphKey(8, 2, 4).num_rows == 8
    # Not captured: 3 tokens each, and 3 sequences of 4 tokens. The mixed bucket has 8 logits rows.
    assert table.round_up(6, 2, 6, tokens_per_seq=3) == GraphKey(32, 8, 0)
    assert table.round_up(12, 3, 12, tokens_per_seq=4) is None
    shapes = [key[:3] for key in table.keys]
    assert shapes == [(32, 8, 0), (8, 4, 2), (8, 2, 4), (4, 4, 1), (2, 1, 2)]
    smaller = table.without([GraphKey(8, 2, 4), GraphKey(8, 4, 2)])
    assert smaller.keys == [GraphKey(*shape) for shape in ((32, 8, 0), (4, 4, 1), (2, 1, 2))]
    assert name_buckets(table.keys) == (
        "decode of 4 sequences, verification of 2 tokens each of 4, 1 sequences, "
        "verification of 4 tokens each of 2 sequences, mixed of 32 tokens"
    )


def test_keys_are_largest_first() -> None:
    assert make_table().keys == [
        GraphKey(64, 8, 0),
        GraphKey(32, 8, 0),
        GraphKey(8, 8, 1),
        GraphKey(4, 4, 1),
        GraphKey(1, 1, 1),
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
            "to capture them add 8 to the list, or leave the list empty",
        ),
        (
            [8, 32],
            "graphs.capture_sizes=[8, 32]: 32 left out, because scheduler.max_num_seqs=8 is less",
        ),
    ],
)
def test_a_list_of_sizes_that_does_not_fit_is_explained(sizes: list[int], text: str | None) -> None:
    assert why_incomplete(sizes, max_num_seqs=8) == text


def test_buckets_in_words() -> None:
    keys = [GraphKey(8, 8, 1), GraphKey(64, 8, 0), GraphKey(4, 4, 1)]
    assert name_buckets(keys) == "decode of 8, 4 sequences, mixed of 64 tokens"
    assert name_buckets(keys[1:2]) == "mixed of 64 tokens"
