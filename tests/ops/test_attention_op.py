"""The op `paged_attention`: its schema, torch.compile, choice of a backend, refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops.attention import AttentionSpec, paged_attention, select_backend
from ostinato.ops.backends.cpu import BACKEND as CPU
from tests.ops.attention_steps import CpuOrder, Shape, make_step, run

LENGTHS = [(1, 1), (1, 300), (70, 70), (1, 64), (33, 290), (2, 257)]


@pytest.mark.parametrize("has_extras", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_opcheck(backend: str, has_extras: bool) -> None:
    shape = Shape(has_alibi=has_extras, has_sinks=has_extras)
    step = make_step([(1, 20), (9, 9)], shape)
    for cache in (step.k_cache, step.v_cache):
        cache.nan_to_num_(0.0)
    step.metadata.block_table.clamp_(max=step.k_cache.shape[0] - 1)
    torch.library.opcheck(
        torch.ops.ostinato.paged_attention.default,
        (*step[:5], *step.metadata, 0.2, 0, 0.0, *shape.per_head(), backend),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_op_under_compile_writes_the_same_cache() -> None:
    shape = Shape(dtype=torch.bfloat16)
    step = make_step(LENGTHS, shape)
    expected, k_expected, v_expected = run(CPU, step, shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return paged_attention(
            q, k, v, k_cache, v_cache, step.metadata, scale=32**-0.5, backend="cpu"
        )

    order = CpuOrder(step.k_cache)
    k_cache, v_cache = order.keys(step.k_cache), order.values(step.v_cache)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*step[:3], k_cache, v_cache), expected)
    assert torch.equal(order.keys_by_token(k_cache).nan_to_num(7.0), k_expected.nan_to_num(7.0))
    assert torch.equal(order.values_by_token(v_cache).nan_to_num(7.0), v_expected.nan_to_num(7.0))


def spec(**changes: Any) -> AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 16,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    return AttentionSpec(**(fields | changes))


def test_auto_selects_the_kernel() -> None:
    assert select_backend("auto", spec()) == "cpu"


def test_auto_falls_back_to_the_reference() -> None:
    assert select_backend("auto", spec(head_dim=100)) == "reference"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 100}, "head sizes must be multiples of 8 up to 256, not 100"),
        ({"head_dim": 264}, "head sizes must be multiples of 8 up to 256, not 264"),
        ({"block_size": 12}, "block_size must be a multiple of 8, not 12"),
        ({"dtype": torch.float64}, "dtype must be float32, bfloat16 or float16, not torch.float64"),
        ({"device": torch.device("cuda")}, "it runs on the CPU, not on cuda"),
    ],
)
def test_why_unsupported(changes: dict[str, object], reason: str) -> None:
    assert CPU.why_unsupported(spec(**changes)) == reason


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.slot_mapping.fill_(10**9), "slot_mapping\\[0\\] = 1000000000 is outside"),
        (lambda m: m.block_table.fill_(-1), "block_table\\[0, 0\\] = -1 is outside"),
        (lambda m: m.seq_lens.fill_(10**6), "seq_lens\\[0\\] = 1000000 must be in \\[1, 32\\]"),
        (lambda m: m.seq_lens.fill_(0), "seq_lens\\[0\\] = 0 must be in \\[1, 32\\]"),
        (lambda m: m.query_start_loc.fill_(1), "query_start_loc must begin with 0"),
    ],
)
def test_metadata_out_of_range_is_refused(damage, message: str) -> None:
    shape = Shape()
    step = make_step([(1, 20), (9, 9)], shape)
    damage(step.metadata)
    with pytest.raises(ValueError, match=message):
        run(CPU, step, shape)


def test_tensors_that_do_not_fit_are_refused() -> None:
    shape = Shape()
    step = make_step([(1, 20)], shape)
    with pytest.raises(ValueError, match="one dtype"):
        run(CPU, step._replace(k=step.k.double()), shape)
    with pytest.raises(ValueError, match="last dimension must be contiguous"):
        run(CPU, step._replace(q=step.q.repeat(1, 1, 2)[..., ::2]), shape)
    with pytest.raises(ValueError, match="the caches need the head_dim of k and of v"):
        run(CPU, step._replace(v=step.v[..., :16]), shape)
    with pytest.raises(ValueError, match=r"sinks must be float32 \[8\], contiguous"):
        CPU.run(*step[:5], step.metadata, 1.0, 0, 0.0, None, torch.zeros(7))
    with pytest.raises(ValueError, match=r"alibi_slopes must be float32 \[8\], contiguous"):
        CPU.run(*step[:5], step.metadata, 1.0, 0, 0.0, torch.zeros(8).double(), None)
