"""`run bench ops`: times the kernels of the configured model against the machine's roofline.

    run bench ops model=qwen3-0.6b model.load_format=dummy bench.batch_sizes=[1,8,64]

Calls of a linear or attention kernel use copies of its data in turns, so that they read memory and
not the processor's caches, as the layers of a model do. The copies of small data can fit the
caches, because there are at most 512 copies of a weight and 16 of a KV cache.

A kernel's share of the roofline is the least possible time divided by the median time of its calls.
The least time is the larger of bytes / measured memory bandwidth and operations / measured matrix
rate. The memory bandwidth is that of reads on a CPU, and that of a copy on CUDA.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.machine.machine_rates import machine_of
from ostinato.benchmarks.machine.roofline import Machine
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.conf.root import RunConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.ops.activation import activate
from ostinato.ops.attention import AttentionMetadata, PlannedBackend, load_backend, paged_attention
from ostinato.ops.attention import select_backend as select_attention
from ostinato.ops.linear.packed_linear import pack_linear_weight, packed_linear
from ostinato.ops.norm import rms_norm
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.device import resolve_device, set_threads
from ostinato.runtime.startup.plan.model_source import ModelSource, open_model

__all__ = ("ops",)

_COLD_BYTES = 96 << 20
_MIN_CALLS, _MAX_CALLS = 5, 200
_SECONDS = 0.1  # time of each kernel, multiplied by bench.repeats


class _Case(NamedTuple):
    """One kernel at one size."""

    name: str
    size: str
    calls: list[Callable[[], object]]  # calls on different copies, made in turns
    num_bytes: int  # bytes that one call must move
    num_flop: int  # operations of one call


def ops(config: RunConfig, context: BenchContext) -> Record:
    """Time the linear, norm, activation and attention kernels of a layer, and the output layer.

    Attention is left out if its backend has a planner (Triton, FlashInfer), which needs an engine.

    Raises:
        StartupError: the model cannot be opened, or the kernels cannot be loaded.
    """
    set_threads(config.device)
    device = resolve_device(config.device.name)
    source = open_model(config)
    if device.type == "cpu":
        _load_native()
    before = machine_of(device, source.dtype)
    timed: list[tuple[_Case, list[float]]] = []
    with torch.inference_mode():
        for case in _cases(config, source, device):
            context.show(f"{case.name} {case.size}")
            timed.append(
                (case._replace(calls=[]), _time(case, device, _SECONDS * config.bench.repeats))
            )
    # The machine can have become faster or slower since the first measurement. Kernels are compared
    # with the better rates.
    after = machine_of(device, source.dtype)
    machine = Machine(
        copy_bytes_s=max(before.copy_bytes_s, after.copy_bytes_s),
        matmul_flop_s=max(before.matmul_flop_s, after.matmul_flop_s),
    )
    points = [_point(case, times, machine) for case, times in timed]
    more = {"rates": {"bytes_s": machine.copy_bytes_s, "matmul_flop_s": machine.matmul_flop_s}}
    return Record(
        kind=config.bench.kind.value,
        conditions=conditions_of(config, dtype=str(source.dtype), **more),
        points=points,
        notes=[
            f"measured: memory bandwidth {machine.copy_bytes_s / 1e9:.1f} GB/s, products of "
            f"{source.dtype} matrices {machine.matmul_flop_s / 1e9:.0f} GFLOP/s"
        ],
    )


def _load_native() -> None:
    from ostinato.ops.native import library
    from ostinato.ops.native.build import NativeBuildError

    try:
        library.load("core")
    except NativeBuildError as error:
        raise StartupError(str(error)) from error


def _time(case: _Case, device: torch.device, seconds: float) -> list[float]:
    """Time 5 to 200 calls, for about `seconds`; returns the seconds of each call."""
    for call in case.calls[:3]:
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    count = 0
    while count < _MIN_CALLS or (time.perf_counter() < end and count < _MAX_CALLS):
        call = case.calls[count % len(case.calls)]
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - begin)
        count += 1
    return times


def _point(case: _Case, times: list[float], machine: Machine) -> Point:
    median = statistics.median(times)
    least = machine.least_seconds(case.num_bytes, case.num_flop)
    return Point(
        label=f"{case.name} {case.size}",
        parameters={"kernel": case.name, "size": case.size},
        metrics={
            "median": Metric(median * 1e6, "us", "lower"),
            "best": Metric(min(times) * 1e6, "us", "lower"),
            "bandwidth": Metric(case.num_bytes / median / 1e9, "GB/s", "higher"),
            "rate": Metric(case.num_flop / median / 1e9, "GFLOP/s", "higher"),
            "roofline_share": Metric(least / median, "share", "higher"),
        },
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cases(config: RunConfig, source: ModelSource, device: torch.device) -> Iterator[_Case]:
    model, dtype = source.config, source.dtype
    rows = [*config.bench.batch_sizes, max(config.bench.input_lens)]
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    shapes = {
        "qkv": (qkv, model.hidden_size),
        "attention out": (model.hidden_size, model.num_heads * model.head_dim),
        "mlp in": (2 * model.intermediate_size, model.hidden_size),
        "mlp out": (model.hidden_size, model.intermediate_size),
        "logits": (model.vocab_size, model.hidden_size),
    }
    packs = config.graphs.pack_weights and device.type == "cpu" and dtype is not torch.float16
    for name, (n, k) in shapes.items():
        yield from _linear_cases(name, n, k, rows, dtype, device, packs=packs)
    yield from _elementwise_cases(model, rows, dtype, device)
    backend = select_attention(
        config.graphs.attention.value, source.attention_spec(config.cache.block_size)
    )
    if isinstance(load_backend(backend), PlannedBackend):
        return
    for batch in config.bench.batch_sizes:
        for context in config.bench.input_lens:
            yield _attention_case(config, source, backend, [(1, context)] * batch)
    for length in config.bench.input_lens:
        yield _attention_case(config, source, backend, [(length, length)])


def _linear_cases(
    name: str,
    n: int,
    k: int,
    rows: list[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    packs: bool,
) -> Iterator[_Case]:
    weight = torch.randn(n, k, device=device).to(dtype)
    copies = [weight.clone() for _ in range(max(1, min(512, _COLD_BYTES // weight.nbytes)))]
    if packs:
        copies = [pack_linear_weight(each) for each in copies]
    for count in dict.fromkeys(rows):
        x = torch.randn(count, k, device=device).to(dtype)

        def call(copy: Tensor, x: Tensor = x) -> Tensor:
            if packs:
                return packed_linear(x, copy, None, n)
            return torch.nn.functional.linear(x, copy)

        calls: list[Callable[[], object]] = [lambda c=copy, f=call: f(c) for copy in copies]
        moved = weight.nbytes + x.nbytes + count * n * dtype.itemsize
        yield _Case(f"linear, {name}", f"{count} x {k} x {n}", calls, moved, 2 * count * n * k)


def _elementwise_cases(
    model: ModelConfig, rows: list[int], dtype: torch.dtype, device: torch.device
) -> Iterator[_Case]:
    for count in dict.fromkeys(rows):
        x = torch.randn(count, model.hidden_size, device=device).to(dtype)
        weight = torch.ones(model.hidden_size, device=device, dtype=dtype)
        yield _Case(
            "rms norm",
            f"{count} x {model.hidden_size}",
            [lambda x=x, w=weight: rms_norm(x, w, 1e-6)],
            2 * x.nbytes,
            4 * x.numel(),
        )
        wide = torch.randn(count, 2 * model.intermediate_size, device=device).to(dtype)
        yield _Case(
            "gated silu",
            f"{count} x {model.intermediate_size}",
            [lambda x=wide: activate(x, "silu", gated=True)],
            wide.nbytes * 3 // 2,
            4 * wide.numel(),
        )


def _attention_case(
    config: RunConfig, source: ModelSource, backend: str, lengths: list[tuple[int, int]]
) -> _Case:
    """Attention over sequences, each given as (new tokens, length of the context with these)."""
    model, dtype, device = source.config, source.dtype, source.device
    size = config.cache.block_size
    counts = [-(-context // size) for _, context in lengths]
    num_tokens = sum(new for new, _ in lengths)
    spec = model.kv_cache_spec(size, source.cache_dtype)
    per_copy = spec.bytes_per_block // spec.num_layers * (1 + sum(counts))
    starts, slots, first = [0], [], 1
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, ((new, context), count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.arange(first, first + count)
        slots += [first * size + position for position in range(context - new, context)]
        starts.append(starts[-1] + new)
        first += count
    lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor(slots, device=device),
        block_table=table.to(device),
        seq_lens=lens.to(device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        plan=torch.zeros(1, dtype=torch.int64),
    )
    value_dim = model.value_dim or model.head_dim
    heads = (
        (model.num_heads, model.head_dim),
        (model.num_kv_heads, model.head_dim),
        (model.num_kv_heads, value_dim),
    )
    q, k, v = (torch.randn(num_tokens, *head, device=device).to(dtype) for head in heads)
    shapes = [(first, model.num_kv_heads, size, place) for place in spec.place_sizes]
    caches = [
        tuple(_made_up(shape, source.cache_dtype, device) for shape in shapes)
        for _ in range(max(1, min(16, _COLD_BYTES // per_copy)))
    ]
    scale = model.head_dim**-0.5
    calls: list[Callable[[], object]] = [
        lambda kc=kc, vc=vc: paged_attention(
            q, k, v, kc, vc, metadata, scale=scale, backend=backend
        )
        for kc, vc in caches
    ]
    attended = sum((2 * context - new + 1) * new // 2 for new, context in lengths)
    kv_bytes = model.num_kv_heads * sum(spec.place_sizes) * source.cache_dtype.itemsize
    moved = sum(context for _, context in lengths) * kv_bytes + 2 * q.nbytes
    new, context = lengths[0]
    kind = "prefill" if new > 1 else "decode"
    return _Case(
        f"attention, {kind}",
        f"{len(lengths)} x {context}",
        calls,
        moved,
        2 * attended * model.num_heads * (model.head_dim + value_dim),
    )


def _made_up(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A cache filled with numbers.

    In an int8 cache, four bytes at the end of each row are a float32 scale. Any four bytes are the
    float32 0.01: with tiny scales, products would be subnormal, which slows the processor down.
    """
    if dtype is torch.int8:
        return torch.full((math.prod(shape) // 4,), 0.01, device=device).view(dtype).view(shape)
    return torch.randn(shape, device=device).to(dtype)
