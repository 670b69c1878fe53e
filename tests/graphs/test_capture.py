"""Dispatch and capture, with a recorder that replays on the same buffers as a CUDA graph would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.graphs.buckets import BucketTable, GraphKey
from ostinato.graphs.capture import BoundRecorder, GraphRunner
from tests.graphs.toy import MAX_SEQS, VOCAB, ToyModel, fill, make_buffers, make_cache


class StaticRecorder:
    """Behaves like a captured graph: one static output, overwritten by every replay."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = run().clone()
        self.shapes.append(tuple(output.shape))

        def replay() -> Tensor:
            output.copy_(run())
            return output

        return replay


def make_runner(recorder: StaticRecorder | BoundRecorder) -> tuple[GraphRunner, GraphRunner]:
    """(captured, eager) over caches and buffers of their own."""
    model = ToyModel()
    table = BucketTable(decode_sizes=[1, 2, 4], mixed_sizes=[16], max_num_seqs=MAX_SEQS)
    captured = GraphRunner(model, make_cache(), make_buffers(), table=table, recorder=recorder)
    captured.capture()
    return captured, GraphRunner(model, make_cache(), make_buffers())


def run(runner: GraphRunner, sequences: list[tuple[int, list[int]]]) -> Tensor:
    num_tokens, num_seqs = fill(runner._buffers, sequences)
    uniform = all(len(token_ids) == 1 for _, token_ids in sequences)
    return runner.run(num_tokens, num_seqs, num_seqs, uniform_decode=uniform).clone()


@torch.inference_mode()
def test_buckets_are_captured_largest_first() -> None:
    recorder = StaticRecorder()
    captured, _ = make_runner(recorder)
    assert captured.captured_keys == [
        GraphKey(16, MAX_SEQS, False),
        GraphKey(4, 4, True),
        GraphKey(2, 2, True),
        GraphKey(1, 1, True),
    ]
    assert recorder.shapes == [(MAX_SEQS, VOCAB), (4, VOCAB), (2, VOCAB), (1, VOCAB)]


@pytest.mark.parametrize("recorder", [StaticRecorder(), BoundRecorder()])
@torch.inference_mode()
def test_replay_equals_eager_through_joins_and_leaves(
    recorder: StaticRecorder | BoundRecorder,
) -> None:
    """Each step leaves rows behind that the next, smaller one must not see."""
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
        # Block 0 is where padding goes; everything else must agree.
        torch.testing.assert_close(k[1:], expected_k[1:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(v[1:], expected_v[1:], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_poisoned_rows_past_the_batch_change_nothing() -> None:
    captured, eager = make_runner(StaticRecorder())
    sequences = [(0, [3]), (0, [1]), (0, [4])]
    host = captured._buffers.host
    for array in host:
        array.fill(7)
    torch.testing.assert_close(
        run(captured, sequences), run(eager, sequences), atol=1e-5, rtol=1e-5
    )
    assert list(host.seq_lens[:4]) == [1, 1, 1, 0]
    assert list(host.query_start_loc[:5]) == [0, 1, 2, 3, 3]
    assert not host.block_table[3].any()
    assert host.slot_mapping[3] == 0


@torch.inference_mode()
def test_fewer_rows_are_sampled_than_run() -> None:
    """A chunk in mid-prompt has no logits; the others' come first."""
    captured, eager = make_runner(StaticRecorder())
    results = []
    for runner in (captured, eager):
        num_tokens, num_seqs = fill(runner._buffers, [(0, [3, 1, 4]), (0, [1, 5])])
        runner._buffers.host.logits_indices[0] = 4
        results.append(runner.run(num_tokens, num_seqs, 1, uniform_decode=False))
    assert results[0].shape == (1, VOCAB)
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
