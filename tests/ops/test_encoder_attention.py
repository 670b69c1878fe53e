"""The bidirectional op against one masked product over the batch, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.encoder_attention import _kernel as python_kernel
from ostinato.ops.encoder_attention import encoder_attention, encoder_attention_reference
from ostinato.ops.native.library import load
from tests.ops.kernel_checks import EACH_LEVEL, name_of, ops_of

OP = "encoder_attention"
HEADS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def inputs(num_tokens: int, dtype: torch.dtype, head_dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    # As the model cuts them out of one projection: strided, not contiguous.
    heads = torch.randn(num_tokens, 3 * HEADS, head_dim, generator=generator).to(dtype)
    return [heads.narrow(1, start, HEADS) for start in (0, HEADS, 2 * HEADS)]


def starts_of(lengths: list[int]) -> Tensor:
    starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    return torch.tensor(starts, dtype=torch.int32)


def check(attend, arguments: list[Tensor], scale: float) -> None:
    got = attend(*arguments, scale)
    expected = encoder_attention_reference(*arguments, scale)
    assert got.dtype is arguments[0].dtype
    assert got.is_contiguous()
    error = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected, atol=error, rtol=error)


@pytest.mark.parametrize("level", ["python", *EACH_LEVEL])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_row_sees_its_sequence_and_no_other(level: str, dtype: torch.dtype) -> None:
    attend = python_kernel if level == "python" else ops_of("core", level, attend=OP).attend

    @given(
        st.lists(st.integers(0, 90), min_size=1, max_size=4),
        st.integers(0, 3),
        st.sampled_from([8, 16, 26, 32, 40, 64, 128]),
    )
    @settings(max_examples=15, deadline=None)
    def run(lengths: list[int], num_padding: int, head_dim: int) -> None:
        arguments = inputs(sum(lengths) + num_padding, dtype, head_dim)
        check(attend, [*arguments, starts_of(lengths)], head_dim**-0.5)

    run()


@pytest.mark.parametrize("level", EACH_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bits_of_a_sequence_depend_on_it_alone(level: str, dtype: torch.dtype) -> None:
    """A sequence has the same bits in a batch and alone, where it runs on 1 or on 2 threads.

    A partition has 256 keys, so the sequences of 300 and 517 tokens have several partitions.
    """
    attend = ops_of("core", level, attend=OP).attend
    lengths = [5, 300, 1, 64, 517]
    q, k, v = inputs(sum(lengths), dtype, 32)
    together = attend(q, k, v, starts_of(lengths), 0.2)
    before = torch.get_num_threads()
    begin = 0
    try:
        for index, length in enumerate(lengths):
            torch.set_num_threads(1 + index % 2)
            rows = slice(begin, begin + length)
            alone = attend(q[rows], k[rows], v[rows], starts_of([length]), 0.2)
            assert torch.equal(together[rows], alone)
            begin += length
    finally:
        torch.set_num_threads(before)
    check(attend, [q, k, v, starts_of(lengths)], 0.2)


def test_memory_of_the_call_before_has_no_effect() -> None:
    """The kernel copies keys and values into blocks of 16 tokens.

    Places after a sequence's last token keep what an earlier call left in this memory, such as NaN.
    """
    load("core")
    for dtype in DTYPES:
        arguments = [*inputs(37, dtype), starts_of([3, 34])]
        clean = encoder_attention(*arguments, scale=0.25)
        broken = [torch.full((500, HEADS, 16), torch.nan, dtype=dtype) for _ in range(3)]
        encoder_attention(*broken, starts_of([500]), scale=0.25)
        assert torch.equal(encoder_attention(*arguments, scale=0.25), clean)


@pytest.mark.parametrize(
    ("starts", "head_dim", "message"),
    [
        ([1, 3, 7], 16, "query_start_loc must begin with 0"),
        ([0, 5, 3], 16, "must not fall, and must stay within 7 tokens, sequence 1"),
        ([0, 5, 9], 16, "must not fall, and must stay within 7 tokens, sequence 1"),
        ([0, 3, 7], 264, "head_dim must be from 1 to 256, got 264"),
    ],
)
def test_what_the_kernel_refuses(starts: list[int], head_dim: int, message: str) -> None:
    load("core")
    loc = torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        encoder_attention(*inputs(7, torch.float32, head_dim), loc, scale=0.25)


def test_the_op_is_well_registered() -> None:
    arguments = (*inputs(7, torch.float32), torch.tensor([0, 3, 7], dtype=torch.int32), 0.25)
    torch.library.opcheck(
        torch.ops.ostinato.encoder_attention.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
