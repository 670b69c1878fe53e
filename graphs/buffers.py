"""The static buffers of a step: one piece of host memory, one of device memory, one copy between
them.

The host side is NumPy views that the batch builder fills; the device side is the tensors that every
program, captured or not, reads. On a CPU both are the same memory and `upload` does nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs.buckets import GraphKey
from ostinato.models.base import ForwardBatch
from ostinato.ops.attention import AttentionMetadata

__all__ = ("HostBuffers", "StaticBuffers")


class HostBuffers(NamedTuple):
    """NumPy views of the host memory: T tokens, S sequences, B blocks per sequence at most."""

    token_ids: np.ndarray  # [T] int64; -1 - row stands for that row's last token (see `feed`)
    positions: np.ndarray  # [T] int64
    slot_mapping: np.ndarray  # [T] int64
    logits_indices: np.ndarray  # [S] int64, the token rows whose hidden state is sampled
    sampled_rows: np.ndarray  # [S] int64, the sequences' rows that get those tokens
    query_start_loc: np.ndarray  # [S+1] int32
    seq_lens: np.ndarray  # [S] int32
    block_table: np.ndarray  # [S, B] int32


class StaticBuffers:
    """Owns both sides. Slices of the device side keep their addresses for the engine's life."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        block_size: int,
        device: torch.device,
        feeds: bool | None = None,
    ) -> None:
        """
        Args:
            max_num_tokens: T.
            max_num_seqs: S.
            max_blocks_per_seq: B.
            block_size: tokens of a block.
            device: where programs read.
            feeds: whether a step's tokens stay on the device as the next one's inputs, so that
                that one can be launched before they are read; None = on a GPU.
        """
        self.block_size = block_size
        self.device = device
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((max_num_tokens,), torch.int64),
            ((max_num_tokens,), torch.int64),
            ((max_num_tokens,), torch.int64),
            ((max_num_seqs,), torch.int64),
            ((max_num_seqs,), torch.int64),
            ((max_num_seqs + 1,), torch.int32),
            ((max_num_seqs,), torch.int32),
            ((max_num_seqs, max_blocks_per_seq), torch.int32),
        ]
        # Every section starts at a multiple of 64 bytes: aligned vector loads, and FlashInfer asks
        # for 16.
        sizes = [-(-int(np.prod(shape)) * dtype.itemsize // 64) * 64 for shape, dtype in shapes]
        cuda = device.type == "cuda"
        self._host_memory = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=cuda)
        self._device_memory = self._host_memory.to(device) if cuda else self._host_memory
        host, on_device = [], []
        offset = 0
        for (shape, dtype), size in zip(shapes, sizes, strict=True):
            used = int(np.prod(shape)) * dtype.itemsize
            host.append(self._host_memory[offset : offset + used].view(dtype).view(shape).numpy())
            on_device.append(self._device_memory[offset : offset + used].view(dtype).view(shape))
            offset += size
        self._block_tables_begin = offset - sizes[-1]
        self.host = HostBuffers(*host)
        (
            self._token_ids,
            self._positions,
            self._slot_mapping,
            self._logits_indices,
            self._sampled_rows,
            self._query_start_loc,
            self._seq_lens,
            self._block_table,
        ) = on_device
        self.plan = torch.zeros(1, dtype=torch.int64)
        self.feeds = cuda if feeds is None else feeds
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(max_num_tokens, device=device)
        self._copied = torch.cuda.Event() if cuda else None

    def pad(self, num_tokens: int, num_seqs: int, key: GraphKey) -> None:
        """Make rows past the real ones harmless, up to the bucket's shape.

        Rewritten on every step: rows that a larger step left behind are the classic corruption.
        Padding tokens write into block 0, the null block; padding sequences have no query rows.
        """
        host = self.host
        host.token_ids[num_tokens : key.num_tokens] = 0
        host.positions[num_tokens : key.num_tokens] = 0
        host.slot_mapping[num_tokens : key.num_tokens] = 0
        host.query_start_loc[num_seqs + 1 : key.num_seqs + 1] = num_tokens
        host.seq_lens[num_seqs : key.num_seqs] = 0
        host.block_table[num_seqs : key.num_seqs] = 0
        host.logits_indices[num_seqs : key.num_seqs] = 0

    def wait_for_upload(self) -> None:
        """Block until the last upload has left the host memory; call before writing to `host`."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, num_seqs: int) -> None:
        """Start the one copy of a step, host to device.

        The block tables lie last and, for long contexts, outweigh everything else: only those of
        the first `num_seqs` sequences are copied.
        """
        if self._copied is not None:
            end = self._block_tables_begin + self.host.block_table[:num_seqs].nbytes
            self._device_memory[:end].copy_(self._host_memory[:end], non_blocking=True)
            self._copied.record()

    def feed(self, num_tokens: int) -> None:
        """Put last tokens where the uploaded ids stand for them; nothing to do unless `feeds`."""
        if self.feeds:
            ids = self._token_ids[:num_tokens]
            last = self.last_tokens[(-1 - ids).clamp_min_(0)]
            ids.copy_(torch.where(ids < 0, last, ids))

    def keep(self, token_ids: Tensor) -> None:
        """Remember a step's tokens [R], in the order of its `sampled_rows`, as their rows' last."""
        self.last_tokens.index_copy_(0, self._sampled_rows[: len(token_ids)], token_ids)

    def batch(self, num_tokens: int, num_seqs: int, num_logits: int | None) -> ForwardBatch:
        """The device tensors cut to a shape; the same shape gives the same addresses.

        Args:
            num_tokens: T.
            num_seqs: S.
            num_logits: how many of `logits_indices` are the wanted rows; None = all T tokens are.
        """
        if num_logits is None:
            rows = self._all_rows[:num_tokens]
        else:
            rows = self._logits_indices[:num_logits]
        return ForwardBatch(
            self._token_ids[:num_tokens],
            self._positions[:num_tokens],
            AttentionMetadata(
                self._query_start_loc[: num_seqs + 1],
                self._seq_lens[:num_seqs],
                self._block_table[:num_seqs],
                self._slot_mapping[:num_tokens],
                self.plan,
            ),
            rows,
        )
