"""Times tiles and partitions of the Triton attention kernel on a GPU, beside those in use.

    python -m ostinato.benchmarks.micro.kernels.gpu_tiles.time_attention_tiles --output FILE

Decode rows: sequences of 2,090 tokens with one query row each. A measurement replays a CUDA graph
of launches that read different caches, more bytes than the device's cache holds. The table shows
microseconds of the fastest variant and of the one in use, and the rate at which keys and values are
read.

Prefill rows: 8,192 query rows in sequences of equal length, without a cached prefix. The table
shows the same times, those of `scaled_dot_product_attention` on dense tensors, and TFLOP/s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.benchmarks.machine.gpu_rates import measure_machine
from ostinato.benchmarks.micro.kernels.gpu_tiles.tile_runs import (
    finish,
    graph_us,
    make_parser,
    usable_jobs,
)
from ostinato.conf.compose import load_config
from ostinato.ops.backends.triton_kernels import attention_kernel
from ostinato.ops.backends.triton_tiles import KernelShape, attention_constants
from ostinato.ops.fused.early_start import starts_early

__all__ = ("main",)

_CONTEXT = 2090
_PREFILL_TOKENS = 8192
_BLOCK_SIZE = 16
_ROTATED_BYTES = 400 << 20  # several times the cache of any GPU at hand
_LAUNCHES = 16
# Keys of a tile, warps, stages, and programs that run on a multiprocessor at the same time.
_DECODE_TILES = [
    (32, 4, 4, 2),
    (32, 2, 3, 4),
    (32, 4, 4, 3),
    (64, 4, 2, 2),
    (64, 4, 3, 2),
    (64, 4, 2, 3),
    (64, 4, 5, 1),
    (64, 8, 3, 1),
    (64, 8, 5, 1),
    (128, 8, 3, 1),
]
# Most partitions and least keys of a partition, by the number of sequences.
_PARTITIONS = {
    1: [(16, 128), (32, 64)],
    8: [(16, 256), (8, 512)],
    64: [(8, 512), (4, 1024), (4, 2048)],
    256: [(4, 1024), (4, 2048)],
}
# Query rows, keys, warps and stages of a tile.
_PREFILL_TILES = [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2),
                  (128, 32, 4, 4), (128, 32, 4, 3)]  # fmt: skip
_PREFILL_SEQS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a model."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def shape(self, num_seqs: int) -> KernelShape:
        return KernelShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=_BLOCK_SIZE,
            itemsize=2,
            max_context=4 * _PREFILL_TOKENS,
            num_seqs=num_seqs,
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """A launch of the kernel: changes to the constants in use, and its programs."""

    num_seqs: int
    is_long: bool
    changes: tuple[tuple[str, int], ...]
    # Decode: programs on a multiprocessor, 0 = the number in use. Prefill: always 0, because a
    # launch has one program for each query tile and KV head.
    programs: int

    def constants(self, heads: Heads) -> dict[str, Any]:
        shape = heads.shape(self.num_seqs)
        early = starts_early(torch.device("cuda"))
        constants: dict[str, Any] = attention_constants(
            shape, 0, 0.0, is_long=self.is_long, early=early
        )
        constants.update(self.changes)
        if self.changes and "maxnreg" in constants and self.programs:
            threads = constants["num_warps"] * 32
            constants["maxnreg"] = min(255, 65536 // (threads * self.programs) // 8 * 8)
        return constants


def main(arguments: list[str]) -> int:
    parser = make_parser("time_attention_tiles")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU is visible; run this program on a machine with a GPU", file=sys.stderr)
        return 2
    models = [_heads_of(name) for name in options.models.split(",")]
    jobs = [(heads, variant) for heads in models for variant in _variants()]
    usable = usable_jobs(jobs, _compiles, options.processes)
    machine = measure_machine(torch.device("cuda"), torch.bfloat16, tiny=False)
    torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    for heads in models:
        own = [variant for one, variant in usable if one == heads]
        for num_seqs in _PARTITIONS:
            variants = [v for v in own if not v.is_long and v.num_seqs == num_seqs]
            rows.append(_measure_decode(heads, num_seqs, variants))
            _print(rows[-1])
        variants = [variant for variant in own if variant.is_long]
        for row in _measure_prefill(heads, variants):
            rows.append(row)
            _print(row)
    finish(machine, rows, options.output)
    return 0


def _heads_of(model: str) -> Heads:
    config: Any = load_config([f"model={model}"]).model.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return Heads(model, heads, kv_heads, head_dim)


def _variants() -> Iterator[Variant]:
    """Launches that may be fast; those in use have no changes."""
    for num_seqs, partitions in _PARTITIONS.items():
        yield Variant(num_seqs, False, (), 0)
        for keys, warps, stages, programs in _DECODE_TILES:
            for most, least in partitions:
                changes = {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
                changes |= {"MAX_PARTS": most, "MIN_PART_TILES": max(1, least // keys)}
                changes |= {"JOINED": max(1, 32 * 32 * warps // (16 * 128)), "maxnreg": 255}
                yield Variant(num_seqs, False, tuple(changes.items()), programs)
    yield Variant(1, True, (), 0)
    for rows, keys, warps, stages in _PREFILL_TILES:
        changes = {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
        yield Variant(1, True, tuple(changes.items()), 0)


def _compiles(job: tuple[Heads, Variant]) -> bool:
    """Compile the kernel into Triton's cache; False = the tile does not fit the device."""
    heads, variant = job
    dtype, number, index = torch.bfloat16, torch.float32, torch.int32
    size = heads.num_heads * heads.head_dim
    types = (dtype, number, number, index, index, dtype, dtype, dtype, index, index, index)
    more = (None, None, 1, _width(variant.is_long), size, heads.head_dim, heads.head_dim**-0.5)
    try:
        attention_kernel.warmup(*types, *more, grid=(1,), **variant.constants(heads))
    except Exception as error:  # Triton documents no type for a tile that is too large
        print(f"{variant}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return False
    return True


def _width(is_long: bool) -> int:
    """Blocks in a row of the block table."""
    tokens = _PREFILL_TOKENS if is_long else _CONTEXT
    return -(-tokens // _BLOCK_SIZE // 16) * 16 + 16


def _measure_decode(heads: Heads, num_seqs: int, variants: list[Variant]) -> dict[str, Any]:
    cache_bytes = 4 * num_seqs * _CONTEXT * heads.num_kv_heads * heads.head_dim
    copies = min(_LAUNCHES, max(2, -(-_ROTATED_BYTES // cache_bytes)))
    batch = _Batch.make(heads, num_seqs, 1, _CONTEXT, copies)
    found = list(_timed(heads, batch, variants))
    in_use = found[0]["us"]
    found.sort(key=lambda row: row["us"])
    return {
        "model": heads.model,
        "kind": "decode",
        "seqs": num_seqs,
        "bytes": cache_bytes,
        "in_use_us": in_use,
        "variants": found,
    }


def _measure_prefill(heads: Heads, variants: list[Variant]) -> Iterator[dict[str, Any]]:
    for num_seqs in _PREFILL_SEQS:
        length = _PREFILL_TOKENS // num_seqs
        batch = _Batch.make(heads, num_seqs, length, length, 1)
        found = list(_timed(heads, batch, variants))
        in_use = found[0]["us"]
        found.sort(key=lambda row: row["us"])
        sizes = (num_seqs, length, heads.head_dim)
        q = torch.randn(sizes[0], heads.num_heads, *sizes[1:], device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(sizes[0], heads.num_kv_heads, *sizes[1:], device="cuda", dtype=q.dtype)
            for _ in range(2)
        )
        dense = graph_us(
            lambda _, q=q, k=k, v=v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            _LAUNCHES,
        )
        yield {
            "model": heads.model,
            "kind": "prefill",
            "seqs": num_seqs,
            "flop": 2 * num_seqs * length * (length + 1) * heads.num_heads * heads.head_dim,
            "dense_us": dense,
            "in_use_us": in_use,
            "variants": found,
        }


def _timed(heads: Heads, batch: _Batch, variants: list[Variant]) -> Iterator[dict[str, Any]]:
    for variant in variants:
        constants = variant.constants(heads)
        try:
            us = graph_us(batch.launcher(heads, variant, constants), _LAUNCHES)
        except Exception as error:  # as in `_compiles`
            print(f"{variant}: {error}"[:200], file=sys.stderr)
            us = float("inf")
        names = ("BLOCK_M", "BLOCK_N", "MAX_PARTS", "MIN_PART_TILES", "num_warps", "num_stages")
        yield {name: constants[name] for name in names} | {
            "programs": variant.programs,
            "changed": bool(variant.changes),
            "us": us,
        }


@dataclass(frozen=True, slots=True)
class _Batch:
    """The tensors of a step.

    `caches` has one pair for prefill. For decode it has several, which launches read in turns.
    """

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @classmethod
    def make(cls, heads: Heads, num_seqs: int, rows: int, context: int, copies: int) -> _Batch:
        width = _width(rows > 1)
        used = -(-context // _BLOCK_SIZE)
        ids = torch.randperm(num_seqs * used, dtype=torch.int32).view(num_seqs, used)
        table = torch.zeros(num_seqs, width, dtype=torch.int32)
        table[:, :used] = ids
        shape = (num_seqs * used, heads.num_kv_heads, _BLOCK_SIZE, heads.head_dim)
        query = (num_seqs * rows, heads.num_heads, heads.head_dim)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        numbers: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        return cls(
            torch.randn(query, **numbers),
            [(torch.randn(shape, **numbers), torch.randn(shape, **numbers)) for _ in range(copies)],
            torch.arange(0, num_seqs * rows + 1, rows, **integers),
            torch.full((num_seqs,), context, **integers),
            table.cuda(),
        )

    def launcher(
        self, heads: Heads, variant: Variant, constants: dict[str, Any]
    ) -> Callable[[int], object]:
        num_tokens, num_seqs = len(self.q), len(self.seq_lens)
        parts, size = constants["MAX_PARTS"], heads.num_heads * heads.head_dim
        out = torch.empty_like(self.q)
        rows = 0 if parts == 1 else num_tokens
        partial_out = out.new_empty(rows, size * parts, dtype=torch.float32)
        partial_lse = out.new_empty(rows, heads.num_heads * parts, dtype=torch.float32)
        counters = num_tokens * heads.num_kv_heads
        shape = (_LAUNCHES, -(-(counters + 1) // 16) * 16)
        arrivals = torch.zeros(shape, dtype=torch.int32, device="cuda")
        if not variant.is_long:
            device = torch.cuda.get_device_properties(self.q.device)
            items = num_seqs * heads.num_kv_heads * parts
            in_use = heads.shape(num_seqs).programs_per_processor
            programs = min(items, device.multi_processor_count * (variant.programs or in_use))
        else:
            block_q = constants["BLOCK_M"] // (heads.num_heads // heads.num_kv_heads)
            programs = (num_tokens // block_q + num_seqs) * heads.num_kv_heads

        def launch(index: int) -> object:
            if index == 0:
                arrivals.zero_()  # all launches of the graph, at once
            k_cache, v_cache = self.caches[index % len(self.caches)]
            return attention_kernel[(programs,)](
                out,
                partial_out,
                partial_lse,
                arrivals[index],
                arrivals[index, counters:],
                self.q,
                k_cache,
                v_cache,
                self.query_start_loc,
                self.seq_lens,
                self.block_table,
                None,
                None,
                num_seqs,
                self.block_table.stride(0),
                size,
                heads.head_dim,
                heads.head_dim**-0.5,
                **constants,
            )

        return launch


def _print(row: dict[str, Any]) -> None:
    best = row["variants"][0]
    if row["kind"] == "decode":
        rate = f"{row['bytes'] / best['us'] / 1e6:.2f} TB/s"
    else:
        rate = f"{row['flop'] / best['us'] / 1e6:.0f} TFLOP/s, dense {row['dense_us']:.1f} us"
    print(
        f"{row['model']:<11} {row['kind']:<8} {row['seqs']:>4}  best {best['us']:8.1f} us "
        f"{best['BLOCK_M']}x{best['BLOCK_N']} w{best['num_warps']} s{best['num_stages']} "
        f"p{best['programs']} parts {best['MAX_PARTS']}x{best['MIN_PART_TILES']}  "
        f"in use {row['in_use_us']:8.1f} us  {rate}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
