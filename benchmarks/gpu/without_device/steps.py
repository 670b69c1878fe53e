"""Counts the launches and bytes of a model's step on a described GPU, and predicts its time.

The prediction is the sum of the times of all launches. The time of a launch is the largest of
three: the time of its bytes at a share of the memory's rate, the time of its operations at a share
of the matrix units' rate, and the shortest time that a kernel takes. Rates are the vendor's; the
shares and the shortest time are assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch

from ostinato.benchmarks.gpu.without_device.expert_calls import EXPERT_OPS, expert_calls
from ostinato.benchmarks.gpu.without_device.kernels import OwnLaunch, recorded_launches
from ostinato.benchmarks.gpu.without_device.lowering import By, Launch, Lowered
from ostinato.benchmarks.gpu.without_device.model_programs import ModelPrograms
from ostinato.benchmarks.gpu.without_device.quantized_calls import QUANTIZED_OP, quantized_calls
from ostinato.benchmarks.machine.described_device import DescribedDevice
from ostinato.models.decoder import DecoderBlock
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.step_tensors import StepSizes
from ostinato.ops.attention import AttentionMetadata
from ostinato.ops.backends.triton import BACKEND
from ostinato.ops.backends.triton_tiles import ceil_div

__all__ = (
    "KERNEL_SECONDS",
    "MATRIX_SHARE",
    "MEMORY_SHARE",
    "STEPS",
    "CountedStep",
    "Step",
    "TimedLaunch",
    "count_step",
    "own_attention",
)

MEMORY_SHARE = 0.85  # a kernel that only moves data reaches this share of the nominal rate
MATRIX_SHARE = 0.7  # a large matrix product reaches this share of the nominal rate
KERNEL_SECONDS = 2e-6  # the shortest kernel in a captured graph, with the gap before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's shape."""

    name: str
    seqs: tuple[tuple[int, int, int], ...]  # (number of sequences, new tokens, tokens in context)

    @property
    def sizes(self) -> StepSizes:
        num_seqs = sum(count for count, _, _ in self.seqs)
        return StepSizes(sum(count * new for count, new, _ in self.seqs), num_seqs, num_seqs)

    @property
    def most_query_rows(self) -> int:
        """The result of the backend's planner: 1 if each sequence has one query row, else 0."""
        return int(all(new == 1 for _, new, _ in self.seqs))


STEPS = (
    *(Step(name=f"decode {n}", seqs=((n, 1, 2048),)) for n in (1, 8, 64, 256)),
    *(Step(name=f"prefill {n}", seqs=((1, n, n),)) for n in (512, 8192)),
    Step(name="mixed 64 + 512", seqs=((64, 1, 2048), (1, 512, 512))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLaunch:
    """A launch of a step with its numbers."""

    by: By
    name: str
    num_bytes: int
    num_flop: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """A step in numbers; bytes and launches are those of one layer."""

    step: Step
    is_fused: bool  # computed by the layers for few rows
    layer: tuple[TimedLaunch, ...]
    # weights, cache, and the operands and results of each product and of attention, once each
    ideal_bytes: int
    copies_cache: bool
    waits: tuple[str, ...]
    seconds: float  # duration of the whole step
    outside: int  # launches before and after the layers

    @property
    def num_bytes(self) -> int:
        return sum(launch.num_bytes for launch in self.layer)

    def count(self, by: By) -> int:
        return sum(launch.by is by for launch in self.layer)


def count_step(
    programs: ModelPrograms, step: Step, device: DescribedDevice, *, is_fused: bool = False
) -> CountedStep:
    """Count a step, inside `fake_device`.

    Args:
        programs: the model's programs.
        step: the shape.
        device: the device whose rates are used.
        is_fused: True = the layers for few rows, which the engine uses in steps of up to
            `most_few_tokens` tokens; False = the layers that Inductor lowers.
    """
    attention = _attention_launches(programs, step, device)
    layer, ideal, copies = _count(programs, programs.layer, step, attention, device)
    last, _, _ = _count(programs, programs.last, step, attention, device)
    waits = programs.layer.waits + programs.last.waits
    if is_fused:
        layer, last = (
            _count_fused(programs, step, attention, device, is_last=is_last)
            for is_last in (False, True)
        )
        copies, waits = False, ()
    begin, finish = programs.eager_launches(step.sizes)
    around = [_timed(one.by, one.name, *_numbers(one, {}), device) for one in (*begin, *finish)]
    num_layers = programs.config.num_layers
    layer_s, last_s, around_s = (
        sum(launch.seconds for launch in launches) for launches in (layer, last, around)
    )
    return CountedStep(
        step=step,
        is_fused=is_fused,
        layer=tuple(layer),
        ideal_bytes=ideal,
        copies_cache=copies,
        waits=waits,
        seconds=(num_layers - 1) * layer_s + last_s + around_s,
        outside=len(around),
    )


def _count_fused(
    programs: ModelPrograms,
    step: Step,
    attention: list[TimedLaunch],
    device: DescribedDevice,
    *,
    is_last: bool,
) -> list[TimedLaunch]:
    """The launches of a layer for few rows."""
    launches: list[TimedLaunch] = []
    for one in programs.fused_launches(step.sizes, device.arch, is_last=is_last):
        launch = one.launch
        if launch.by is By.own and one.kernel is None:
            launches += attention
        else:
            launches.append(_timed(launch.by, launch.name, *_numbers(launch, {}), device))
    return launches


def _count(
    programs: ModelPrograms,
    lowered: Lowered,
    step: Step,
    attention: list[TimedLaunch],
    device: DescribedDevice,
) -> tuple[list[TimedLaunch], int, bool]:
    """(launches, ideal bytes, whether a cache is copied) of a layer."""
    values = _values(lowered, step.sizes)
    launches: list[TimedLaunch] = []
    ideal, copies = _attention_ideal(programs, step), False
    num_rows = step.sizes.num_rows if lowered is programs.last else step.sizes.num_tokens
    calls = iter(expert_calls(programs, num_rows, device.arch))
    products = iter(quantized_calls(programs, step.sizes.num_tokens, num_rows, device.arch))
    for launch in lowered.launches:
        if launch.by is By.own and launch.name == QUANTIZED_OP:
            product = next(products)
            ideal += product.ideal_bytes
            launches += [
                _timed(one.by, one.name, *_numbers(one, {}), device) for one in product.launches
            ]
            continue
        if launch.by is By.own and launch.name in EXPERT_OPS:
            call = next(calls)
            assert call.op == launch.name, f"{call.op} is called in the place of {launch.name}"
            ideal += call.ideal_bytes
            launches += [
                _timed(one.by, one.name, *_numbers(one, {}), device) for one in call.launches
            ]
            continue
        if launch.by is By.own:
            launches += attention
            continue
        num_bytes, num_flop = _numbers(launch, values)
        written = num_bytes - int(launch.input_bytes.subs(list(values.items())))
        copies = copies or written >= programs.cache_bytes
        ideal += num_bytes if launch.by is By.cublas else 0
        launches.append(_timed(launch.by, launch.name, num_bytes, num_flop, device))
    return launches, ideal, copies


def _numbers(launch: Launch, values: dict[sympy.Symbol, int]) -> tuple[int, int]:
    numbers = list(values.items())
    return int(launch.num_bytes.subs(numbers)), int(launch.num_flop.subs(numbers))


def _values(lowered: Lowered, sizes: StepSizes) -> dict[sympy.Symbol, int]:
    """Symbolic size -> its value in a step. The value in the example tells which size it is."""
    by_hint = {
        16: sizes.num_tokens,
        2: sizes.num_seqs,
        3: sizes.num_seqs + 1,
        20: sizes.num_rows,  # `T + S + 2` in the example
    }
    return {symbol: by_hint[hint] for symbol, hint in lowered.hints.items()}


def _timed(
    by: By, name: str, num_bytes: int, num_flop: int, device: DescribedDevice
) -> TimedLaunch:
    seconds = max(
        num_bytes / (MEMORY_SHARE * device.memory_bytes_s),
        num_flop / (MATRIX_SHARE * device.bf16_flop_s),
        KERNEL_SECONDS,
    )
    return TimedLaunch(by=by, name=name, num_bytes=num_bytes, num_flop=num_flop, seconds=seconds)


def own_attention(programs: ModelPrograms, step: Step, arch: int) -> list[OwnLaunch]:
    """The attention kernels that the triton backend launches for a step, compiled."""
    config, sizes = programs.config, step.sizes
    block = programs.model.layers[0]
    assert isinstance(block, DecoderBlock), f"{type(block).__name__} has no attention of ours"
    attention = block.self_attn
    assert isinstance(attention, Attention), f"{type(attention).__name__} has another kernel"
    q_norm, k_norm = attention.q_norm, attention.k_norm
    with programs.mode, recorded_launches(arch) as launches:
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        qkv = torch.empty(sizes.num_tokens, width, dtype=programs.dtype, device="cuda")
        half = 0 if config.rope is None else config.rope.rotary_dim // 2
        angles = torch.empty(sizes.num_tokens, half, dtype=torch.float32, device="cuda")
        seqs = torch.empty(sizes.num_seqs + 1, dtype=torch.int32, device="cuda")
        k_cache, v_cache = programs.kv_cache[0]
        table = torch.empty(
            sizes.num_seqs,
            ceil_div(programs.max_model_len, k_cache.shape[2]),
            dtype=torch.int32,
            device="cuda",
        )
        slots = torch.empty(sizes.num_tokens, dtype=torch.int64, device="cuda")
        # The plan is a tensor on the host, whose contents a fake tensor does not have.
        plan = [step.most_query_rows]
        metadata = AttentionMetadata(seqs, seqs[:-1], table, slots, plan)  # type: ignore[arg-type]
        BACKEND.run_projected(
            qkv,
            angles if half else None,
            angles if half else None,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            config.norm_eps,
            config.num_heads,
            k_cache,
            v_cache,
            metadata,
            1.0,
            0,
            0.0,
            None,
            None,
        )
    return launches


def _attention_launches(
    programs: ModelPrograms, step: Step, device: DescribedDevice
) -> list[TimedLaunch]:
    config = programs.config
    row = config.num_heads * config.head_dim  # elements of a token's queries, and of its result
    kv_row = 2 * config.num_kv_heads * config.head_dim
    timed = []
    for launch in own_attention(programs, step, device.arch):
        constants, num_bytes, num_flop = launch.constants, 0, 0
        tokens = step.sizes.num_tokens
        if launch.name == "rotary_write_kernel":
            num_bytes = tokens * ((row + kv_row) * 2 * 2 + constants["HALF"] * 2 * 4)
            timed.append(_timed(By.own, "rotate, write K and V", num_bytes, 0, device))
            continue
        for count, new, context in step.seqs:
            if not constants["MIN_QUERY"] <= new <= constants["MAX_QUERY"]:
                continue
            parts = _parts(constants, context)
            # Partitions are written, and read when they are joined.
            written = 8 * parts + 2 if parts > 1 else 2
            num_bytes += count * (new * row * (2 + written) + context * kv_row * 2)
            num_flop += count * _attention_flop(row, new, context)
        name = "attention, short" if constants["MIN_QUERY"] == 1 else "attention, long"
        timed.append(_timed(By.own, name, num_bytes, num_flop, device))
    return timed


def _attention_flop(row: int, new: int, context: int) -> int:
    """Operations of a sequence; each token counts the keys up to itself."""
    return 4 * row * (new * (context - new) + new * (new + 1) // 2)


def _parts(constants: Mapping[str, int], context: int) -> int:
    """KV partitions of a sequence, as ops/backends/triton_work_list.py makes them."""
    if constants["MAX_PARTS"] == 1:
        return 1
    tiles = ceil_div(context, constants["BLOCK_N"])
    parts = min(max(tiles // constants["MIN_PART_TILES"], 1), constants["MAX_PARTS"])
    return ceil_div(tiles, ceil_div(tiles, parts))


def _attention_ideal(programs: ModelPrograms, step: Step) -> int:
    """Bytes of the attention of a layer: queries, new keys and values, cache and result once."""
    config = programs.config
    row, kv_row = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    tokens = step.sizes.num_tokens
    cached = sum(count * context for count, _, context in step.seqs)
    return 2 * (2 * tokens * row + 2 * tokens * kv_row + cached * kv_row)
