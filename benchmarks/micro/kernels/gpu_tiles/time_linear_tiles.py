"""Times tiles of the fused linear kernel on a GPU, beside the tile in use and cuBLAS.

    python -m ostinato.benchmarks.micro.kernels.gpu_tiles.time_linear_tiles \\
        --models llama-8b --output FILE

The matrices are those of a model's layers. A measurement replays a CUDA graph of launches that read
different copies of a matrix, more bytes than the device's cache holds. So a launch reads its matrix
from memory, and the gaps between launches are those of a captured decode step. For each matrix and
number of rows, the table shows microseconds of the fastest tile, of the tile that `choose_tile`
returns and of `F.linear`, and the rate at which the matrix is read.

`--compile-only` compiles the tiles into Triton's cache and measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
from ostinato.ops.fused.early_start import starts_early
from ostinato.ops.fused.linear_tiles import (
    LinearTile,
    choose_tile,
    device_limits,
    linear_constants,
)
from ostinato.ops.fused.triton_fused_linear import fused_linear_kernel

__all__ = ("main",)

_SHARED_MEMORY = 227 * 1024
_ROTATED_BYTES = 400 << 20  # several times the cache of any GPU at hand
_LAUNCHES = 24
_SQUARES = 128  # sums of squares of a row
# Columns, elements of K, and warps of a tile, by its rows.
_FEW = [(16, 256, 4), (16, 512, 4), (32, 128, 4), (32, 256, 4), (32, 256, 8), (64, 128, 4),
        (64, 256, 4), (64, 256, 8)]  # fmt: skip
_FEW_GATED = [(16, 128, 4), (16, 256, 4), (32, 64, 4), (32, 128, 4), (32, 256, 4), (64, 64, 4),
              (64, 128, 4), (64, 128, 8)]  # fmt: skip
_MORE = [(32, 64, 4), (32, 128, 4), (32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8)]
_MORE_GATED = [(32, 64, 4), (32, 128, 4), (32, 128, 8), (64, 64, 4), (64, 64, 8), (64, 128, 8),
               (128, 64, 8)]  # fmt: skip
_ROWS = {16: (1, 8), 64: (32, 64)}
# Tiles of W that a program prefetches while the previous kernel ends; 0 = the program starts later,
# when that kernel has ended.
_DEPTHS = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer and what is fused with its product."""

    name: str
    out_features: int
    in_features: int
    has_norm: bool  # the products are divided by the root mean square of a row
    is_gated: bool
    is_scaled: bool = False  # the result is scaled for the next norm

    @property
    def rows_of_weight(self) -> int:
        return self.out_features * (2 if self.is_gated else 1)

    @property
    def activation(self) -> str:
        return "silu" if self.is_gated else ""


def main(arguments: list[str]) -> int:
    parser = make_parser("time_linear_tiles")
    parser.add_argument("--in-use", action="store_true", help="only the tiles in use")
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU is visible; run this program on a machine with a GPU", file=sys.stderr)
        return 2
    matrices = [matrix for name in options.models.split(",") for matrix in matrices_of(name)]
    jobs = [
        (matrix, tile, prefetched)
        for matrix in matrices
        for tile in (_tiles_in_use(matrix) if options.in_use else candidates(matrix))
        for prefetched in (_DEPTHS if tile in _tiles_in_use(matrix) else _DEPTHS[:2])
    ]
    usable = usable_jobs(jobs, _compiles, options.processes)
    if options.compile_only:
        return 0
    machine = measure_machine(torch.device("cuda"), torch.bfloat16, tiny=False)
    torch.cuda.empty_cache()
    rows = [
        row
        for matrix in matrices
        for row in _measure(matrix, [tuple(rest) for one, *rest in usable if one == matrix])
    ]
    for row in rows:
        best = row["tiles"][0]
        print(
            f"{row['matrix']:<22} {row['rows']:>4} rows  best {best['us']:7.1f} us "
            f"{_text(best)}  in use {row['in_use_us']:7.1f}  cuBLAS {row['cublas_us']:7.1f}  "
            f"{row['bytes'] / best['us'] / 1e6:.2f} TB/s"
        )
    finish(machine, rows, options.output)
    return 0


def matrices_of(model: str) -> list[Matrix]:
    """The four matrices of a dense layer of this preset."""
    config: Any = load_config([f"model={model}"]).model.config
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or size // heads
    return [
        Matrix(f"{model} qkv", (heads + 2 * kv_heads) * head_dim, size, True, False),
        Matrix(f"{model} output", size, heads * head_dim, False, False, True),
        Matrix(f"{model} gate and up", inner, size, True, True),
        Matrix(f"{model} down", size, inner, False, False),
    ]


def candidates(matrix: Matrix) -> Iterator[LinearTile]:
    """Tiles that may be fast; those in use are among them."""
    gated = matrix.is_gated
    tables = {16: _FEW_GATED if gated else _FEW, 64: _MORE_GATED if gated else _MORE}
    seen: set[LinearTile] = set()
    for block_m, table in tables.items():
        tiles = [_in_use(matrix, block_m)]
        for block_n, block_k, warps in table:
            if block_k > matrix.in_features:
                continue
            stage = (block_m + block_n * (2 if gated else 1)) * block_k * 2
            # Two programs on a multiprocessor, or one with a deeper pipeline.
            for shared in (_SHARED_MEMORY // 2, _SHARED_MEMORY):
                stages = min(6, shared // stage)
                if stages >= 2:
                    tiles.append(LinearTile(block_m, block_n, block_k, warps, stages))
        for tile in tiles:
            if tile not in seen:
                seen.add(tile)
                yield tile


def _in_use(matrix: Matrix, block_m: int) -> LinearTile:
    sizes = (matrix.out_features, matrix.in_features)
    limits = device_limits(torch.device("cuda", torch.cuda.current_device()))
    return choose_tile(block_m, *sizes, 2, is_gated=matrix.is_gated, **limits)


def _tiles_in_use(matrix: Matrix) -> list[LinearTile]:
    return [_in_use(matrix, block_m) for block_m in _ROWS]


def _constants(matrix: Matrix, tile: LinearTile, prefetched: int) -> dict[str, Any]:
    sizes = (matrix.out_features, matrix.in_features)
    squares = _SQUARES if matrix.has_norm else 1
    constants = linear_constants(
        tile, *sizes, matrix.activation, num_squares=squares, early=prefetched > 0
    )
    if prefetched:
        constants["PREFETCHED"] = tile.block_k * prefetched
    return constants


def _compiles(job: tuple[Matrix, LinearTile, int]) -> bool:
    """Compile the kernel into Triton's cache; False = the tile does not fit the device."""
    matrix, tile, prefetched = job
    dtype = torch.bfloat16
    try:
        fused_linear_kernel.warmup(
            dtype,
            dtype if matrix.is_scaled else None,
            torch.float32 if matrix.is_scaled else None,
            dtype,
            dtype,
            None,
            torch.float32 if matrix.has_norm else None,
            None if matrix.has_norm else dtype,
            dtype if matrix.is_scaled else None,
            None,
            1,
            matrix.in_features,
            matrix.out_features,
            1e-5,
            grid=(1, 1),
            **_constants(matrix, tile, prefetched),
        )
    except Exception as error:  # Triton documents no type for a tile that is too large
        print(f"{matrix.name} {tile}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return False
    return True


def _measure(matrix: Matrix, tiles: list[Any]) -> Iterator[dict[str, Any]]:
    shape = (matrix.rows_of_weight, matrix.in_features)
    copies = max(2, _ROTATED_BYTES // (shape[0] * shape[1] * 2))
    weights = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[1] ** -0.5
        for _ in range(min(copies, _LAUNCHES))
    ]
    for block_m, counts in _ROWS.items():
        for count in counts:
            x = torch.randn(count, matrix.in_features, device="cuda", dtype=torch.bfloat16)
            residual = torch.randn(count, matrix.out_features, device="cuda", dtype=torch.bfloat16)
            found = []
            for tile, prefetched in tiles:
                if tile.block_m != block_m:
                    continue
                out = torch.empty_like(residual)
                constants = _constants(matrix, tile, prefetched)
                launch = _launcher(matrix, constants, out, x, residual)
                try:
                    us = graph_us(
                        lambda index, launch=launch: launch(weights[index % len(weights)]),
                        _LAUNCHES,
                    )
                    found.append({**asdict(tile), "prefetched": prefetched, "us": us})
                except Exception as error:  # as in `_compiles`
                    print(f"{matrix.name} {tile}: {error}"[:200], file=sys.stderr)
            cublas = graph_us(
                lambda index, x=x: F.linear(x, weights[index % len(weights)]), _LAUNCHES
            )
            device = weights[0].device
            depth = 1 if starts_early(device) else 0
            in_use = {**asdict(_in_use(matrix, block_m)), "prefetched": depth}
            found.sort(key=lambda row: row["us"])
            yield {
                "matrix": matrix.name,
                "rows": count,
                "bytes": weights[0].nbytes,
                "cublas_us": cublas,
                "in_use_us": next((t["us"] for t in found if t == {**in_use, "us": t["us"]}), -1.0),
                "tiles": found,
            }


def _launcher(
    matrix: Matrix,
    constants: dict[str, Any],
    out: Tensor,
    x: Tensor,
    residual: Tensor,
) -> Callable[[Tensor], object]:
    blocks = constants["BLOCK_M"], constants["BLOCK_N"]
    grid = (-(-len(x) // blocks[0]), -(-matrix.out_features // blocks[1]))
    sums = torch.ones(len(x), max(_SQUARES, grid[1]), device="cuda")
    norm = torch.ones(matrix.out_features, device="cuda", dtype=torch.bfloat16)

    def launch(weight: Tensor) -> object:
        return fused_linear_kernel[grid](
            out,
            torch.empty_like(out) if matrix.is_scaled else None,
            sums if matrix.is_scaled else None,
            x,
            weight,
            None,
            sums if matrix.has_norm else None,
            None if matrix.has_norm else residual,
            norm if matrix.is_scaled else None,
            len(x),
            matrix.in_features,
            matrix.out_features,
            1e-5,
            **constants,
        )

    return launch


def _text(tile: dict[str, Any]) -> str:
    return (
        f"{tile['block_m']}x{tile['block_n']}x{tile['block_k']} "
        f"w{tile['num_warps']} s{tile['num_stages']} prefetched {tile['prefetched']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
