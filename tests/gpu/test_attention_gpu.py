"""The CUDA attention backends on a device: against the reference, captured, without leaks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.graphs.buckets import GraphKey
from ostinato.models.step_tensors import StepInputs
from ostinato.ops.attention import (
    AttentionBackend,
    AttentionPlanner,
    AttentionSpec,
    PlannedBackend,
    PlannedTable,
    load_backend,
)
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from tests.ops.attention_steps import TOLERANCE, Shape, Step, known, run
from tests.ops.planned_steps import Engine

pytestmark = pytest.mark.gpu

MAX_BLOCKS = 80
NUM_CACHE_BLOCKS = 1200  # enough for the largest step, of 16 sequences of 1,000 tokens
CUDA = torch.device("cuda")
BASE = Shape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=CUDA)
FP8 = torch.float8_e4m3fn
DECODE, MIXED = GraphKey(16, 16, 1), GraphKey(128, 16, 0)

# Each step leaves stale rows that the next step must not read.
MIXED_STEPS = [
    [(1, 700), (37, 37), (4, 300), (20, 90), (1, 1), (5, 5)],
    [(128, 128)],
    [(1, 1000 + i) for i in range(16)],
    [(100, 620), (1, 3)],
    [(1, 1)],
    [(3, 600), (2, 2), (60, 1100)],
]
DECODE_STEPS = [
    [(1, 40 * i + 1) for i in range(16)],
    [(1, 1)],
    [(1, 1200), (1, 5), (1, 300)],
    [(1, 256 + i) for i in range(9)],
]


def make_spec(shape: Shape) -> AttentionSpec:
    return AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
        cache_dtype=shape.cache_dtype,
        device=shape.device,
        sliding_window=shape.sliding_window,
        soft_cap=shape.soft_cap,
        has_alibi=shape.has_alibi,
        has_sinks=shape.has_sinks,
        sees_ahead=bool(shape.run_tokens),
    )


def engine_of(
    name: str, shape: Shape, keys: tuple[GraphKey, ...] = ()
) -> tuple[AttentionBackend, AttentionPlanner, Engine]:
    """A backend, its planner and the static buffers; skips unsupported shapes."""
    backend = load_backend(name)
    reason = backend.why_unsupported(make_spec(shape))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    assert isinstance(backend, PlannedBackend)
    planner = backend.make_planner(
        make_spec(shape),
        keys,
        tables=[PlannedTable(shape.block_size, MAX_BLOCKS, shape.sliding_window)],
    )
    engine = Engine(shape, max_num_tokens=512, max_num_seqs=16, max_blocks=MAX_BLOCKS)
    return backend, planner, engine


def reference(step: Step, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Output of the step computed in float32, and the K and V caches in their own dtype."""
    wide = replace(shape, dtype=torch.float32)
    q, k, v, k_cache, v_cache = (tensor.float() for tensor in step[:5])
    if shape.cache_dtype is not None:
        k_cache, v_cache = step.k_cache, step.v_cache
    widened = Step(q, k, v, k_cache, v_cache, step.metadata, step.num_tokens)
    _, k_expected, v_expected = run(REFERENCE, step, shape)
    return run(REFERENCE, widened, wide)[0], k_expected, v_expected


def assert_rows_equal(out: Tensor, expected: Tensor, step: Step, dtype: torch.dtype) -> None:
    real, tolerance = step.num_tokens, TOLERANCE[dtype]
    torch.testing.assert_close(out[:real].float(), expected[:real], atol=tolerance, rtol=tolerance)
    assert out[real:].isfinite().all()


GRID = [
    *(
        replace(BASE, dtype=dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        for dtype, (heads, kv_heads, dim) in itertools.product(
            (torch.bfloat16, torch.float16, torch.float32),
            ((32, 8, 128), (16, 8, 128), (12, 12, 64), (8, 1, 256), (14, 2, 64), (32, 32, 80)),
        )
    ),
    *(replace(BASE, block_size=size) for size in (8, 32, 64, 128)),
    *(replace(BASE, sliding_window=window) for window in (1, 50, 300, -50, -300)),
    replace(BASE, soft_cap=30.0),
    replace(BASE, sliding_window=77, soft_cap=5.0, block_size=64),
    replace(BASE, num_heads=16, num_kv_heads=16, head_dim=192, value_dim=128),
    replace(BASE, num_heads=16, head_dim=256, sliding_window=300, soft_cap=30.0),
    replace(BASE, num_heads=71, num_kv_heads=1, head_dim=64),
    replace(BASE, num_heads=128, num_kv_heads=1),
    replace(BASE, has_alibi=True),
    replace(BASE, has_sinks=True, sliding_window=128),
    replace(BASE, has_alibi=True, has_sinks=True, cache_dtype=FP8),
    replace(BASE, run_tokens=100),
    replace(BASE, run_tokens=70, sliding_window=128, num_heads=16, head_dim=256),
    *(
        replace(BASE, cache_dtype=FP8, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        for heads, kv_heads, dim in ((32, 8, 128), (12, 12, 64), (16, 8, 256))
    ),
    replace(BASE, cache_dtype=FP8, dtype=torch.float16, sliding_window=77, soft_cap=5.0),
]


def label(shape: Shape) -> str:
    return (
        f"{str(shape.dtype)[6:]}-{shape.num_heads}x{shape.num_kv_heads}-d{shape.head_dim}"
        f"-v{shape.value_dim}-b{shape.block_size}-w{shape.sliding_window}-c{shape.soft_cap}"
        + "-fp8" * (shape.cache_dtype is not None)
        + "-alibi" * shape.has_alibi
        + "-sinks" * shape.has_sinks
        + f"-run{shape.run_tokens}" * bool(shape.run_tokens)
    )


# FlashInfer builds two programs for each combination of type, head size, window and cap. That takes
# minutes, so tests that are not marked slow use one combination only.
SLOW = pytest.mark.slow
CASES = [
    *(pytest.param("triton", shape, id=f"triton-{label(shape)}") for shape in GRID),
    *(
        pytest.param("flashinfer", shape, id=f"flashinfer-{label(shape)}")
        for shape in (
            BASE,
            replace(BASE, num_heads=16),
            replace(BASE, num_heads=8),
            replace(BASE, block_size=64),
        )
    ),
    *(
        pytest.param("flashinfer", shape, id=f"flashinfer-{label(shape)}", marks=SLOW)
        for shape in (
            replace(BASE, head_dim=64, dtype=torch.float16),
            replace(BASE, head_dim=256),
            replace(BASE, sliding_window=50),
            replace(BASE, soft_cap=30.0),
        )
    ),
]


@pytest.mark.parametrize(("name", "shape"), CASES)
@torch.inference_mode()
def test_matches_reference(name: str, shape: Shape) -> None:
    backend, planner, engine = engine_of(name, shape)
    for seed, lengths in enumerate([*MIXED_STEPS[:2], DECODE_STEPS[2]]):
        # A table of small blocks does not hold the longest contexts.
        if max(context for _, context in lengths) > MAX_BLOCKS * shape.block_size:
            lengths = [(query, min(context, 600)) for query, context in lengths]
        num_tokens = sum(query for query, _ in lengths)
        step = engine.load(lengths, GraphKey(num_tokens, len(lengths), 0), seed)
        planner.plan(
            GraphKey(num_tokens, len(lengths), 0), engine.buffers.host, engine.buffers.plan
        )
        out, k_cache, v_cache = run(backend, step, shape)
        expected, k_expected, v_expected = reference(step, shape)
        assert_rows_equal(out, expected, step, shape.dtype)
        for cache, cache_expected in ((k_cache, k_expected), (v_cache, v_expected)):
            assert torch.equal(known(cache), known(cache_expected))
    planner.close()


class CapturedAttention:
    """A CUDA graph of one attention call over static inputs."""

    def __init__(
        self, backend: AttentionBackend, planner: AttentionPlanner, engine: Engine, key: GraphKey
    ) -> None:
        shape = engine.shape
        self.planner, self.engine, self.key = planner, engine, key

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=shape.dtype, device=CUDA)

        self.q = zeros(key.num_tokens, shape.num_heads, shape.head_dim)
        self.k = zeros(key.num_tokens, shape.num_kv_heads, shape.head_dim)
        self.v = self.k.clone()
        sizes = (NUM_CACHE_BLOCKS, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.k_cache = zeros(*sizes).to(shape.cache_dtype or shape.dtype)
        self.v_cache = self.k_cache.clone()
        engine.buffers.host.query_start_loc[0] = 0
        engine.buffers.pad(0, 0, 0, key)
        engine.buffers.upload(key.num_seqs)
        planner.plan(key, engine.buffers.host, engine.buffers.plan)
        batch = engine.buffers.batch(key.num_tokens, key.num_seqs, 1)
        metadata = StepInputs({}, batch).attention(0)

        # The graph reads these tensors in every replay, so they live as long as it does.
        self.per_head = per_head = shape.per_head()

        def call() -> Tensor:
            return backend.run(
                self.q, self.k, self.v, self.k_cache, self.v_cache, metadata,
                shape.head_dim**-0.5, shape.sliding_window, shape.soft_cap, *per_head,
            )  # fmt: skip

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = call()

    def replay(self, lengths: list[tuple[int, int]], seed: int) -> Step:
        """Run the step. Its output is in `out`; its blocks are the first of the static caches."""
        self.engine.buffers.wait_for_upload()
        step = self.engine.load(lengths, self.key, seed)
        pairs = ((self.q, step.q), (self.k, step.k), (self.v, step.v))
        for static, tensor in (*pairs, (self.k_cache, step.k_cache), (self.v_cache, step.v_cache)):
            static[: len(tensor)].copy_(tensor)
        self.planner.plan(self.key, self.engine.buffers.host, self.engine.buffers.plan)
        self.graph.replay()
        return step


WINDOW_AND_CAP = replace(BASE, sliding_window=100, soft_cap=20.0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("triton", BASE),
        ("triton", replace(BASE, num_heads=16)),
        ("triton", WINDOW_AND_CAP),
        ("triton", replace(BASE, has_alibi=True, has_sinks=True)),
        ("triton", replace(BASE, cache_dtype=FP8)),
        ("flashinfer", BASE),
        ("flashinfer", replace(BASE, num_heads=16)),
        pytest.param("flashinfer", WINDOW_AND_CAP, marks=SLOW),
    ],
)
@torch.inference_mode()
def test_captured_graphs_serve_changed_lengths(name: str, shape: Shape) -> None:
    """Both buckets run over the same static buffers; the larger one is captured first."""
    backend, planner, engine = engine_of(name, shape, (MIXED, DECODE))
    graphs = {key: CapturedAttention(backend, planner, engine, key) for key in (MIXED, DECODE)}
    steps = [*((MIXED, s) for s in MIXED_STEPS), *((DECODE, s) for s in DECODE_STEPS)]
    for seed, (key, lengths) in enumerate([*steps, *reversed(steps)]):
        captured = graphs[key]
        step = captured.replay(lengths, seed)
        expected, k_expected, v_expected = reference(step, shape)
        assert_rows_equal(captured.out, expected, step, shape.dtype)
        count = len(k_expected)
        for cache, cache_expected in (
            (captured.k_cache[:count], k_expected),
            (captured.v_cache[:count], v_expected),
        ):
            assert torch.equal(known(cache), known(cache_expected))
    planner.close()


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@torch.inference_mode()
def test_no_memory_is_kept(name: str) -> None:
    backend, planner, engine = engine_of(name, BASE, (DECODE,))
    step = engine.load(DECODE_STEPS[0], DECODE)
    planner.plan(DECODE, engine.buffers.host, engine.buffers.plan)

    def call() -> None:
        planner.plan(DECODE, engine.buffers.host, engine.buffers.plan)
        backend.run(*step[:6], 0.1, 0, 0.0, None, None)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    planner.close()
    assert torch.cuda.memory_allocated() <= before


@torch.inference_mode()
def test_triton_gives_the_same_bits_alone_and_in_a_batch() -> None:
    backend, planner, engine = engine_of("triton", BASE)
    lengths = MIXED_STEPS[0][:4]  # up to four sequences have the same partitions of their keys
    key = GraphKey(sum(query for query, _ in lengths), len(lengths), 0)
    step = engine.load(lengths, key)
    planner.plan(key, engine.buffers.host, engine.buffers.plan)
    together, _, _ = run(backend, step, BASE)
    starts = step.metadata.query_start_loc.tolist()
    for row, pair in enumerate(lengths):
        rows = slice(starts[row], starts[row + 1])
        metadata = step.metadata._replace(
            query_start_loc=torch.tensor([0, pair[0]], dtype=torch.int32, device=CUDA),
            seq_lens=step.metadata.seq_lens[row : row + 1],
            block_table=step.metadata.block_table[row : row + 1],
            slot_mapping=step.metadata.slot_mapping[rows],
        )
        alone = step._replace(q=step.q[rows], k=step.k[rows], v=step.v[rows], metadata=metadata)
        assert torch.equal(run(backend, alone, BASE)[0], together[rows]), pair


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles from now on."""
    triton = pytest.importorskip("triton")
    names: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(*arguments: object, **details: object) -> None:
        names.append(str(details.get("repr")))

    triton.knobs.runtime.jit_post_compile_hook = hook
    yield names
    triton.knobs.runtime.jit_post_compile_hook = before


@torch.inference_mode()
def test_triton_compiles_nothing_after_the_warm_up_steps(compiled: list[str]) -> None:
    shape = replace(BASE, num_heads=24)  # in no other test, so that the first step compiles
    backend, planner, engine = engine_of("triton", shape)

    def step(lengths: list[tuple[int, int]], *, uniform: bool) -> None:
        key = GraphKey(sum(query for query, _ in lengths), len(lengths), int(uniform))
        loaded = engine.load(lengths, key)
        planner.plan(key, engine.buffers.host, engine.buffers.plan)
        run(backend, loaded, shape)

    step([(64, 64)], uniform=False)
    for num_seqs in backend.warm_up_seqs:
        if num_seqs <= 16:
            step([(1, 1)] * num_seqs, uniform=False)
    assert compiled != []
    compiled.clear()
    for lengths in (*MIXED_STEPS, *DECODE_STEPS):
        step(lengths, uniform=all(query == 1 for query, _ in lengths))
    assert compiled == []
