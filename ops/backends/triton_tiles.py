"""Tile shapes and constants of the Triton attention kernels, computed from a model's shape.

The module needs no device, so the programs of any model can be listed and compiled anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = (
    "FIRST_OF_CLASS",
    "MAX_TILE_ROWS",
    "KernelShape",
    "TileShape",
    "attention_constants",
    "ceil_div",
    "rotary_constants",
    "write_constants",
)

MAX_TILE_ROWS = 128  # query rows of the largest tile, hence the most query heads per KV head
# (most sequences of a step, least keys of a partition, divisor of the most partitions). A step of
# few sequences needs many partitions to fill the GPU. In a step of many sequences, more partitions
# cost more than they save: to begin and end a partition takes as long as to read about 256 keys.
_PARTITIONS = ((4, 128, 1), (16, 512, 2), (64, 1024, 4), (1 << 30, 2048, 8))
_SEQUENCES_PER_CHUNK = 256  # a constant, so that no shape needs another program
FIRST_OF_CLASS: tuple[int, ...] = (1, *(most + 1 for most, _, _ in _PARTITIONS[:-1]))
"""The least number of sequences of each class. Each line of `_PARTITIONS` is a class.

Each class has kernels of its own, so one step of each class warms them all up."""
_ANY_QUERY = 1 << 30
_JOINED_ELEMENTS = 32  # of one partition or more that a thread holds while it joins partitions
_ROTATED_ELEMENTS = 1024  # elements of the projection that a program of the rotation holds
_WRITTEN_ELEMENTS = 2048  # elements of K, and of V, that a program of the write holds


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class TileShape:
    """One launch's tile: BLOCK_M query rows (tokens times grouped heads) against BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What the kernels are specialised to: a model, and the class of a step's number of sequences.

    Args:
        num_heads: query heads H.
        num_kv_heads: KV heads; divides H.
        head_dim: D, of queries and keys.
        value_dim: Dv, of values and of the output; 0 = D.
        block_size: tokens per cache block.
        itemsize: bytes of one element of queries, keys and values.
        max_context: tokens that a block table's row can hold.
        num_seqs: sequences of the step.
        converts_cache: the cache has 8-bit elements, which are widened in registers.
        shared_memory: bytes that one program may use; by default those of capability 9.0.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    itemsize: int
    max_context: int
    num_seqs: int = 1
    converts_cache: bool = False
    shared_memory: int = 227 * 1024
    value_dim: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def block_d(self) -> int:
        return _power_of_two(self.head_dim)

    @property
    def block_v(self) -> int:
        return _power_of_two(self.value_size)

    @property
    def short(self) -> TileShape:
        """The tile of the fewest rows, for sequences whose query rows fit one tile."""
        block_m = max(16, _power_of_two(self.group))
        # Keys of 8 bits are widened in registers, which hold 64 keys at a time.
        most = 64 if self.converts_cache else 128
        block_n = 16 if self.itemsize == 4 else {128: 64, 256: 32}.get(self.block_d, most)
        if block_m >= 64 and self.programs_per_processor == 1:
            block_n = min(64, block_n)  # the logits of more keys would spill
        num_warps = 4 if block_m <= 64 and self.programs_per_processor == 2 else 8
        return self._deepest(TileShape(block_m, block_n, num_warps, stages) for stages in (3, 2))

    @property
    def programs_per_processor(self) -> int:
        """Programs of a launch of the short tile that run on a multiprocessor at the same time.

        With two, one computes while the other waits for memory. In a step of few sequences a
        program with more warps is faster, and leaves registers and shared memory to a program of
        the next kernel, which starts early.
        """
        few = self.num_seqs <= _PARTITIONS[0][0]
        return 1 if few and self.itemsize == 2 and not self.converts_cache else 2

    def max_registers(self, sliding_window: int, *, early: bool) -> int:
        """The most registers of a thread of the short tile; 0 = as many as the compiler wants.

        Args:
            sliding_window: of the layer, as for `paged_attention`.
            early: kernels start before the previous one has ended (ops/fused/early_start.py).
        """
        tile = self.short
        if self.programs_per_processor == 2:
            # Without a limit, the compiler may spill so that three programs of 4 warps fit.
            return 255 if tile.num_warps == 4 and self.itemsize == 2 else 0
        # A program of the next kernel starts early and needs registers too: 168 leave 176 for each
        # of its 128 threads, and 184 leave 144. Larger results leave none. By the tables of
        # docs/kernel-resources.md, nothing spills with 168 if values have 128 elements.
        if not early or tile.block_m * self.block_v > 8192:
            return 0
        is_small = self.value_size == 128 and tile.block_m < 64 and sliding_window >= 0
        return 168 if is_small else 184

    @property
    def long(self) -> TileShape:
        """The tile for longer query ranges."""
        if self.itemsize == 4:  # multiplied without tensor cores, in registers
            rows = 16 if self.block_d == 256 else 32
            block_m = max(rows, _power_of_two(self.group))
            return self._deepest(TileShape(block_m, rows, 4, stages) for stages in (2, 1))
        block_n = 32 if self.block_d == 256 else 64
        rows = [(128, 8)] if self.group > 64 else [(128, 8), (64, 4)]
        if self.converts_cache and self.block_d == 256 and self.group <= 64:
            rows = [(64, 8)]  # the widened keys do not fit the registers beside 128 rows
        return self._deepest(
            TileShape(block_m, block_n, num_warps, stages)
            for block_m, num_warps in rows
            for stages in ((2,) if self.block_d == 256 else (3, 2))
        )

    def _deepest(self, tiles: Iterable[TileShape]) -> TileShape:
        """The first of `tiles` that fits into shared memory, or the last if none fits."""
        tile = None
        for tile in tiles:
            loaded = tile.num_stages * tile.block_n
            elements = (tile.block_m + loaded) * self.block_d + loaded * self.block_v
            if elements * self.itemsize <= self.shared_memory:
                return tile
        assert tile is not None, "no tile to choose from"
        return tile

    @property
    def max_short_query(self) -> int:
        """The longest query range, in tokens, that the short tile takes."""
        return self.short.block_m // self.group

    @property
    def min_partition(self) -> int:
        """The least keys of a partition. The class of `num_seqs` in `_PARTITIONS` decides."""
        return self._partitioning[0]

    @property
    def _partitioning(self) -> tuple[int, int]:
        """The row of `_PARTITIONS` for `num_seqs`, without its first entry."""
        return next((least, by) for most, least, by in _PARTITIONS if self.num_seqs <= most)

    @property
    def max_partitions(self) -> int:
        """The most KV partitions of a sequence: enough that one long sequence fills a GPU."""
        wanted = min(64, max(4, _power_of_two(128 // self.num_kv_heads)))
        least, divisor = self._partitioning
        return min(max(4, wanted // divisor), ceil_div(self.max_context, least))

    def partial_rows(self, num_tokens: int) -> int:
        """Query rows that may have several partitions in one step."""
        return min(num_tokens, self.num_seqs * self.max_short_query)

    def workspace_bytes(self, num_tokens: int) -> int:
        """The most bytes of partial results that a call allocates (and frees).

        Fewer sequences can need more, because their contexts have more partitions.

        Args:
            num_tokens: T; a step has up to T tokens and up to `num_seqs` sequences.
        """
        counts = {min(most, self.num_seqs) for most, _, _ in _PARTITIONS}
        return max(replace(self, num_seqs=count)._partial_bytes(num_tokens) for count in counts)

    def _partial_bytes(self, num_tokens: int) -> int:
        if self.max_partitions == 1:
            return 0
        rows = self.partial_rows(num_tokens) * self.num_heads * self.max_partitions
        return rows * (self.value_size + 1) * 4


def attention_constants(
    shape: KernelShape,
    sliding_window: int,
    soft_cap: float,
    *,
    is_long: bool,
    early: bool = False,
) -> dict[str, int | float]:
    """The constants of one launch of `attention_kernel`, launch options included.

    Args:
        shape: what the kernel is specialised to.
        sliding_window: of the layer, as for `paged_attention`.
        soft_cap: of the layer, 0 = none.
        is_long: whether the launch is for sequences with many query rows.
        early: the kernel starts before the previous one has ended (ops/fused/early_start.py).
    """
    tile = shape.long if is_long else shape.short
    num_stages = tile.num_stages
    if shape.converts_cache and soft_cap > 0 and not is_long:
        num_stages = min(num_stages, 2)  # the third stage's registers would spill
    joined = _JOINED_ELEMENTS * 32 * tile.num_warps  # elements that a program holds
    constants: dict[str, int | float] = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "VALUE_DIM": shape.value_size,
        "BLOCK_SIZE": shape.block_size,
        "WINDOW": sliding_window,
        "SOFT_CAP": soft_cap,
        "MIN_QUERY": shape.max_short_query + 1 if is_long else 1,
        "MAX_QUERY": _ANY_QUERY if is_long else shape.max_short_query,
        "BLOCK_S": _SEQUENCES_PER_CHUNK,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": shape.block_d,
        "BLOCK_V": shape.block_v,
        "MAX_PARTS": 1 if is_long else shape.max_partitions,
        "MIN_PART_TILES": 1 if is_long else shape.min_partition // tile.block_n,
        "BLOCK_C": (columns := min(shape.block_v, joined // tile.block_m)),
        "JOINED": joined // (tile.block_m * columns),
        "TAKES": not is_long,
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": tile.num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": True,
    }
    if not is_long and (most := shape.max_registers(sliding_window, early=early)):
        constants["maxnreg"] = most
    return constants


def write_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    *,
    early: bool = False,
) -> dict[str, int]:
    """The constants of `write_kv_kernel`, launch options included."""
    block_d, block_v = _power_of_two(head_dim), _power_of_two(value_dim)
    block_h = max(1, _WRITTEN_ELEMENTS // max(block_d, block_v))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_H": min(_power_of_two(num_kv_heads), block_h),
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def rotary_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_pairs: int,
    block_size: int,
    *,
    early: bool = False,
) -> dict[str, int]:
    """The constants of `rotary_write_kernel`, launch options included."""
    block_d = _power_of_two(head_dim)
    block_h = max(1, _ROTATED_ELEMENTS // block_d)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": num_pairs,
        "BLOCK_SIZE": block_size,
        "BLOCK_H": min(_power_of_two(num_heads + 2 * num_kv_heads), block_h),
        "BLOCK_D": block_d,
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
