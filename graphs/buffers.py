"""The static buffers that hold a step's tensors on the host and on the device.

The host side is NumPy views that the batch builder fills. The device side is the tensors that every
program reads, captured or not. Each step copies the host's content to the device, in one copy if
the model has one block table. On a CPU both sides are the same memory and `upload` does nothing.
`models.step_tensors` declares which tensors there are and how each is padded and uploaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs.buckets import GraphKey
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.models.step_tensors import (
    ForwardBatch,
    Size,
    StepSizes,
    StepTensors,
    Upload,
    tensor_specs,
)

__all__ = ("HostBuffers", "StaticBuffers")

HostBuffers = StepTensors[np.ndarray]
"""NumPy views of the host memory, as large as the largest step."""

_ADAPTER_SLOTS = "adapter_slots"
_STATE_SLOTS = "state_slots"
_WINDOW_TENSORS = frozenset(("window_block_table", "window_slot_mapping"))
_ALIGNMENT = 64  # bytes; for aligned vector loads, and FlashInfer asks for 16


class _HostMemory(NamedTuple):
    """One piece of host memory."""

    memory: Tensor
    views: HostBuffers
    padded: dict[Size, list[tuple[np.ndarray, Any]]]
    copied: torch.cuda.Event | None  # recorded after an upload; None on a CPU


class StaticBuffers:
    """The step tensors of an engine, host side and device side.

    Slices of the device side keep their addresses for the engine's life, as captured programs need.

    Attributes:
        groups: the KV groups of the model.
        plan: [1] int64 on the CPU, the handle of a planned attention kernel.
        last_tokens: [max_num_seqs] int64 on the device, the last token of each row.
    """

    def __init__(  # noqa: PLR0913 - the sizes of an engine
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        block_size: int,
        device: torch.device,
        max_num_rows: int | None = None,
        async_tokens: bool | None = None,
        table: type[StepTensors[Any]] = StepTensors,
        max_drafts: int = 0,
        num_host_copies: int = 1,
        has_adapters: bool = False,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
        max_window_blocks_per_seq: int = 0,
        has_states: bool = False,
    ) -> None:
        """
        Args:
            max_num_tokens: T, tokens of the largest step.
            max_num_seqs: S, sequences of the largest step.
            max_blocks_per_seq: B, blocks of the longest sequence, of `groups[0]`.
            block_size: tokens of a block, without the units of its group.
            device: where programs read.
            max_num_rows: R, the most tokens of a step whose logits are wanted; None = one per
                sequence.
            async_tokens: whether a step's tokens stay on the device as inputs of the next step. The
                next step can then be launched before the host has read these tokens. None = only
                on a GPU.
            table: the class that declares the step tensors.
            max_drafts: K, draft tokens of a sequence that can stay on the device.
            num_host_copies: pieces of host memory, which steps use in turn. So this many steps can
                be launched before the first of them has left its host memory.
            has_adapters: whether steps can have adapters: `adapter_slots` is allocated.
            groups: the KV groups of the model. With two, the second block table is allocated.
            max_window_blocks_per_seq: B', blocks of the longest sequence, of `groups[1]`.
            has_states: whether the model has recurrent layers: `state_slots` is allocated.
        """
        self.groups = groups
        self.block_size = block_size
        self.has_adapters = has_adapters
        self.max_num_rows = max_num_seqs if max_num_rows is None else max_num_rows
        self.async_tokens = device.type == "cuda" if async_tokens is None else async_tokens
        self._table = table
        absent = frozenset[str]() if len(groups) > 1 else _WINDOW_TENSORS
        absent |= set[str]() if has_adapters else {_ADAPTER_SLOTS}
        absent |= set[str]() if has_states else {_STATE_SLOTS}
        self._specs = {
            name: spec for name, spec in tensor_specs(table).items() if name not in absent
        }
        self._sizes = [spec.dynamic_size for spec in self._specs.values()]
        largest = StepSizes(max_num_tokens, max_num_seqs, self.max_num_rows)
        fixed = {
            Size.blocks: max_blocks_per_seq,
            Size.window_blocks: max_window_blocks_per_seq,
        }
        shapes = {name: spec.shape(largest, fixed) for name, spec in self._specs.items()}
        self._allocate(shapes, device, num_host_copies)
        self.plan = self._device["plan"]
        # the last token of each row, then the K drafts of each row
        self._known_tokens = torch.zeros(
            max_num_seqs * (1 + max_drafts), dtype=torch.int64, device=device
        )
        self.last_tokens = self._known_tokens[:max_num_seqs]
        # The same memory as an array, which takes a few numbers in a quarter of torch's time.
        self._last_on_host = None if device.type == "cuda" else self.last_tokens.numpy()
        self._drafts = self._known_tokens[max_num_seqs:].view(max_num_seqs, max_drafts)
        self._all_tokens = torch.arange(max_num_tokens, device=device)

    @property
    def host(self) -> HostBuffers:
        """The arrays to fill. `wait_for_upload` can replace them."""
        return self._current.views

    def _allocate(
        self, shapes: dict[str, tuple[int, ...]], device: torch.device, num_host_copies: int
    ) -> None:
        """Make the memory of both sides and the views of each tensor.

        Tensors that are uploaded whole come first, so that one copy takes them all. Then come the
        tensors of which only the used rows are uploaded. Other tensors have memory of their own.
        """
        uploads = {name: spec.upload for name, spec in self._specs.items()}
        whole = [name for name, upload in uploads.items() if upload is Upload.whole]
        large = [name for name, upload in uploads.items() if upload is Upload.used_rows]
        num_bytes = {
            name: math.prod(shape) * self._specs[name].dtype.itemsize
            for name, shape in shapes.items()
        }
        places: dict[str, slice] = {}
        end = 0
        for name in (*whole, *large):
            places[name] = slice(end, end + num_bytes[name])
            end += -(-num_bytes[name] // _ALIGNMENT) * _ALIGNMENT
        cuda = device.type == "cuda"
        memories = [
            torch.zeros(end, dtype=torch.uint8, pin_memory=cuda)
            for _ in range(num_host_copies if cuda else 1)
        ]
        self._device_memory = memories[0].to(device) if cuda else memories[0]
        # For each copy: its first byte, the end of the part that is always copied, and the number
        # of further bytes for each sequence.
        starts = [(places[name].start, num_bytes[name] // shapes[name][0]) for name in large]
        self._copies = [(start, start, bytes_per_seq) for start, bytes_per_seq in starts]
        self._copies[:1] = [(0, *starts[0])] if starts else [(0, end, 0)]

        def view(memory: Tensor, name: str) -> Tensor:
            return memory[places[name]].view(self._specs[name].dtype).view(shapes[name])

        self._device = {
            name: view(self._device_memory, name)
            if name in places
            else torch.zeros(shapes[name], dtype=spec.dtype)
            for name, spec in self._specs.items()
        }
        self._host_copies = deque[_HostMemory]()
        for memory in memories:
            arrays = {
                name: (view(memory, name) if name in places else tensor).numpy()
                for name, tensor in self._device.items()
            }
            copied = torch.cuda.Event() if cuda else None
            self._host_copies.append(
                _HostMemory(memory, self._table(**arrays), self._paddings(arrays), copied)
            )
        self._current = self._host_copies[0]

    def _paddings(self, arrays: dict[str, np.ndarray]) -> dict[Size, list[tuple[np.ndarray, Any]]]:
        """Dynamic size -> the host arrays of this size, each with its padding value."""
        return {
            size: [
                (arrays[name], spec.padding)
                for name, spec in self._specs.items()
                if spec.dynamic_size is size
            ]
            for size in Size
            if size.is_dynamic
        }

    def pad(self, num_tokens: int, num_seqs: int, num_rows: int, key: GraphKey) -> None:
        """Write padding values past the step's own entries, up to the bucket's shape.

        This happens in every captured step. Otherwise entries of an earlier, larger step would
        write into the blocks of other sequences.
        """
        real = StepSizes(num_tokens, num_seqs, num_rows)
        padded = StepSizes(key.num_tokens, key.num_seqs, key.num_rows)
        if real == padded:
            return
        for size, arrays in self._current.padded.items():
            begin, end = real.number(size), padded.number(size)
            if begin >= end:
                continue
            for array, padding in arrays:
                array[begin:end] = array[begin - 1] if padding == "edge" else padding

    def wait_for_upload(self) -> None:
        """Call before writing a step to `host`.

        Takes the next piece of host memory, and blocks until its last upload is complete.
        """
        if self._current.copied is not None:
            self._host_copies.rotate(-1)
            self._current = self._host_copies[0]
            assert self._current.copied is not None, "all pieces have an event"
            self._current.copied.synchronize()

    def upload(self, num_seqs: int) -> None:
        """Start the copy of a step, host to device.

        Tensors with `Upload.used_rows`, such as the block table, are large for long contexts. So
        only their entries of the first `num_seqs` sequences are copied.
        """
        memory, _, _, copied = self._current
        if copied is None:
            return
        for begin, fixed_end, bytes_per_seq in self._copies:
            end = fixed_end + num_seqs * bytes_per_seq
            self._device_memory[begin:end].copy_(memory[begin:end], non_blocking=True)
        copied.record()

    def scatter_known_tokens(self, num_tokens: int) -> None:
        """Replace each id `-1 - row` with the last token of that row, and each `draft_mark` with
        its draft.

        Does nothing unless `async_tokens` is set.
        """
        if self.async_tokens:
            ids = self._device["token_ids"][:num_tokens]
            known = self._known_tokens[(-1 - ids).clamp_min_(0)]
            ids.copy_(torch.where(ids < 0, known, ids))

    def store_last_tokens(self, token_ids: Tensor | list[int]) -> None:
        """Store the last tokens of the rows in `sampled_rows`, in the same order.

        Args:
            token_ids: [N] int64 on the device; on a CPU also a list.
        """
        if self._last_on_host is not None:
            rows = self.host.sampled_rows[: len(token_ids)]
            values = token_ids.numpy() if isinstance(token_ids, Tensor) else token_ids
            self._last_on_host[rows] = values
            return
        assert isinstance(token_ids, Tensor), "on a GPU the tokens are on the device"
        self.last_tokens.index_copy_(0, self.sampled_rows(len(token_ids)), token_ids)

    def sampled_rows(self, num_seqs: int) -> Tensor:
        """[num_seqs] int64: the first `num_seqs` rows that sample a token in the uploaded step."""
        return self._device["sampled_rows"][:num_seqs]

    def draft_mark(self, row: int, place: int) -> int:
        """The negative id that stands for a row's draft token number `place`, counted from 0."""
        num_rows, max_drafts = self._drafts.shape
        return -1 - (num_rows + row * max_drafts + place)

    def store_drafts(self, place: int, rows: Tensor, token_ids: Tensor) -> None:
        """Store draft tokens. In later steps, ids from `draft_mark` stand for them.

        Args:
            place: the number of the draft token in its draft, counted from 0.
            rows: [N] int64, on the device.
            token_ids: [N] int64, on the device.
        """
        self._drafts[:, place].index_copy_(0, rows, token_ids)

    def following_tokens(self, num_rows: int) -> Tensor:
        """[num_rows] int64: for each wanted token of the uploaded step, the token after it.

        If drafts are verified, that is the draft token to compare with. After the last token of a
        sequence, the value has no meaning.
        """
        token_ids = self._device["token_ids"]
        places = self._device["logits_indices"][:num_rows] + 1
        return token_ids[places.clamp_max_(len(token_ids) - 1)]

    def batch(
        self,
        num_tokens: int,
        num_seqs: int,
        num_rows: int | None,
        *,
        has_adapters: bool = False,
    ) -> ForwardBatch:
        """The device tensors cut to a shape; the same shape gives the same addresses.

        Args:
            num_tokens: T.
            num_seqs: S.
            num_rows: R, the wanted tokens, which are in `logits_indices`; None = all T tokens.
            has_adapters: whether a token has an adapter; False = `adapter_slots` is None.
        """
        sizes = StepSizes(num_tokens, num_seqs, num_tokens if num_rows is None else num_rows)
        cut = {
            name: tensor if size is None else tensor[: sizes.number(size)]
            for (name, tensor), size in zip(self._device.items(), self._sizes, strict=True)
            if has_adapters or name != _ADAPTER_SLOTS
        }
        batch = self._table(**cut)
        return self.with_all_rows(batch) if num_rows is None else batch

    def with_all_rows(self, batch: ForwardBatch) -> ForwardBatch:
        """A copy of the batch whose `logits_indices` name all its tokens."""
        rows = self._all_tokens[: len(batch.token_ids)]
        return dataclasses.replace(batch, logits_indices=rows)
