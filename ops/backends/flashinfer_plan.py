"""Planning for the `flashinfer` backend: page lists built on the host, one plan per captured shape.

FlashInfer divides a step's work among programs on the host ("plan") and runs the division on the
device. Captured shapes have wrappers with buffers at fixed addresses; planning rewrites the
contents of these buffers. All other shapes share one plan, whose buffers are replaced when a shape
needs larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.ops.attention import AttentionSpec, HostMetadata, PlanKey, PlannedTable
from ostinato.ops.flashinfer_library import Library

__all__ = (
    "WORKSPACE_BYTES",
    "FlashInferPlanner",
    "PageArrays",
    "Plan",
    "fill_pages",
)

WORKSPACE_BYTES = 16 << 20  # initial size of the float workspace
_ALIGNMENT = 16  # int32 elements: every section starts at a multiple of 64 bytes
_MIN_GROUP_FOR_TENSOR_CORES = 4  # query heads per KV head; with fewer, the scalar kernel is as fast


class PageArrays(NamedTuple):
    """A step's page lists as FlashInfer reads them, for N sequences. Unused entries come last."""

    kv_indptr: np.ndarray  # [N+1] int32, first entry of each sequence in `indices`
    last_page_len: np.ndarray  # [N] int32, tokens in a sequence's last block; 0 = no blocks
    query_indptr: np.ndarray  # [N+1] int32, first query row of each sequence
    indices: np.ndarray  # [>= kv_indptr[N]] int32, block ids


def fill_pages(
    arrays: PageArrays,
    key: PlanKey,
    host: HostMetadata,
    block_table: np.ndarray,
    shape: PlannedTable,
) -> int:
    """List the blocks of the sequences that have query rows, without those outside of the window.

    FlashInfer reads blocks that lie partly outside of the window, and a weight of 0 times NaN is
    NaN. Causal masks and windows count from the end, so blocks can be left out at the beginning.
    These sequences are moved to the front. Padding tokens, from the last sequence's end to
    `key.num_tokens`, form one more sequence without keys, for which FlashInfer returns zeros.

    Args:
        arrays: written; N is at least the number of sequences with query rows, plus one for padding
            tokens.
        key: the step's shape, padding included.
        host: the step.
        block_table: [>= S, B] int32.
        shape: that of the block table.

    Returns:
        The number of entries of `arrays.indices` in use.
    """
    starts = host.query_start_loc[: key.num_seqs + 1]
    rows = np.flatnonzero(starts[1:] > starts[:-1])
    count, num_tokens = rows.size, int(starts[-1])
    lengths, size = host.seq_lens[rows], shape.block_size
    skipped = np.zeros_like(lengths)  # blocks at the beginning of each sequence
    if shape.window:
        first_positions = lengths - (starts[rows + 1] - starts[rows])
        skipped = np.maximum(first_positions + 1 - shape.window, 0) // size
        lengths = lengths - skipped * size
    pages = -(-lengths // size)
    arrays.kv_indptr[0] = 0
    np.cumsum(pages, out=arrays.kv_indptr[1 : count + 1])
    used = int(arrays.kv_indptr[count])
    arrays.kv_indptr[count + 1 :] = used
    arrays.last_page_len[:count] = (lengths - 1) % size + 1
    arrays.last_page_len[count:] = 0
    arrays.query_indptr[:count] = starts[rows]
    arrays.query_indptr[count:-1] = num_tokens
    arrays.query_indptr[-1] = key.num_tokens
    if count:
        ends = skipped + pages
        lists = [block_table[row, a:b] for row, a, b in zip(rows, skipped, ends, strict=True)]
        np.concatenate(lists, out=arrays.indices[:used])
    return used


class _PageTable:
    """`PageArrays` in pinned host memory and their copy on the device, made in one transfer."""

    def __init__(
        self, shape: PlannedTable, num_slots: int, num_seqs: int, device: torch.device
    ) -> None:
        sizes = (num_slots + 1, num_slots, num_slots + 1, max(1, num_seqs * shape.max_blocks))
        self.shape = shape
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        cuda = device.type == "cuda"
        self.num_slots = num_slots
        self._host = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(sum(padded), dtype=torch.int32, device=device)
        self._before_indices = sum(padded[:3])
        self.on_host, self.on_device = (
            [part[:size] for part, size in zip(memory.split(padded), sizes, strict=True)]
            for memory in (self._host, self._device)
        )
        self.arrays = PageArrays(*(part.numpy() for part in self.on_host))

    def upload(self, num_indices: int) -> None:
        """Start the transfer of the entries in use, on the current stream."""
        used = self._before_indices + num_indices
        self._device[:used].copy_(self._host[:used], non_blocking=True)


class _Workspace:
    """The float workspace that all wrappers share: the kernels of a step run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def at_least(self, num_bytes: int) -> Tensor:
        """A buffer of at least that size. Wrappers that captured a smaller one keep it alive."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer

    def close(self) -> None:
        self._buffer = self._buffer.new_empty(0)


class Plan:
    """The wrappers of one shape, one per sliding window of the model, over its page tables."""

    def __init__(
        self,
        library: Library,
        spec: AttentionSpec,
        windows: Iterable[int],
        workspace: _Workspace,
        key: PlanKey | None,
        tables: Sequence[_PageTable],
    ) -> None:
        """
        Args:
            library: FlashInfer.
            spec: what the model needs.
            windows: sliding windows of the model's layers, 0 = none.
            workspace: shared with all other plans.
            key: the captured shape; None = any shape, never captured.
            tables: the one of all layers; or that of the layers without a window, then that of the
                layers with one. With a key, they have exactly one slot for each sequence of the
                wrapper.
        """
        self._library = library
        self._spec = spec
        self._workspace = workspace
        self._tables = tables
        self._is_captured = key is not None
        self._is_decode = key is not None and key.tokens_per_seq == 1
        self._is_sized = False
        self._planned = torch.cuda.Event() if spec.device.type == "cuda" else None
        # For each window: the wrapper, and the index of its table.
        self._wrappers: dict[int, tuple[Any, int]] = {}
        for window in windows:
            index = int(len(tables) > 1 and window != 0)
            self._wrappers[window] = self._make_wrapper(tables[index]), index

    def wrapper(self, sliding_window: int, soft_cap: float) -> Any:
        """The planned wrapper of a layer.

        Raises:
            ValueError: the plan has no layer with this window or cap.
        """
        if sliding_window not in self._wrappers or soft_cap != self._spec.soft_cap:
            raise ValueError(
                f"paged_attention: flashinfer planned sliding windows {sorted(self._wrappers)} and "
                f"soft cap {self._spec.soft_cap}, but a layer asks for {sliding_window} and "
                f"{soft_cap}; name all windows of the model in make_planner"
            )
        return self._wrappers[sliding_window][0]

    def plan(self, key: PlanKey, host: HostMetadata) -> None:
        """Plan one step; see `AttentionPlanner.plan`."""
        if self._planned is not None:
            # The last step's transfers out of the pinned memory must end before that memory is
            # rewritten. In the stream they precede the last step's kernels, so this call does not
            # wait for those kernels.
            self._planned.synchronize()
        num_slots = self._tables[0].num_slots if self._is_captured else key.num_seqs + 1
        used: list[int] = []
        block_tables = host.block_table, host.window_block_table
        for table, block_table in zip(self._tables, block_tables, strict=False):
            assert block_table is not None, "the planner was made for a second block table"
            arrays = PageArrays(
                table.arrays.kv_indptr[: num_slots + 1],
                table.arrays.last_page_len[:num_slots],
                table.arrays.query_indptr[: num_slots + 1],
                table.arrays.indices,
            )
            used.append(fill_pages(arrays, key, host, block_table, table.shape))
            table.upload(used[-1])
        for window, (wrapper, index) in self._wrappers.items():
            self._plan_wrapper(wrapper, window, self._tables[index], num_slots, used[index])
        self._is_sized = self._is_captured
        if self._planned is not None:
            self._planned.record()

    def _make_wrapper(self, table: _PageTable) -> Any:
        kv_indptr, last_page_len, query_indptr, indices = table.on_device
        workspace = self._workspace.at_least(0)
        if self._is_decode:
            group = self._spec.num_heads // self._spec.num_kv_heads
            return self._library.decode_wrapper(
                workspace,
                kv_layout="HND",
                use_cuda_graph=True,
                use_tensor_cores=group >= _MIN_GROUP_FOR_TENSOR_CORES,
                paged_kv_indptr_buffer=kv_indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
        # "fa2": the kernel that "auto" takes on Hopper reads the keys once per query head and does
        # not split them, which is slow for the decode rows of a mixed step.
        if not self._is_captured:
            return self._library.prefill_wrapper(workspace, kv_layout="HND", backend="fa2")
        return self._library.prefill_wrapper(
            workspace,
            kv_layout="HND",
            use_cuda_graph=True,
            qo_indptr_buf=query_indptr,
            paged_kv_indptr_buf=kv_indptr,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last_page_len,
            backend="fa2",
        )

    def _plan_wrapper(
        self, wrapper: Any, window: int, table: _PageTable, num_slots: int, used: int
    ) -> None:
        spec = self._spec
        kv_indptr, last_page_len, query_indptr, _ = table.on_host
        # FlashInfer copies the block ids into this device buffer. If the ids are given as the
        # buffer itself, the copy does nothing. If they were in host memory, FlashInfer would wait
        # for the copy.
        indices = table.on_device[3][: max(1, used)]
        pages = (kv_indptr[: num_slots + 1], indices, last_page_len[:num_slots])
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, table.shape.block_size)
        options: dict[str, Any] = {
            "window_left": window - 1,
            "logits_soft_cap": spec.soft_cap,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
            "sm_scale": 1.0,  # the op's own scale is given at each run
        }
        if self._is_decode and self._is_sized:
            self._library.fast_decode_plan(
                wrapper, *pages, *shape, **options, global_override_indptr_cpu=pages[0]
            )
            return
        if not self._is_decode:
            pages = (query_indptr[: num_slots + 1], *pages)
            options["causal"] = True
        if not self._is_sized:
            self._size_workspaces(wrapper, (*pages, *shape), options)
        wrapper.plan(*pages, *shape, **options)

    def _size_workspaces(self, wrapper: Any, arguments: tuple[Any, ...], options: Any) -> None:
        """Give the wrapper workspaces of the size that its plans need.

        The plans of a captured shape need the same size in every step.
        """
        num_floats, num_ints = wrapper.workspace_size(*arguments, **options)
        floats = self._workspace.at_least(num_floats)
        ints = torch.zeros(max(1, num_ints), dtype=torch.uint8, device=self._spec.device)
        wrapper.reset_workspace_buffer(floats, ints)


class FlashInferPlanner:
    """An engine's plans; see `AttentionPlanner`."""

    def __init__(
        self,
        library: Library,
        spec: AttentionSpec,
        keys: Iterable[PlanKey],
        windows: Iterable[int],
        tables: Sequence[PlannedTable],
        register: Callable[[Plan], int],
        release: Callable[[int], None],
    ) -> None:
        self._library = library
        self._spec = spec
        self._captured = {_identity(key) for key in keys}
        self._windows = tuple(sorted(set(windows)))
        self._tables = tables
        self._register = register
        self._release = release
        self._workspace = _Workspace(spec.device)
        self._plans: dict[tuple[int, int, int] | None, tuple[Plan, int]] = {}
        self._num_free_slots = 0  # sequences that fit the plan of the shapes that are not captured

    def plan(self, key: PlanKey, host: HostMetadata, handle: Tensor) -> None:
        identity = _identity(key) if _identity(key) in self._captured else None
        if identity is None and key.num_seqs + 1 > self._num_free_slots:
            self._drop(None)
            self._num_free_slots = key.num_seqs + 1
        if identity not in self._plans:
            plan = self._make_plan(key, is_captured=identity is not None)
            self._plans[identity] = plan, self._register(plan)
        plan, number = self._plans[identity]
        plan.plan(key, host)
        handle[0] = number

    def close(self) -> None:
        for identity in list(self._plans):
            self._drop(identity)
        self._workspace.close()

    def _drop(self, identity: tuple[int, int, int] | None) -> None:
        if identity in self._plans:
            self._release(self._plans.pop(identity)[1])

    def _make_plan(self, key: PlanKey, *, is_captured: bool) -> Plan:
        num_seqs = min(key.num_seqs, key.num_tokens) if is_captured else key.num_seqs
        # A decode step has one slot per token. In other steps the last slot takes the padding
        # tokens.
        num_slots = key.num_tokens if is_captured and key.tokens_per_seq == 1 else num_seqs + 1
        tables = [
            _PageTable(shape, num_slots, num_seqs, self._spec.device) for shape in self._tables
        ]
        return Plan(
            self._library,
            self._spec,
            self._windows,
            self._workspace,
            key if is_captured else None,
            tables,
        )


def _identity(key: PlanKey) -> tuple[int, int, int]:
    return key.num_tokens, key.num_seqs, key.tokens_per_seq
