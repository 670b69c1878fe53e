"""The low-rank adapters of one linear layer, in slots (LoRA, arXiv:2106.09685).

An adapter adds scale * B (A x) to the result of a layer. The tensors of all slots are allocated
once. So a program that reads them, captured or not, serves adapters that are loaded later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ostinato.ops.adapters.add_adapters import PANEL, add_adapters, pack_columns

__all__ = ("AdapterSlots", "AdapterSpace", "ModuleAdapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpace:
    """The room for adapters in every layer of a model."""

    num_slots: int  # adapters that can be loaded at once
    max_rank: int


class ModuleAdapter(NamedTuple):
    """One adapter's matrices for one linear layer, or for the part of the layer on this rank.

    The layer stacks n projections of K inputs to N outputs in all; r is their largest rank.
    """

    # [n, r, K], in the order in which the layer stacks the projections. Rows past a projection's
    # rank are zero.
    a: Tensor
    b: Tensor  # [r, N]; column j belongs to row j of the layer's matrix
    ranks: tuple[int, ...]  # [n]; 0 = the projection has no adapter
    scales: tuple[float, ...]  # [n]


class AdapterSlots(nn.Module):
    """The adapters of a linear layer. A slot without an adapter has rank 0."""

    def __init__(
        self,
        space: AdapterSpace,
        in_features: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            space: the number of slots, and the largest rank.
            in_features: K, columns of the layer's matrix on this rank.
            outputs: rows of each stacked projection on this rank, in the order of the stack.
            dtype: the dtype of the layer's input.
            device: where the layer's matrix is.
        """
        super().__init__()
        self.space = space
        slots, rank, count = space.num_slots, space.max_rank, len(outputs)
        # Buffers, because a checkpoint has no such tensors. On a CPU, memory that was never written
        # takes no room.
        panels = -(-sum(outputs) // PANEL)
        shapes = {"a": (slots, count, rank, in_features), "b": (slots, panels, rank, PANEL)}
        for name, shape in shapes.items():
            values = torch.empty(shape, dtype=dtype, device=device)
            self.register_buffer(name, values, persistent=False)
        numbers = torch.zeros(slots, count, dtype=torch.int32, device=device)
        self.register_buffer("ranks", numbers, persistent=False)
        self.register_buffer("scales", numbers.float(), persistent=False)
        bounds = torch.tensor([0, *accumulate(outputs)], dtype=torch.int32, device=device)
        self.register_buffer("bounds", bounds, persistent=False)
        self.a: Tensor
        self.b: Tensor
        self.ranks: Tensor
        self.scales: Tensor
        self.bounds: Tensor

    def forward(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add the adapters' products to the layer's result.

        Args:
            y: [T, N], the layer's result; it is changed.
            x: [T, K], the layer's input.
            slots: [T, 1] int32, the slot of each token's adapter; -1 = none.
        """
        add_adapters(y, x, slots, self.a, self.b, self.ranks, self.scales, self.bounds)

    @torch.inference_mode()
    def write(self, slot: int, adapter: ModuleAdapter) -> None:
        """Put an adapter into a slot. No step that reads the slot may be unread."""
        rank = adapter.b.shape[0]
        self.a[slot, :, :rank].copy_(adapter.a)
        self.b[slot, :, :rank].copy_(pack_columns(adapter.b))
        self.scales[slot].copy_(torch.tensor(adapter.scales))
        self.ranks[slot].copy_(torch.tensor(adapter.ranks, dtype=torch.int32))

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Make a slot empty."""
        self.ranks[slot].zero_()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in (self.a, self.b, self.ranks, self.scales))
