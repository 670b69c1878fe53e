"""Integers in 32-bit words: the kernel against shifts of single integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.ops.checkpoint_values.stored_values import (
    AWQ_ORDER,
    Packing,
    unpack_halves,
    unpack_words,
)
from ostinato.ops.native.library import load

SIZES = [(1, 1), (3, 5), (8, 8), (17, 70), (64, 130), (260, 33)]


def words_of(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    size = (rows, columns)
    return torch.randint(-(1 << 31), 1 << 31, size, generator=generator, dtype=torch.int64).int()


def expected(words: Tensor, bits: int, packing: Packing) -> Tensor:
    per_word = 32 // bits
    wide = words.long() & 0xFFFFFFFF
    places = [(wide >> (bits * place)) & ((1 << bits) - 1) for place in range(per_word)]
    rows, columns = words.shape
    if packing is Packing.rows:
        result = torch.empty(rows, columns * per_word, dtype=torch.int64)
        for place, values in enumerate(places):
            result[:, place::per_word] = values
    elif packing is Packing.columns:
        result = torch.empty(columns, rows * per_word, dtype=torch.int64)
        for place, values in enumerate(places):
            result[:, place::per_word] = values.T
    else:
        result = torch.empty(columns * 8, rows, dtype=torch.int64)
        for place, values in enumerate(places):
            result[AWQ_ORDER[place] :: 8] = values.T
    return result.to(torch.uint8)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("packing", [Packing.rows, Packing.columns, Packing.awq])
@pytest.mark.parametrize("bits", [4, 8])
def test_words(bits: int, packing: Packing, size: tuple[int, int]) -> None:
    load("quantized")
    words = words_of(*size)
    if packing is Packing.awq and bits == 8:
        with pytest.raises(ValueError, match="words hold integers of 4 or 8 bits"):
            unpack_words(words, bits, packing)
        return
    exact = expected(words, bits, packing)
    assert torch.equal(unpack_words(words, bits, packing), exact)
    meta = unpack_words(words.to("meta"), bits, packing)
    assert meta.shape == exact.shape
    assert meta.dtype == torch.uint8


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("columns", [6, 8, 64])
def test_halves(columns: int, offset: int) -> None:
    stored = torch.arange(offset + 5 * columns, dtype=torch.int64).to(torch.uint8)[offset:]
    result = unpack_halves(stored.view(5, columns))
    assert torch.equal(result[:, 0::2], stored.view(5, columns) & 15)
    assert torch.equal(result[:, 1::2], stored.view(5, columns) >> 4)
