"""Dispatch and capture, with a recorder that replays on static buffers, as CUDA graphs do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.graphs.buckets import BucketTable, GraphKey, name_buckets
from ostinato.graphs.capture import GraphRunner
from ostinato.graphs.recorder import CpuRecorder, Recorder
from ostinato.models.step_tensors import given_tensors
from tests.graphs.toy import MAX_SEQS, VOCAB, ToyModel, fill, make_buffers, make_cache


class StaticRecorder:
    """Behaves like a captured graph: one static output, overwritten by every replay."""

    largest_first = True

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = run().clone()
        self.shapes.append(tuple(output.shape))

        def replay() -> Tensor:
            output.copy_(run())
            return output

        return replay


def make_runner(recorder: Recorder) -> tuple[GraphRunner, GraphRunner]:
    """Two runners, (captured, eager), each with a cache and buffers of its own."""
    model = ToyModel()
    table = BucketTable(decode_sizes=[1, 2, 4], mixed_sizes=[16], max_num_seqs=MAX_SEQS)
    captured = GraphRunner(model, make_cache(), make_buffers(), table=table, recorder=recorder)
    captured.capture()
    return captured, GraphRunner(model, make_cache(), make_buffers())


def run(runner: GraphRunner, sequences: list[tuple[int, list[int]]]) -> Tensor:
    num_tokens, num_seqs = fill(runner._buffers, sequences)
    tokens_per_seq = 1 if all(len(token_ids) == 1 for _, token_ids in sequences) else 0
    return runner.run(num_tokens, num_seqs, num_seqs, tokens_per_seq=tokens_per_seq).clone()


@torch.inference_mode()
def test_buckets_are_captured_largest_first() -> None:
    recorder = StaticRecorder()
    captured, _ = make_runner(recorder)
    assert captured.captured_keys == [
        GraphKey(16, MAX_SEQS, 0),
        GraphKey(4, 4, 1),
        GraphKey(2, 2, 1),
        GraphKey(1, 1, 1),
    ]
    assert recorder.shapes == [(MAX_SEQS, VOCAB), (4, VOCAB), (2, VOCAB), (1, VOCAB)]


@torch.inference_mode()
def test_a_cpu_captures_the_smallest_bucket_first() -> None:
    """The first capture computes a step, which takes seconds for a large bucket."""
    captured, _ = make_runner(CpuRecorder(None))
    assert [key.num_tokens for key in captured.captured_keys] == [1, 2, 4, 16]


@pytest.mark.parametrize("recorder", [StaticRecorder(), CpuRecorder(None)])
@torch.inference_mode()
def test_replay_equals_eager_through_joins_and_leaves(
    recorder: Recorder,
) -> None:
    """Each step leaves rows that must not affect the next step."""
    captured, eager = make_runner(recorder)
    steps: list[tuple[list[tuple[int, list[int]]], str]] = [
        ([(0, [3, 1, 4]), (0, [1, 5, 9, 2, 6])], "captured"),  # 8 tokens in the bucket of 16
        ([(3, [5]), (5, [3]), (0, [5])], "captured"),  # 3 sequences in the bucket of 4
        ([(4, [8]), (6, [9]), (1, [7])], "captured"),
        ([(5, [9])], "captured"),
        ([(6, [3]), (0, list(range(30)))], "eager"),  # too large for any bucket
        ([(7, [2])], "captured"),
    ]
    for sequences, kind in steps:
        before = dict(captured.steps_by_kind)
        torch.testing.assert_close(
            run(captured, sequences), run(eager, sequences), atol=1e-5, rtol=1e-5
        )
        assert captured.steps_by_kind[kind] == before[kind] + 1, sequences
    for (k, v), (expected_k, expected_v) in zip(captured._kv_cache, eager._kv_cache, strict=True):
        # Padding is written to block 0; all other blocks must agree.
        torch.testing.assert_close(k[1:], expected_k[1:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(v[1:], expected_v[1:], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_poisoned_rows_past_the_batch_change_nothing() -> None:
    captured, eager = make_runner(StaticRecorder())
    sequences = [(0, [3]), (0, [1]), (0, [4])]
    host = captured._buffers.host
    for name in given_tensors(host):
        getattr(host, name).fill(7)
    torch.testing.assert_close(
        run(captured, sequences), run(eager, sequences), atol=1e-5, rtol=1e-5
    )
    assert list(host.seq_lens[:4]) == [1, 1, 1, 0]
    assert list(host.query_start_loc[:5]) == [0, 1, 2, 3, 3]
    assert not host.block_table[3].any()
    assert host.slot_mapping[3] == 0


class ClosingPlanner:
    """A planner that plans nothing. `close` records which captures the runner still has."""

    def __init__(self) -> None:
        self.runner: GraphRunner | None = None
        self.captured_at_close: list[list[GraphKey]] = []

    def plan(self, key: object, host: object, handle: Tensor) -> None:
        pass

    def close(self) -> None:
        assert self.runner is not None
        self.captured_at_close.append(self.runner.captured_keys)


@torch.inference_mode()
def test_closing_drops_the_captures_and_then_their_plans() -> None:
    planner = ClosingPlanner()
    table = BucketTable(decode_sizes=[1, 2], mixed_sizes=[], max_num_seqs=MAX_SEQS)
    runner = GraphRunner(
        *(ToyModel(), make_cache(), make_buffers()),
        table=table,
        recorder=CpuRecorder(None),
        planner=planner,
    )
    planner.runner = runner
    runner.capture()
    assert len(runner.captured_keys) == 2
    runner.close()
    assert planner.captured_at_close == [[]]


@torch.inference_mode()
def test_fewer_rows_are_sampled_than_run() -> None:
    """A chunk in the middle of a prompt is not sampled, so only the other row has logits."""
    captured, eager = make_runner(StaticRecorder())
    results = []
    for runner in (captured, eager):
        num_tokens, num_seqs = fill(runner._buffers, [(0, [3, 1, 4]), (0, [1, 5])])
        runner._buffers.host.logits_indices[0] = 4
        results.append(runner.run(num_tokens, num_seqs, 1, tokens_per_seq=0))
    assert results[0].shape == (1, VOCAB)
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


class ScarceRecorder(StaticRecorder):
    """Captures buckets whose number of rows is in `captured`; raises `error` for the others."""

    def __init__(self, captured: set[int], error: Exception) -> None:
        super().__init__()
        self.captured = captured
        self.error = error

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = super().capture(run)
        if len(replay()) not in self.captured:
            raise self.error
        return replay


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
CLOSED_AFTER = RuntimeError("CUDA error: operation failed due to a previous error during capture")
CLOSED_AFTER.__context__ = OUT_OF_MEMORY


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, CLOSED_AFTER])
@torch.inference_mode()
def test_buckets_that_lack_memory_are_left_out(error: Exception) -> None:
    """Steps of these buckets run in the next larger one or uncaptured; the logits are the same."""
    recorder = ScarceRecorder({4, 1}, error)  # the mixed bucket has 6 rows
    captured, eager = make_runner(recorder)
    assert captured.captured_keys == [GraphKey(4, 4, 1), GraphKey(1, 1, 1)]
    steps: list[tuple[list[tuple[int, list[int]]], str]] = [
        ([(0, [3, 1, 4]), (0, [1, 5, 9])], "eager"),
        ([(3, [5]), (3, [3])], "captured"),  # 2 in the bucket of 4
        ([(4, [5])], "captured"),
    ]
    for sequences, kind in steps:
        before = dict(captured.steps_by_kind)
        torch.testing.assert_close(
            run(captured, sequences), run(eager, sequences), atol=1e-5, rtol=1e-5
        )
        assert captured.steps_by_kind[kind] == before[kind] + 1, sequences


@torch.inference_mode()
def test_capture_names_what_it_leaves_out() -> None:
    model = ToyModel()
    table = BucketTable(decode_sizes=[1, 2, 4], mixed_sizes=[16, 32], max_num_seqs=MAX_SEQS)
    runner = GraphRunner(
        model,
        make_cache(),
        make_buffers(),
        table=table,
        recorder=ScarceRecorder({1, 2}, OUT_OF_MEMORY),
    )
    captured: list[GraphKey] = []
    left_out = runner.capture(captured.append)
    assert captured == [GraphKey(2, 2, 1), GraphKey(1, 1, 1)]
    assert name_buckets(left_out) == "decode of 4 sequences, mixed of 32, 16 tokens"


@torch.inference_mode()
def test_another_error_of_a_capture_is_raised() -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        make_runner(ScarceRecorder(set(), RuntimeError("an illegal memory access")))
