"""The bidirectional op against one masked product over the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.encoder_attention import encoder_attention, encoder_attention_reference


def inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    # As the model cuts them out of one projection: strided, not contiguous.
    heads = torch.randn(num_tokens, 6, 16, generator=generator).to(dtype)
    return [heads.narrow(1, start, 2) for start in (0, 2, 4)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_every_row_sees_its_sequence_and_no_other(lengths, num_padding):
    starts = torch.tensor([sum(lengths[:index]) for index in range(len(lengths) + 1)])
    arguments = [*inputs(sum(lengths) + num_padding, torch.float32), starts.int()]
    got = encoder_attention(*arguments, scale=0.25)
    expected = encoder_attention_reference(*arguments, 0.25)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    arguments = [*inputs(9, dtype), torch.tensor([0, 4, 9], dtype=torch.int32)]
    got = encoder_attention(*arguments, scale=0.25)
    assert got.dtype is dtype
    assert got.is_contiguous()
    expected = encoder_attention_reference(*arguments, 0.25)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_the_op_is_well_registered():
    arguments = (*inputs(7, torch.float32), torch.tensor([0, 3, 7], dtype=torch.int32), 0.25)
    torch.library.opcheck(
        torch.ops.ostinato.encoder_attention.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
