"""The links of a rank: to its tensor-parallel group, the previous stage and the next stage.

link_ends.py makes their memory and sockets, and each rank is passed the descriptors of its own
links. If torch.distributed carries the values of a group, its ranks find each other through the
meetings of the start (messages.py). Such a group needs no descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from ostinato.conf.environment import choose_nccl_interface
from ostinato.models.base import AuxStates, LanguageModel
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import join_group
from ostinato.models.sharding import Shard
from ostinato.ops.parallel.distributed_group import DistributedGroup, GroupEndedError
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.handoff import HiddenReceiver, HiddenSender, HiddenShape
from ostinato.ops.parallel.handoff_ends import HandoffEnd
from ostinato.ops.parallel.staged_handoff import StagedReceiver, StagedSender
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores
from ostinato.runtime.ranks.link_ends import RankLayout, close_all
from ostinato.runtime.secure_connection import interface_of

__all__ = ("RankLinks",)

# The processes are watched, so a wait hardly needs a limit. This limit is for a stop that the watch
# does not notice. It is longer than any step.
_LONGEST_WAIT_S = 1800.0
_REMEDY = (
    "; check that firewalls let the machines connect to each other at every port, and that "
    "parallel.host, or NCCL_SOCKET_IFNAME, is of the network between them"
)


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
        host: str = "127.0.0.1",
    ) -> None:
        """Open the links, and close the descriptors.

        Args:
            layout: the ranks of the engine.
            shard: the shard of the rank.
            shape: the shape of the hidden states that stages hand on.
            threads: the model's threads in each rank.
            descriptors: from `create_links`.
            exchange: as in `create_links`.
            host: the address at which the ranks of other machines reach this machine.

        Raises:
            StartupError: a link cannot be opened.
        """
        self._shard = shard
        self._has_spread_groups = layout.has_spread_groups
        is_spread = layout.group_is_spread(shard)
        self._group: ParallelGroup | DistributedGroup | None = None
        self._previous: HiddenReceiver | StagedReceiver | None = None
        self._next: HiddenSender | StagedSender | None = None
        self._unconnected: DistributedGroup | None = None
        left = list(descriptors)
        try:
            if exchange.is_distributed and shard.size > 1:
                if is_spread and exchange is Exchange.nccl:
                    choose_nccl_interface(interface_of(host))
                address = host if is_spread else "127.0.0.1"
                self._group = DistributedGroup(shard.rank, shard.size, exchange, host=address)
                self._unconnected = self._group
            elif shard.size > 1:
                # A waiting rank spins only if each rank has cores of its own. Otherwise it would
                # take the processor of the rank that it waits for. It does not spin while it waits
                # for another machine, because the network takes longer.
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
            if exchange.is_distributed:
                self._stage(shape, torch.device("cuda" if exchange is Exchange.nccl else "cpu"))
        except (RuntimeError, ValueError, OSError) as error:
            close_all([left])
            self.close()
            raise StartupError(f"a rank cannot join the others: {error}") from error

    def _stage(self, shape: HiddenShape, device: torch.device) -> None:
        """Let the model use tensors of its device, so that steps can be captured."""
        if isinstance(self._previous, HiddenReceiver):
            self._previous = StagedReceiver(self._previous, shape, device)
        if isinstance(self._next, HiddenSender):
            self._next = StagedSender(self._next, shape, device)

    def connect(self, meet: Callable[[str, list[int]], list[list[int]]]) -> None:
        """Connect to the other ranks, which do the same now. Shared memory needs no connection.

        Args:
            meet: exchanges numbers with all other ranks of the engine.

        Raises:
            StartupError: on rank 0, a rank cannot connect, or not in time.
            GroupEndedError: on another rank, for the same reason.
        """
        group, self._unconnected = self._unconnected, None
        if group is None:
            return
        try:
            group.connect(
                lambda data: [bytes(row) for row in meet("connect", list(data))],
                str(self._shard.stage.number),
            )
        except GroupEndedError as error:
            if not self._shard.is_leader:
                raise  # rank 0 reports it
            remedy = _REMEDY if self._has_spread_groups else ""
            raise StartupError(f"ranks cannot exchange values: {error}{remedy}") from error

    def arrive(self, num_tokens: int) -> None:
        """Before a step: bring the hidden states of the previous stage to the device.

        Raises:
            HandoffEndedError: the rank of the previous stage has ended.
        """
        if isinstance(self._previous, StagedReceiver):
            self._previous.arrive(num_tokens)

    def leave(self, num_tokens: int) -> None:
        """After the launch of a step: let its hidden states be passed to the next stage.

        Raises:
            HandoffEndedError: the rank of the next stage has ended.
        """
        if isinstance(self._next, StagedSender):
            self._next.leave(num_tokens)

    def join(self, model: LanguageModel, aux: AuxStates | None) -> None:
        """Let the model of this rank exchange values with the other ranks. Can be called again.

        Args:
            model: the model of this rank.
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
        if aux is not None and not aux.has_final:
            if isinstance(self._previous, StagedReceiver):
                self._previous.num_states = 1 + aux.num_earlier
            if isinstance(self._next, StagedSender):
                self._next.num_states = 1 + aux.num_earlier + len(aux.layers)
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
