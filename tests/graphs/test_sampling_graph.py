"""Captured sampling draws the tokens that each row draws alone, and waits for no device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.graphs.sampling_graph import GraphSampler, SamplingKey
from ostinato.ops.sampling.sample_rows import (
    RowSampling,
    SamplePath,
    sample_path,
    sampling_workspace_bytes,
)
from tests.graphs.sampling_steps import MAX_SEQS, VOCAB, check_draws
from tests.graphs.test_capture import StaticRecorder
from tests.live_bytes import LiveBytes


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "path"),
    [
        (VOCAB, 1.0, 0.0, SamplePath.full),
        (512, 1.0, 0.0, SamplePath.narrow),
        (20, 0.9, 0.1, SamplePath.narrow),
        (513, 1.0, 0.0, SamplePath.wide),
        (VOCAB, 0.9, 0.0, SamplePath.wide),
        (VOCAB, 1.0, 0.1, SamplePath.wide),
    ],
)
def test_a_rows_way_follows_from_its_parameters(
    top_k: int, top_p: float, min_p: float, path: SamplePath
) -> None:
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "vocab_size": VOCAB}
    assert sample_path(temperature=0.5, **given) is path
    assert sample_path(temperature=0.0, **given) is SamplePath.greedy


@pytest.mark.parametrize("captured", [False, True])
@torch.inference_mode()
def test_static_draws_are_those_of_each_row_alone(captured: bool) -> None:
    static = torch.zeros(MAX_SEQS, VOCAB)
    token_sampler = GraphSampler(static, recorder=StaticRecorder() if captured else None)
    token_sampler.capture()
    check_draws(token_sampler, static, num_steps=60)


def test_sizes_and_mixtures_that_are_captured() -> None:
    recorder = StaticRecorder()
    token_sampler = GraphSampler(torch.zeros(6, 10), recorder=recorder)
    assert token_sampler.capture() == []
    full, narrow, wide = SamplePath.full, SamplePath.narrow, SamplePath.wide
    mixtures = [{full, narrow, wide}, {full, wide}, {full, narrow}, {full}]
    assert token_sampler.captured_keys == [
        SamplingKey(size, frozenset(mixture)) for size in (6, 4, 2, 1) for mixture in mixtures
    ]


class Scarce:
    """A recorder without memory for results of more than `most` rows."""

    def __init__(self, most: int) -> None:
        self.most = most

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if len(run()) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return run


def test_draws_that_lack_memory_run_uncaptured() -> None:
    static = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    token_sampler = GraphSampler(static, recorder=Scarce(2))
    left_out = token_sampler.capture()
    assert {key.num_rows for key in left_out} == {4}
    assert {key.num_rows for key in token_sampler.captured_keys} == {1, 2}
    token_sampler.stage([RowSampling(SamplePath.greedy, 1e-3, 10, 1.0, 0.0, 0.0)] * 3)
    assert token_sampler.run(static[:3]).tolist() == static[:3].argmax(-1).tolist()


def test_another_error_of_the_capture_is_an_error() -> None:
    class Broken:
        def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphSampler(torch.zeros(2, 10), recorder=Broken()).capture()


class NoQuestions(TorchDispatchMode):
    """Refuses operations that wait for a device or whose result has a data-dependent shape."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_static_draws_ask_the_device_nothing() -> None:
    token_sampler = GraphSampler(torch.randn(5, VOCAB))
    with NoQuestions():
        token_sampler.run_largest()


def test_memory_of_a_draw_is_bounded() -> None:
    # 4 Mi elements at once: 27 rows of 152k.
    assert sampling_workspace_bytes(1, 151_936) == 64 * 151_936
    assert (
        sampling_workspace_bytes(27, 151_936)
        == sampling_workspace_bytes(256, 151_936)
        == 64 * 27 * 151_936
    )


@pytest.mark.parametrize("num_rows", [1, 3, 9])
@torch.inference_mode()
def test_a_draw_stays_within_its_memory(num_rows: int) -> None:
    """All paths, for one chunk of rows and for several (a chunk is two rows of 2 million)."""
    vocab_size = 2_000_000
    token_sampler = GraphSampler(torch.randn(num_rows, vocab_size))
    with LiveBytes() as live:
        token_sampler.run_largest()
    # A sort on a GPU takes another copy of values and indices besides its result.
    of_the_sort = 12 * min(num_rows, 2) * vocab_size
    assert live.peak + of_the_sort <= sampling_workspace_bytes(num_rows, vocab_size)
    assert live.peak > 20 * vocab_size
