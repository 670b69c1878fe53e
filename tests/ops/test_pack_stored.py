"""Weights packed from stored words are, bit for bit, those packed from single bytes.

The reference is `pack_quantized` of the bytes [out, in], with the columns in the groups' order and
a float32 scale for each group of the kernel.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ostinato.ops.checkpoint_values import stored_values
from ostinato.ops.checkpoint_values.stored_values import (
    Packing,
    StoredValues,
    pack_stored,
    unpack_values,
)
from ostinato.ops.quantized import pack_quantized_weight
from ostinato.ops.quantized_reference import QuantFormat
from tests.models.quantized_checkpoints.writers import AWQ_SLOTS, words
from tests.ops.kernel_checks import EACH_LEVEL, ops_of

_SIZES = [(1, 8), (33, 24), (64, 256), (200, 160)]


class Stored(NamedTuple):
    """A matrix of random integers, as a checkpoint stores it."""

    values: Tensor  # [out, in] uint8
    scales: Tensor  # [out, stored groups]
    zeros: Tensor | None
    order: Tensor | None
    form: QuantFormat
    group_columns: int

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    def expected(self) -> Tensor:
        """The weight, packed from bytes."""
        values = self.values if self.order is None else self.values[:, self.order.long()]
        columns = -(-self.in_features // 8) * 8
        group = torch.arange(0, columns, self.form.group_size) // self.group_columns
        zeros = None if self.zeros is None else self.zeros[:, group].float()
        return pack_quantized_weight(values, self.scales[:, group].float(), zeros, self.form)

    def rows(self, begin: int, end: int, packing: Packing) -> StoredValues:
        """Some rows in the words or bytes of a packing."""
        values, bits = self.values[begin:end].long(), self.form.bits
        if packing is Packing.bytes:
            return StoredValues(self.values[begin:end], packing)
        if packing is Packing.rows:
            return StoredValues(words(values, bits), packing)
        if packing is Packing.columns:
            return StoredValues(words(values, bits).T.contiguous(), packing)
        return StoredValues(words(values.T.contiguous(), 4, AWQ_SLOTS), packing)


def stored(
    size: tuple[int, int], form: QuantFormat, group_columns: int, *, ordered: bool = False
) -> Stored:
    rows, columns = size
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    most = 255 if form.kind == "e4m3" else 1 << form.bits
    values = torch.randint(0, most, size, generator=generator).to(torch.uint8)
    groups = -(-columns // group_columns)
    scales = torch.randn(groups, rows, generator=generator).to(form.factors).T
    zeros = torch.randint(0, (1 << form.bits) + 1, (rows, groups), generator=generator).int()
    order = torch.randperm(columns, generator=generator).int() if ordered else None
    return Stored(values, scales, None if form.symmetric else zeros, order, form, group_columns)


def packed_in_parts(given: Stored, packing: Packing, cuts: list[int], pack=pack_stored) -> Tensor:
    """The weight, made from the rows between cuts. Memory that is not written keeps a 255."""
    shape = given.form.packed_shape(*given.values.shape)
    packed = torch.full(tuple(shape), 255, dtype=torch.uint8)
    for begin, end in itertools.pairwise(cuts):
        pack(
            packed,
            given.rows(begin, end, packing),
            given.scales[begin:end],
            None if given.zeros is None else given.zeros[begin:end],
            given.order,
            given.form,
            first_row=begin,
            in_features=given.in_features,
            group_columns=given.group_columns,
        )
    return packed


def in_plain_torch(packed, part, scales, zeros, order, form, *, first_row, **sizes) -> None:
    """`pack_stored` as it runs before the kernels are loaded."""
    values = stored_values._in_rows(part)  # pyright: ignore[reportPrivateUsage]
    stored_values._pack_stored_reference(  # pyright: ignore[reportPrivateUsage]
        packed, values, scales, zeros, order, first_row, *sizes.values(), part.is_signed,
        part.packing.value, *form,
    )  # fmt: skip


@pytest.fixture(params=EACH_LEVEL)
def pack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """`pack_stored` at one instruction set."""
    kernel = ops_of("quantized", request.param, op="pack_stored").op
    monkeypatch.setattr(stored_values, "_pack_stored", kernel)
    return pack_stored


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize(
    ("packing", "bits"),
    [(one, bits) for one in Packing for bits in (4, 8) if (one, bits) != (Packing.awq, 8)],
)
def test_every_packing_and_group(pack, packing: Packing, bits: int, group: int) -> None:
    for symmetric in (True, False):
        for size in _SIZES:
            columns = size[1] if group == -1 else group
            form = QuantFormat(
                bits, min(256, columns) if group == -1 else group, symmetric, "float16"
            )
            given = stored(size, form, columns)
            whole = packed_in_parts(given, packing, [0, size[0]], pack)
            assert torch.equal(whole, given.expected())
            if packing is Packing.awq:
                continue
            ordered = stored(size, form, columns, ordered=True)
            whole = packed_in_parts(ordered, packing, [0, size[0]], pack)
            assert torch.equal(whole, ordered.expected())


@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("packing", list(Packing))
def test_parts_share_panels(pack, packing: Packing, scales: str) -> None:
    form = QuantFormat(4, 16, False, scales)
    for ordered in (False,) if packing is Packing.awq else (False, True):
        given = stored((136, 72), form, 24 * 2, ordered=ordered)
        for cuts in ([0, 8, 16, 136], [0, 24, 104, 136], [0, 32, 64, 136]):
            assert torch.equal(packed_in_parts(given, packing, cuts, pack), given.expected())
    if packing is not Packing.awq:
        given = stored((77, 40), form, 48)
        for cuts in ([0, 1, 2, 77], [0, 31, 33, 77]):
            assert torch.equal(packed_in_parts(given, packing, cuts, pack), given.expected())


@pytest.mark.parametrize("in_features", [1, 3, 7, 12, 65, 130])
def test_columns_that_fill_no_word(pack, in_features: int) -> None:
    for bits in (4, 8):
        form = QuantFormat(bits, 32, True, "bfloat16")
        for packing in Packing:
            if packing is Packing.awq and bits == 8:
                continue
            given = stored((70, in_features), form, 32, ordered=packing is Packing.rows)
            assert torch.equal(packed_in_parts(given, packing, [0, 70], pack), given.expected())


@pytest.mark.parametrize("form", [QuantFormat(8, 128, True, "float32", "e4m3"),
                                  QuantFormat(4, 16, True, "float32", "e2m1")])  # fmt: skip
def test_stored_floats(pack, form: QuantFormat) -> None:
    for size in ((64, 256), (33, 24), (5, 130)):
        given = stored(size, form, form.group_size)
        if form.kind == "e4m3":
            part = StoredValues(given.values.view(torch.float8_e4m3fn), Packing.bytes)
        else:  # a byte has two values, and the last word of a row may be cut
            halves = given.values[:, 0::2] | given.values[:, 1::2] << 4
            part = StoredValues(halves.view(size[0], -1, 1), Packing.rows)
        packed = torch.full(tuple(form.packed_shape(*size)), 255, dtype=torch.uint8)
        pack(packed, part, given.scales.double(), None, None, form,
             first_row=0, in_features=size[1], group_columns=form.group_size)  # fmt: skip
        assert torch.equal(packed, given.expected())


@pytest.mark.parametrize("packing", [Packing.bytes, Packing.rows, Packing.columns])
def test_floats_of_8_bits_in_each_packing_and_order(pack, packing: Packing) -> None:
    form = QuantFormat(8, 32, True, "bfloat16", "e4m3")
    for ordered in (False, True):
        given = stored((70, 100), form, 64, ordered=ordered)
        assert torch.equal(packed_in_parts(given, packing, [0, 33, 70], pack), given.expected())


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_with_a_sign(pack, bits: int) -> None:
    form = QuantFormat(bits, 64, True, "bfloat16")
    for ordered in (False, True):
        given = stored((70, 100), form, 64, ordered=ordered)
        half = 1 << (bits - 1)
        signed = StoredValues((given.values.int() - half).to(torch.int8), Packing.bytes, True)
        assert torch.equal(unpack_values(signed, bits), given.values)
        packed = torch.full(tuple(form.packed_shape(70, 100)), 255, dtype=torch.uint8)
        pack(packed, signed, given.scales, None, given.order, form,
             first_row=0, in_features=100, group_columns=64)  # fmt: skip
        assert torch.equal(packed, given.expected())


def test_views_and_other_scales(pack) -> None:
    """Rows cut from a wider tensor, a scale for the whole matrix, scales that are rounded."""
    form = QuantFormat(4, 32, True, "bfloat16")
    given = stored((96, 128), form, 128)
    one = torch.tensor([[0.3]])
    spread = given._replace(scales=one.expand(96, 1))
    packed = torch.empty(tuple(form.packed_shape(32, 128)), dtype=torch.uint8)
    for packing in (Packing.rows, Packing.columns, Packing.bytes):
        whole = given.rows(0, 96, packing)
        cut = whole.values[:, 32:64] if packing is Packing.columns else whole.values[32:64]
        pack(packed, whole._replace(values=cut), spread.scales[32:64], None, None, form,
             first_row=0, in_features=128, group_columns=128)  # fmt: skip
        assert torch.equal(packed, spread.expected()[1:2])


def test_plain_torch_does_the_same() -> None:
    for packing in Packing:
        for symmetric in (True, False):
            form = QuantFormat(4, 16, symmetric, "float16")
            given = stored((136, 72), form, 48, ordered=packing is Packing.columns)
            packed = packed_in_parts(given, packing, [0, 8, 24, 136], in_plain_torch)
            assert torch.equal(packed, given.expected())


def test_bad_arguments_are_refused() -> None:
    form = QuantFormat(4, 32, False, "float16")
    given = stored((64, 64), form, 32)
    for change, message in (
        ({"zeros": None}, "zero points are int32, and given unless the format is symmetric"),
        ({"scales": given.scales[:, :1]}, "must be matrices"),
        ({"order": torch.arange(63).int()}, "an element for each column"),
        ({"order": torch.full((64,), 64).int()}, "order must consist of columns"),
        ({"values": given.values[:, :32]}, "stored values must be a matrix with contiguous rows"),
        ({"form": form._replace(symmetric=True)}, "unless the format is symmetric"),
        ({"form": form._replace(kind="minimums")}, "with minimums are not packed"),
        ({"form": form._replace(group_size=24)}, "must consist of whole groups"),
        ({"scales": given.scales[:, 0]}, "must be matrices"),
        ({"scales": given.scales[0, 0]}, "must be matrices"),
        ({"zeros": given.zeros[:, 0]}, "must be matrices"),
        ({"values": given.values[:63]}, "stored values must be a matrix"),
    ):
        changed = given._replace(**change)
        shape = tuple(form.packed_shape(64, 64))
        with pytest.raises(ValueError, match=message):
            pack_stored(
                torch.empty(shape, dtype=torch.uint8),
                StoredValues(changed.values, Packing.bytes),
                changed.scales,
                changed.zeros,
                changed.order,
                changed.form,
                first_row=0,
                in_features=64,
                group_columns=32,
            )
    floats = stored((64, 64), QuantFormat(8, 32, True, "bfloat16", "e4m3"), 32)
    packed = torch.empty(tuple(floats.form.packed_shape(64, 64)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="floats of 8 bits have their own sign"):
        pack_stored(packed, StoredValues(floats.values, Packing.bytes, True), floats.scales, None,
                    None, floats.form, first_row=0, in_features=64, group_columns=32)  # fmt: skip
    awq = stored((64, 64), form, 32, ordered=True)
    with pytest.raises(ValueError, match="AWQ's order have 4 bits, no order of columns"):
        packed_in_parts(awq, Packing.awq, [0, 64])


@pytest.mark.parametrize("packing", list(Packing))
def test_too_few_words_are_refused(packing: Packing) -> None:
    """The kernel would read beyond the stored tensor."""
    given = stored((64, 64), QuantFormat(4, 32, True, "float16"), 32)
    packed = torch.empty(tuple(given.form.packed_shape(64, 64)), dtype=torch.uint8)
    whole = given.rows(0, 64, packing)
    for values in (whole.values[:-1], whole.values[:, :-1]):
        with pytest.raises(ValueError, match="stored values must be a matrix"):
            pack_stored(packed, whole._replace(values=values), given.scales, None, None, given.form,
                        first_row=0, in_features=64, group_columns=32)  # fmt: skip


def test_the_registration_passes_opcheck() -> None:
    form = QuantFormat(4, 32, False, "float16")
    given = stored((45, 21), form, 32)
    packed = torch.zeros(tuple(form.packed_shape(45, 21)), dtype=torch.uint8)
    arguments = (packed, given.values, given.scales, given.zeros, None, 0, 21, 32, False, "bytes")
    torch.library.opcheck(torch.ops.ostinato.pack_stored.default, (*arguments, *form))
