"""Tiles and constants of the fused linear kernel, computed from sizes.

The module needs no device, so the kernels of any model can be listed and compiled anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ostinato.ops.fused.fused_linear import TILE_ROWS

__all__ = (
    "LinearTile",
    "choose_tile",
    "device_limits",
    "linear_constants",
)

_FEW, _MORE = TILE_ROWS
_SHARED_MEMORY = 227 * 1024  # bytes that a program may use on compute capability 9.0
_MULTIPROCESSORS = 132  # of an H200


@dataclass(frozen=True, slots=True)
class LinearTile:
    """BLOCK_M rows of x and BLOCK_N rows of W, multiplied BLOCK_K elements at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tile(
    num_rows: int,
    out_features: int,
    in_features: int,
    itemsize: int,
    *,
    is_gated: bool,
    shared_memory: int = _SHARED_MEMORY,
    multiprocessors: int = _MULTIPROCESSORS,
) -> LinearTile:
    """The tile of a launch.

    Its stages take most of the shared memory, so that one program runs on a multiprocessor. If two
    ran there, the programs of a kernel that starts early would gather on a few multiprocessors. On
    an H200, the product of one row with 4096 x 14336 took 50 us in that way, and 32 us with one
    program.

    Args:
        num_rows: T; only whether it is above 16 matters.
        out_features: N, columns of the result.
        in_features: K.
        itemsize: bytes of an element of x and W.
        is_gated: whether a column of the result needs two columns of products.
        shared_memory: bytes that one program may use.
        multiprocessors: of the device.
    """
    block_m = _FEW if num_rows <= _FEW else _MORE
    # With more programs than multiprocessors, some would wait for the others to end.
    is_wide = out_features > 32 * multiprocessors and not (is_gated and block_m == _FEW)
    block_n = 64 if is_wide else 32
    columns = block_n * (2 if is_gated else 1)
    block_k = 256 if block_m == _FEW or columns == 32 else 128
    block_k = min(block_k * 2 // itemsize, max(16, triton.next_power_of_2(in_features)))
    while block_k > 16 and 3 * (block_m + columns) * block_k * itemsize > shared_memory:
        block_k //= 2
    stages = shared_memory // ((block_m + columns) * block_k * itemsize)
    num_warps = 8 if block_m == _MORE and is_wide else 4
    return LinearTile(block_m, block_n, block_k, num_warps, max(2, min(6, stages)))


def linear_constants(
    tile: LinearTile,
    out_features: int,
    in_features: int,
    activation: str,
    *,
    num_squares: int = 1,
    early: bool = False,
) -> dict[str, Any]:
    """The constants of `fused_linear_kernel`, launch options included.

    Args:
        tile: from `choose_tile`.
        out_features: N.
        in_features: K.
        activation: its name in the kernel; empty = none.
        num_squares: sums of squares of a row.
        early: the kernel starts before the previous one has ended (ops/fused/early_start.py).
    """
    return {
        "K": in_features,
        "N": out_features,
        "ACTIVATION": activation,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SQUARES": num_squares,
        "BLOCK_S": triton.next_power_of_2(num_squares),
        "PREFETCHED": tile.block_k,
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def device_limits(device: torch.device) -> dict[str, int]:
    """The arguments of `choose_tile` that depend on the device."""
    if device.type != "cuda":
        return {}  # Triton's interpreter, which has no limits
    properties = torch.cuda.get_device_properties(device)
    return {
        "shared_memory": properties.shared_memory_per_block_optin,
        "multiprocessors": properties.multi_processor_count,
    }
