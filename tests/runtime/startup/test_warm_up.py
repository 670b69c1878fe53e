"""The warm-up steps of a start use every tile of tokens, rows and sequences within the limits."""

from __future__ import annotations

from ostinato.models.step_tensors import StepSizes
from ostinato.ops.backends.triton_tiles import FIRST_OF_CLASS, KernelShape
from ostinato.ops.quantized import GPU_TILE_TOKENS
from ostinato.runtime.startup.plan.warm_up import cpu_steps, gpu_steps


def test_the_largest_step_of_one_sequence_is_first_and_the_largest_of_all_is_last() -> None:
    steps = gpu_steps({1, 64, 128, 17}, {1, 5}, most_tokens=8192, most_seqs=256)
    assert steps == (
        StepSizes(128, 1, 1),
        StepSizes(64, 1, 1),
        StepSizes(17, 1, 1),
        StepSizes(1, 1, 1),
        StepSizes(5, 5, 5),
        StepSizes(8192, 1, 1),
    )


def test_no_step_is_larger_than_the_limits() -> None:
    steps = gpu_steps({1, 64, 128}, {1, 5, 17, 65}, most_tokens=96, most_seqs=16)
    assert [step.num_tokens for step in steps] == [96, 64, 1, 5, 96]
    steps = gpu_steps({1, 64}, {5, 17}, most_tokens=8, most_seqs=16)
    assert [step.num_tokens for step in steps] == [8, 1, 5, 8]


def test_every_class_of_attention_has_a_step() -> None:
    steps = gpu_steps({1}, FIRST_OF_CLASS, most_tokens=2048, most_seqs=256)
    shapes = {
        count: KernelShape(32, 8, 128, 16, 2, 1 << 17, num_seqs=count) for count in range(1, 257)
    }
    classes = {(one.min_partition, one.max_partitions) for one in shapes.values()}
    run = {(shapes[s.num_seqs].min_partition, shapes[s.num_seqs].max_partitions) for s in steps}
    assert run == classes


def test_every_tile_of_quantised_products_has_a_step() -> None:
    """Tiles have 1, 2, 4, 16, 32, 64 and 128 rows."""

    def tile(rows: int) -> int:
        return next((most for most in (1, 2, 4, 16, 32, 64) if rows <= most), 128)

    assert {tile(rows) for rows in GPU_TILE_TOKENS} == {tile(rows) for rows in range(1, 300)}


def test_a_cpu_runs_two_steps() -> None:
    assert cpu_steps(2048) == (StepSizes(8, 1, 1), StepSizes(1, 1, 1))
    assert cpu_steps(1) == (StepSizes(1, 1, 1),)
