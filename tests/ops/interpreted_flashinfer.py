"""The flashinfer backend over stand-ins of FlashInfer, against the reference.

test_interpreted_kernels.py runs this file with TRITON_INTERPRET=1, because a Triton kernel writes
the keys and values.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.graphs.buckets import GraphKey
from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.kv_groups import KVGroup
from ostinato.models.step_tensors import StepInputs
from ostinato.ops.attention import AttentionSpec, PlannedTable
from ostinato.ops.backends.flashinfer import FlashInferBackend
from ostinato.ops.backends.flashinfer_plan import FlashInferPlanner
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from tests.ops.attention_steps import Shape, make_step, run
from tests.ops.flashinfer_stand_in import STAND_IN
from tests.ops.planned_steps import Engine

DECODE, MIXED = GraphKey(4, 4, 1), GraphKey(32, 6, 0)
SHAPE = Shape(head_dim=64, dtype=torch.float16)


def make(
    shape: Shape,
    windows: tuple[int, ...] = (),
    keys: tuple[GraphKey, ...] = (DECODE, MIXED),
    tables: list[PlannedTable] | None = None,
) -> tuple[FlashInferBackend, FlashInferPlanner, Engine]:
    backend = FlashInferBackend(STAND_IN)
    spec = AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
        device=shape.device,
        sliding_window=shape.sliding_window,
        soft_cap=shape.soft_cap,
    )
    tables = tables or [PlannedTable(shape.block_size, 20, shape.sliding_window)]
    planner = backend.make_planner(spec, keys, tables=tables, sliding_windows=windows)
    return backend, planner, Engine(shape, max_num_tokens=64, max_num_seqs=8, max_blocks=20)


STEPS = [
    (DECODE, [(1, 30), (1, 17), (1, 160)]),
    (DECODE, [(1, 1), (1, 16), (1, 33), (1, 100)]),
    (DECODE, []),  # what a capture runs: padding alone
    (MIXED, [(1, 40), (20, 20), (5, 90)]),
    (MIXED, [(32, 150)]),
    (MIXED, [(1, 8), (1, 9), (1, 10), (1, 11), (1, 12), (1, 13)]),
    (MIXED, []),
    (DECODE, [(1, 45), (1, 46)]),
    # Three steps that are not captured: planned without fixed buffers, in any shape.
    (GraphKey(9, 2, 0), [(7, 7), (2, 50)]),
    (GraphKey(3, 3, 1), [(1, 20), (1, 30), (1, 40)]),
    (GraphKey(40, 8, 0), [(33, 33)]),
    (MIXED, [(3, 3), (4, 60)]),
]


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, num_heads=4, num_kv_heads=4, block_size=8),
        replace(SHAPE, sliding_window=20, soft_cap=4.0),
    ],
    ids=["grouped", "one head per group", "window and cap"],
)
def test_steps_of_changing_lengths(shape: Shape) -> None:
    backend, planner, engine = make(shape)
    for seed, (key, lengths) in enumerate(STEPS):
        if not lengths:  # only padding: the call must run, and there is no output to compare
            engine.buffers.host.query_start_loc[0] = 0
            engine.buffers.pad(0, 0, 0, key)
            planner.plan(key, engine.buffers.host, engine.buffers.plan)
            continue
        step, out = engine.run(backend, planner, lengths, key, seed)
        expected, _, _ = run(REFERENCE, step, shape)
        real = step.num_tokens
        torch.testing.assert_close(out[:real], expected[:real], atol=4e-3, rtol=4e-3)
        assert (out[real:] == 0).all()
    planner.close()


def test_a_model_with_two_windows() -> None:
    backend, planner, engine = make(SHAPE, windows=(0, 12))
    step = engine.load([(1, 90), (6, 44)], MIXED)
    planner.plan(MIXED, engine.buffers.host, engine.buffers.plan)
    for window in (0, 12):
        layer = replace(SHAPE, sliding_window=window)
        out, _, _ = run(backend, step, layer)
        expected, _, _ = run(REFERENCE, step, layer)
        torch.testing.assert_close(out[:7], expected[:7], atol=4e-3, rtol=4e-3)
    with pytest.raises(ValueError, match=r"planned sliding windows \[0, 12\] .* asks for 5 and"):
        run(backend, step, replace(SHAPE, sliding_window=5))


def test_layers_with_a_window_read_their_own_blocks() -> None:
    """Blocks outside of the window hold NaN, as those of both tables that no sequence has."""
    layers = [replace(SHAPE, block_size=32), replace(SHAPE, sliding_window=20)]
    keys = GraphKey(3, 3, 1), GraphKey(16, 3, 0)
    backend, planner, _ = make(
        SHAPE, (0, 20), keys, [PlannedTable(32, 10), PlannedTable(16, 20, window=20)]
    )
    buffers = StaticBuffers(
        max_num_tokens=16,
        max_num_seqs=3,
        max_blocks_per_seq=10,
        block_size=16,
        device=SHAPE.device,
        groups=(KVGroup(0, 2, 1), KVGroup(20, 1, 2)),
        max_window_blocks_per_seq=20,
    )
    for key, lengths in (
        (keys[0], [(1, 90), (1, 20), (1, 160)]),
        (keys[1], [(9, 70), (1, 130), (6, 6)]),
        (keys[0], [(1, 91), (1, 37), (1, 5)]),
    ):
        steps = [make_step(lengths, layer) for layer in layers]
        host = buffers.host
        host.query_start_loc[:] = steps[0].metadata.query_start_loc.numpy()
        host.seq_lens[:] = steps[0].metadata.seq_lens.numpy()
        assert host.window_block_table is not None
        assert host.window_slot_mapping is not None
        tables = host.block_table, host.window_block_table
        slots = host.slot_mapping, host.window_slot_mapping
        for step, table, slot_mapping in zip(steps, tables, slots, strict=True):
            ids = step.metadata.block_table.numpy()
            table[:, : ids.shape[1]] = ids
            slot_mapping[: key.num_tokens] = step.metadata.slot_mapping.numpy()
        planner.plan(key, host, buffers.plan)
        batch = buffers.batch(key.num_tokens, key.num_seqs, 1)
        for step, layer in zip(steps, layers, strict=True):
            metadata = StepInputs({}, batch).attention(layer.sliding_window)
            out, _, _ = run(backend, step._replace(metadata=metadata), layer)
            expected, _, _ = run(REFERENCE, step, layer)
            torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    planner.close()


def test_handles_live_until_the_planner_is_closed() -> None:
    backend, planner, engine = make(SHAPE)
    seen = []
    for key in (DECODE, MIXED, DECODE):
        step, _ = engine.run(backend, planner, [(1, 5)], key)
        seen.append(int(engine.buffers.plan[0]))
    assert seen == [1, 2, 1]
    planner.close()
    with pytest.raises(RuntimeError, match=r"flashinfer has no plan 1; call plan\(\)"):
        run(backend, step, SHAPE)


def test_a_step_that_was_not_planned_is_refused() -> None:
    backend, _, engine = make(SHAPE)
    step = engine.load([(1, 5)], DECODE)
    with pytest.raises(RuntimeError, match="flashinfer has no plan 0"):
        run(backend, step, SHAPE)
