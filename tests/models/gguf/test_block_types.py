"""Every type of quantised tensors gives the values of the `gguf` package's formula."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ostinato.models.gguf.block_types import (
    FLOAT_TYPES,
    GROUPED_TYPES,
    dequantize,
    why_unsupported,
)
from ostinato.models.gguf.gguf_file import TENSOR_TYPES
from ostinato.models.gguf.stored_formats import FORMATS, common_format, in_format, pack_rows
from ostinato.ops.checkpoint_values import stored_blocks
from ostinato.ops.checkpoint_values.stored_blocks import BLOCK_LAYOUTS, block_values
from ostinato.ops.native.library import load
from ostinato.ops.quantized import pack_quantized_weight
from tests.arch.tree import ROOT
from tests.ops.kernel_checks import EACH_LEVEL, ops_of


@pytest.mark.parametrize("name", GROUPED_TYPES)
def test_values_are_bitwise_those_of_the_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (999, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are sometimes infinite
        theirs = gguf.quants.dequantize(blocks, kind)
    ours = dequantize(name, torch.from_numpy(blocks)).numpy()
    assert np.array_equal(ours.view(np.int32), theirs.view(np.int32)) or np.array_equal(
        ours, theirs, equal_nan=True
    )


@pytest.mark.parametrize("count", [1, 7, 5000])
@pytest.mark.parametrize("name", BLOCK_LAYOUTS)
def test_the_kernel_unpacks_what_the_formula_of_torch_does(name: str, count: int) -> None:
    load("quantized")
    _, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    generator = np.random.default_rng(count)
    blocks = torch.from_numpy(generator.integers(0, 256, (count, block_bytes), dtype=np.uint8))
    for added in (0, 3):
        expected = stored_blocks._block_values_reference(blocks, name, added)  # pyright: ignore[reportPrivateUsage]
        assert torch.equal(block_values(blocks, name, added), expected)
    assert block_values(blocks.to("meta"), name).shape == expected.shape


@pytest.mark.parametrize("cuts", [[1], [71], [8, 16, 9, 64, 3]])
@pytest.mark.parametrize("name", BLOCK_LAYOUTS)
@pytest.mark.parametrize("level", EACH_LEVEL)
def test_packed_blocks_are_what_separate_steps_pack(level: str, name: str, cuts: list[int]) -> None:
    values, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rows = sum(cuts)
    generator = np.random.default_rng(rows)
    shape = (rows, 1536 // values, block_bytes)
    blocks = torch.from_numpy(generator.integers(0, 124, shape, dtype=np.uint8))
    form = FORMATS[name]
    whole = {
        key: value.view(rows, -1)
        for key, value in in_format(name, blocks.flatten(0, 1), form).items()
    }
    expected = pack_quantized_weight(whole["values"], whole["scales"], whole.get("minimums"), form)
    added = {"Q5_0": 112, "Q6_K": 96, "MXFP4": 116}.get(name, 0)
    kernel = ops_of("quantized", level, pack="pack_blocks").pack
    # the kernel that a model uses, that of the instruction set, and the op in plain torch
    packs: list[Callable[[Tensor, Tensor, int], object]] = [
        lambda packed, part, first: pack_rows(packed, name, part, first, rows),
        lambda packed, part, first: kernel(packed, part, name, added, first, rows, *form),
        lambda packed, part, first: stored_blocks._pack_blocks_reference(  # pyright: ignore[reportPrivateUsage]
            packed, part, name, added, first, rows, *form
        ),
    ]
    firsts = np.cumsum([0, *cuts[:-1]])
    for pack in packs:
        packed = torch.full_like(expected, 0xA5)
        for part in generator.permutation(len(cuts)):  # the order of a file's tensors is free
            first = int(firsts[part])
            pack(packed, blocks[first : first + cuts[part]], first)
        assert torch.equal(packed, expected)


def test_blocks_that_are_no_rows_of_the_matrix_are_refused() -> None:
    load("quantized")
    for blocks, form, first, message in (
        ((3, 2, 18), FORMATS["Q4_0"], 70, "rows 70 to 73 are not rows of the matrix, 0 to 71"),
        ((3, 2, 17), FORMATS["Q4_0"], 0, "the last of which has the 18 bytes of a block"),
        ((6, 18), FORMATS["Q4_0"], 0, "contiguous bytes in 3 dimensions"),
        ((3, 2, 18), FORMATS["Q4_1"], 0, "blocks of the type Q4_0 have groups of 32 values; use"),
        ((3, 3, 18), FORMATS["Q4_0"], 0, r"packed must be contiguous uint8 \[3, 1728\]"),
    ):
        packed = torch.zeros(FORMATS["Q4_0"].packed_shape(71, 64), dtype=torch.uint8)
        zeros = torch.zeros(blocks, dtype=torch.uint8)
        with pytest.raises(ValueError, match=message):
            stored_blocks.pack_blocks(
                packed, zeros, "Q4_0", 0, form, first_row=first, out_features=71
            )


@pytest.mark.parametrize("names", list(itertools.combinations_with_replacement(FORMATS, 2)))
def test_formats_hold_each_number_of_their_types(names: tuple[str, str]) -> None:
    form = common_format(set(names))
    generator = np.random.default_rng(0)
    for name in set(names):
        _, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        blocks = torch.from_numpy(generator.integers(0, 256, (99, block_bytes), dtype=np.uint8))
        if name == "MXFP4":
            blocks[:, 0] = blocks[:, 0].clamp(max=240)  # with larger scales, products overflow
        found = in_format(name, blocks, form)
        values = found["values"].view(99, -1, form.group_size).float()
        assert int(values.max()) < 1 << form.bits
        factors = {key: value for key, value in found.items() if key != "values"}
        for factor in factors.values():
            assert torch.equal(factor.to(form.factors).float().nan_to_num(), factor.nan_to_num())
        scales = factors["scales"][:, :, None]
        if form.kind == "minimums":
            dense = values * scales - factors["minimums"][:, :, None]
        else:
            dense = (values - form.offset) * scales
        expected = dequantize(name, blocks)
        finite = expected.isfinite()
        dense = dense.view(99, -1)
        assert torch.equal(dense[finite], expected[finite])


def test_other_types_are_refused_with_a_remedy() -> None:
    names = {name for name, _, _ in TENSOR_TYPES.values()}
    refused = {name for name in names if why_unsupported(name) is not None}
    assert refused == names - FLOAT_TYPES.keys() - GROUPED_TYPES.keys()
    assert "Q4_K_M" in str(why_unsupported("IQ2_XXS"))


def test_the_page_lists_the_formats() -> None:
    page = (ROOT / "docs/gguf.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\w, ]+) \| (\d) bits \| (\d+) \| (\w+) \| (\w*) ?\| ([\d.]+) \|$", page, re.M
    )
    listed = {name: row[1:] for row in rows for name in row[0].split(", ")}
    expected = {}
    for name, form in FORMATS.items():
        bits = form.packed_shape(32, 256)[1] / 256 / 32 * 8
        minimums = "" if form.symmetric else form.scales
        expected[name] = (str(form.bits), str(form.group_size), form.scales, minimums, f"{bits:g}")
    assert listed == expected
