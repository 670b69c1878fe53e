"""The links of a rank: to its tensor-parallel group, to the stage before and to the stage after.

link_ends.py makes their memory and sockets, or the files through which the ranks find each other.
Each rank is passed the descriptors of its own links.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ostinato.models.base import AuxStates, LanguageModel
from ostinato.models.decoder import Decoder
from ostinato.models.linear_layers import join_group
from ostinato.models.sharding import Shard
from ostinato.ops.parallel.distributed_group import DistributedGroup
from ostinato.ops.parallel.distributed_handoff import DistributedReceiver, DistributedSender
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.handoff import HiddenReceiver, HiddenSender, HiddenShape
from ostinato.ops.parallel.handoff_ends import HandoffEnd
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores
from ostinato.runtime.ranks.link_ends import RankLayout, close_all

__all__ = ("RankLinks",)

# The processes are watched, so a wait hardly needs a limit. This limit is for a stop that the watch
# does not notice. It is longer than any step.
_LONGEST_WAIT_S = 1800.0


class RankLinks:
    """The links of one rank. One thread uses them, except `abort`."""

    def __init__(
        self,
        layout: RankLayout,
        shard: Shard,
        shape: HiddenShape,
        threads: int,
        descriptors: Sequence[int],
        exchange: Exchange = Exchange.shared_memory,
    ) -> None:
        """Open the links, and close the descriptors.

        Args:
            layout: the ranks of the engine.
            shard: the shard of the rank.
            shape: the shape of the hidden states that stages hand on.
            threads: the model's threads in each rank.
            descriptors: from `create_links`.
            exchange: as in `create_links`.

        Raises:
            StartupError: a link cannot be opened.
        """
        self._group: ParallelGroup | DistributedGroup | None = None
        self._previous: HiddenReceiver | DistributedReceiver | None = None
        self._next: HiddenSender | DistributedSender | None = None
        self._unconnected: list[DistributedGroup] = []
        left = list(descriptors)
        try:
            if exchange.is_distributed:
                self._introduce(shard, shape, left, exchange)
                return
            if shard.size > 1:
                # A waiting rank must not take the processor of what it waits for: another rank, or
                # the bridge, whose network takes longer than a rank may spin.
                is_spread = layout.group_is_spread(shard)
                has_cores = layout.ranks_per_machine * threads <= available_cores()
                self._group = ParallelGroup(
                    left[0],
                    shard.rank,
                    shard.size,
                    spin_us=50 if has_cores and not is_spread else 0,
                    timeout_s=_LONGEST_WAIT_S,
                    notify=left[1] if is_spread else -1,
                )
                os.close(left.pop(0))
                if is_spread:
                    left.pop(0)  # closed with the group
            if not shard.stage.is_first:
                self._previous = HiddenReceiver(HandoffEnd(left.pop(0), left.pop(0)), shape)
            if not shard.stage.is_last:
                self._next = HiddenSender(HandoffEnd(left.pop(0), left.pop(0)), shape)
        except (RuntimeError, ValueError, OSError) as error:
            close_all([left])
            self.close()
            raise StartupError(f"a rank cannot join the others: {error}") from error

    def _introduce(
        self, shard: Shard, shape: HiddenShape, left: list[int], exchange: Exchange
    ) -> None:
        """Make the groups that use torch.distributed; `connect` connects them.

        Args:
            shard: the shard of the rank.
            shape: the shape of the hidden states.
            left: the files through which ranks find each other; those in use are removed.
            exchange: nccl or gloo.
        """
        device = torch.device("cuda" if exchange is Exchange.nccl else "cpu")
        if shard.size > 1:
            self._group = DistributedGroup(left.pop(0), shard.rank, shard.size, exchange)
            self._unconnected.append(self._group)
        if not shard.stage.is_first:
            pair = DistributedGroup(left.pop(0), 1, 2, exchange)
            self._previous = DistributedReceiver(pair, shape, device)
            self._unconnected.append(pair)
        if not shard.stage.is_last:
            pair = DistributedGroup(left.pop(0), 0, 2, exchange)
            self._next = DistributedSender(pair)
            self._unconnected.append(pair)

    def connect(self) -> None:
        """Connect to the other ranks, which do the same now. Shared memory needs no connection.

        Raises:
            GroupEndedError: another rank has ended, or does not come.
        """
        while self._unconnected:  # all ranks have the same order: group, stage before, stage after
            self._unconnected.pop(0).connect()

    def join(self, model: LanguageModel, aux: AuxStates | None) -> None:
        """Let the model of this rank exchange values with the other ranks. Can be called again.

        Args:
            model: of this rank.
            aux: keeps the hidden states of this rank that a draft head reads; None = none.

        Raises:
            StartupError: a model of this class is not divided into stages.
        """
        if self._group is not None:
            join_group(model, self._group)
        if self._previous is None and self._next is None:
            return
        if not isinstance(model, Decoder):
            raise StartupError(
                f"{type(model).__name__} is not divided into stages; set parallel.pipeline=1"
            )
        model.join_stages(self._previous, self._next, aux)

    def abort(self) -> None:
        """End all waits of this rank with an error. Any thread can call it."""
        if self._group is not None:
            self._group.abort()
        for end in (self._previous, self._next):
            if end is not None:
                end.abort()

    def close(self) -> None:
        """Close the links. No step may follow."""
        if self._group is not None:
            self._group.close()
        for end in (self._previous, self._next):
            if end is not None:
                end.close()
