"""Divides an attention launch among Triton programs, from the sequence lengths on the device.

The work of a launch is a list of items: (sequence, KV head, query tile, KV partition). The list is
not stored. Every program computes the prefix sums of the sequences' numbers of items, BLOCK_S
sequences at a time. It finds the sequence of its item by counting the sequences whose items end
before it. That costs one memory latency. A binary search would cost log2(S) of them. A grid with
one program for each sequence would leave programs idle.

The names of dimensions are those of `triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("first_seen", "first_tile", "following_item", "partition_size", "work_items")


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The KV index of the first key visible from `position`."""
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    elif WINDOW < 0:
        first = position - position % -WINDOW
    else:
        first = position * 0
    return first


@triton.jit
def first_tile(position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The KV index at which the tile of the first key visible from `position` begins."""
    return first_seen(position, WINDOW) // BLOCK_N * BLOCK_N


@triton.jit
def partition_size(
    first, seq_len, BLOCK_N: tl.constexpr, MAX_PARTS: tl.constexpr, MIN_PART_TILES: tl.constexpr
):
    """Keys per partition of a sequence's context.

    Other sequences of the batch change it only by their number, which chooses MAX_PARTS and
    MIN_PART_TILES. A context has one partition for each MIN_PART_TILES tiles, and at most
    MAX_PARTS. The partitions have equal lengths, rounded up to tiles. So the last one can be
    shorter, and some can be left out. If every partition had MIN_PART_TILES tiles, the last one
    would often have a single tile, and would take as long to begin and end as the others.
    """
    num_tiles = tl.cdiv(seq_len - first, BLOCK_N)
    num_parts = tl.minimum(tl.maximum(num_tiles // MIN_PART_TILES, 1), MAX_PARTS)
    return tl.maximum(tl.cdiv(num_tiles, num_parts), 1) * BLOCK_N  # 1 for an absent sequence


@triton.jit
def work_items(
    query_start_loc,
    seq_lens,
    first_seq,
    num_seqs,
    MIN_QUERY: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MIN_PART_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """For each of BLOCK_S sequences: its items per KV head, and its query rows if it is split.

    Both are 0 for sequences whose number of query rows is outside [MIN_QUERY, MAX_QUERY], because
    they belong to another launch.
    """
    seq = first_seq + tl.arange(0, BLOCK_S)
    begin = tl.load(query_start_loc + seq, mask=seq < num_seqs, other=0)
    end = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=0)
    seq_len = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    query_len = end - begin
    served = (query_len >= MIN_QUERY) & (query_len <= MAX_QUERY)
    items = tl.cdiv(query_len, BLOCK_Q)
    split_rows = tl.zeros([BLOCK_S], tl.int32)
    if MAX_PARTS > 1:
        first = first_tile(seq_len - query_len, WINDOW, BLOCK_N)
        parts = tl.cdiv(
            seq_len - first, partition_size(first, seq_len, BLOCK_N, MAX_PARTS, MIN_PART_TILES)
        )
        items = items * parts
        split_rows = tl.where(served & (parts > 1), query_len, 0)
    return tl.where(served, items, 0), split_rows


@triton.jit
def following_item(item, taken, TAKES: tl.constexpr):
    """The item that this program works on after `item`.

    With TAKES, programs take items in the order in which they become free, so that items of
    different lengths keep all programs busy. Without, each of n programs takes every
    n-th item.
    """
    programs = tl.num_programs(0)
    if TAKES:  # noqa: SIM108 - known when the kernel is compiled
        following = programs + tl.atomic_add(taken, 1, sem="relaxed")
    else:
        following = item + programs
    return following
