"""The op `add_adapters`: its CPU kernels against plain torch, and the bits of a row in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.adapters import add_adapters as module
from ostinato.ops.native.instruction_sets import detect_isa
from tests.ops.adapters.adapter_rows import make_rows
from tests.ops.kernel_checks import EACH_LEVEL, name_of, ops_of

TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


def kernel(isa: str) -> Callable[..., None]:
    assert module.__all__  # the op is defined
    return ops_of("adapters", isa, add="add_adapters").add


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES, ids=name_of)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    num_rows=st.sampled_from([1, 3, 4, 9, 70, 300]),
    in_features=st.sampled_from([1, 7, 64, 100, 257]),
    widths=st.sampled_from([(1,), (40,), (300, 9), (64, 33, 150)]),
    max_rank=st.sampled_from([1, 8, 16, 20]),
)
def test_rows_get_their_own_adapters(
    isa: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    seed: int,
    num_rows: int,
    in_features: int,
    widths: tuple[int, ...],
    max_rank: int,
) -> None:
    rows = make_rows(
        seed,
        num_rows,
        in_features,
        widths,
        max_rank=max_rank,
        dtype=dtype,
        out_dtype=out_dtype,
    )
    expected, before = rows.reference(), rows.y.clone()
    single = [rows.row(index) for index in range(min(num_rows, 10))]
    add = kernel(isa)
    add(*rows)
    torch.testing.assert_close(
        rows.y, expected, atol=1e-4, rtol=max(1e-5, 2 * torch.finfo(out_dtype).eps)
    )
    none = rows.slots[:, 0] < 0
    assert torch.equal(rows.y[none], before[none]), "a row without an adapter was changed"
    for index, alone in enumerate(single):
        add(*alone)
        assert torch.equal(alone.y[0], rows.y[index]), "the bits depend on the other rows"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(
    threads: int, set_threads: Callable[[int], None]
) -> None:
    expected, rows = (make_rows(1, 200, 300, (500, 70), dtype=torch.bfloat16) for _ in range(2))
    add = kernel(detect_isa())
    set_threads(4)
    add(*expected)
    set_threads(threads)
    add(*rows)
    assert torch.equal(rows.y, expected.y)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("slots", lambda slots: slots.fill_(4), r"slots\[0\] = 4 must be below 4"),
        ("slots", lambda slots: slots.long(), "slots must be int32"),
        ("y", lambda y: y.bfloat16(), "y must be"),
        ("x", lambda x: x[:, 1:], "a must be contiguous"),
        ("b", lambda b: b[:, 1:], "b must be contiguous"),
        ("ranks", lambda ranks: ranks[1:], "ranks must be"),
        ("scales", lambda scales: scales.double(), "scales must be"),
        ("bounds", lambda bounds: bounds[1:], "bounds must be"),
    ],
)
def test_wrong_arguments_are_named(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    rows = make_rows(1, 5, 64, (40, 9))
    with pytest.raises(ValueError, match=text):
        kernel(detect_isa())(*rows._replace(**{name: change(getattr(rows, name))}))
