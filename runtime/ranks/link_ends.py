"""Makes the links between the ranks of an engine on one machine: memory and sockets without names.

A link to a rank on another machine has its other end in the bridge of this machine (relay.py). The
rank uses this link like a link to a rank on the same machine.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ostinato.models.sharding import Shard, shard_of_rank
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.handoff_ends import create_handoff
from ostinato.ops.parallel.segment import create_segment

__all__ = (
    "GroupEnd",
    "MachineLinks",
    "RankLayout",
    "RelayEnds",
    "SlotsEnd",
    "close_all",
    "create_links",
)


class RankLayout(NamedTuple):
    """Which ranks an engine has, and on which of its machines they are."""

    tensor: int  # ranks of each stage
    pipeline: int  # stages; also the most steps in flight
    machines: int = 1  # a divisor of the number of ranks; machine 0 has rank 0

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def ranks_per_machine(self) -> int:
        return self.num_ranks // self.machines

    def ranks_of(self, machine: int) -> range:
        """The ranks on a machine."""
        return range(machine * self.ranks_per_machine, (machine + 1) * self.ranks_per_machine)

    def machine_of(self, rank: int) -> int:
        """The machine of a rank."""
        return rank // self.ranks_per_machine

    def members(self, stage: int) -> list[int]:
        """The ranks of a stage, in the order of its tensor-parallel group."""
        shards = [shard_of_rank(rank, self.tensor, self.pipeline) for rank in range(self.num_ranks)]
        found = [rank for rank, shard in enumerate(shards) if shard.stage.number == stage]
        return sorted(found, key=lambda rank: shards[rank].rank)

    def machines_of(self, stage: int) -> list[int]:
        """The machines with ranks of a stage."""
        return sorted({self.machine_of(rank) for rank in self.members(stage)})

    @property
    def has_spread_groups(self) -> bool:
        """Whether the group of any rank has members on several machines."""
        stages = range(self.pipeline) if self.tensor > 1 else ()
        return any(len(self.machines_of(stage)) > 1 for stage in stages)

    def group_is_spread(self, shard: Shard) -> bool:
        """Whether the group of a rank has members on several machines."""
        return shard.size > 1 and len(self.machines_of(shard.stage.number)) > 1


class GroupEnd(msgspec.Struct, frozen=True, array_like=True):
    """The bridge's end of a tensor-parallel group with ranks on several machines."""

    stage: int
    world: int
    segment: int  # descriptor of the group's memory
    notices: dict[int, int]  # descriptor of an eventfd for each member here, by place in the group
    machines: list[int]  # the other machines of the group


class SlotsEnd(msgspec.Struct, frozen=True, array_like=True):
    """The bridge's end of a handoff to or from a stage on another machine."""

    stage: int  # the stage that computes the values
    place: int  # index of both ranks in their groups
    memory: int  # descriptor
    socket: int  # descriptor
    machine: int  # the machine of the other stage


class RelayEnds(msgspec.Struct, frozen=True, array_like=True):
    """All ends that the bridge of a machine holds."""

    slot_bytes: int  # bytes of a slot of each handoff
    exchange: Exchange  # how the ranks of a group exchange values
    groups: list[GroupEnd]  # empty if torch.distributed carries their values
    leaving: list[SlotsEnd]  # carry values from stages of this machine
    arriving: list[SlotsEnd]  # carry values to stages of this machine

    def descriptors(self) -> list[int]:
        """All descriptors, in the order in which `with_descriptors` reads them."""
        found: list[int] = []
        for group in self.groups:
            found += [group.segment, *group.notices.values()]
        for end in (*self.leaving, *self.arriving):
            found += [end.memory, end.socket]
        return found

    def with_descriptors(self, descriptors: Sequence[int]) -> RelayEnds:
        """The same ends as another process holds them, with the descriptors that it received."""
        left = iter(descriptors)
        return RelayEnds(
            self.slot_bytes,
            self.exchange,
            [
                msgspec.structs.replace(
                    group, segment=next(left), notices={one: next(left) for one in group.notices}
                )
                for group in self.groups
            ],
            [_moved(end, left) for end in self.leaving],
            [_moved(end, left) for end in self.arriving],
        )


class MachineLinks(NamedTuple):
    """The descriptors of the links of one machine."""

    ranks: list[list[int]]  # the descriptors of each rank of the machine, for `RankLinks`
    relay: RelayEnds  # the ends for the bridge


def create_links(
    layout: RankLayout,
    machine: int,
    slot_bytes: int,
    exchange: Exchange = Exchange.shared_memory,
) -> MachineLinks:
    """Make the links of the ranks on one machine.

    Args:
        layout: the ranks of the engine.
        machine: 0 to layout.machines - 1.
        slot_bytes: bytes of a slot of each handoff.
        exchange: how ranks exchange values. Only an exchange by shared memory needs links.

    Raises:
        OSError: the system has no memory or no descriptors for the links.
    """
    here = layout.ranks_of(machine)
    held: dict[int, list[int]] = {rank: [] for rank in here}
    relay = RelayEnds(slot_bytes, exchange, [], [], [])
    try:
        if layout.tensor > 1 and not exchange.is_distributed:
            for stage in range(layout.pipeline):
                _link_group(layout, machine, stage, held, relay)
        for stage in range(layout.pipeline - 1):  # the receiver of a rank comes before its sender
            _link_stages(layout, machine, stage, held, relay)
    except OSError:
        close_all([*held.values(), relay.descriptors()])
        raise
    return MachineLinks(list(held.values()), relay)


def _link_group(
    layout: RankLayout, machine: int, stage: int, held: dict[int, list[int]], relay: RelayEnds
) -> None:
    members, machines = layout.members(stage), layout.machines_of(stage)
    if machine not in machines:
        return
    segment = create_segment(len(members))
    notices: dict[int, int] = {}
    try:
        for place, rank in enumerate(members):
            if rank not in held:
                continue
            held[rank].append(os.dup(segment))
            if len(machines) > 1:
                notices[place] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                held[rank].append(os.dup(notices[place]))
    except OSError:
        close_all([[segment, *notices.values()]])
        raise
    if len(machines) == 1:
        os.close(segment)
        return
    others = [one for one in machines if one != machine]
    relay.groups.append(GroupEnd(stage, len(members), segment, notices, others))


def _link_stages(
    layout: RankLayout, machine: int, stage: int, held: dict[int, list[int]], relay: RelayEnds
) -> None:
    pairs = zip(layout.members(stage), layout.members(stage + 1), strict=True)
    for place, (before, after) in enumerate(pairs):
        if before not in held and after not in held:
            continue
        sender, receiver = create_handoff(relay.slot_bytes, layout.pipeline)
        if before in held:
            held[before] += sender
        else:
            other = layout.machine_of(before)
            relay.arriving.append(SlotsEnd(stage, place, *sender, other))
        if after in held:
            held[after] += receiver
        else:
            other = layout.machine_of(after)
            relay.leaving.append(SlotsEnd(stage, place, *receiver, other))


def close_all(descriptors: Sequence[Sequence[int]]) -> None:
    """Close descriptors that were passed to other processes, or are not needed."""
    for each in descriptors:
        for descriptor in each:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _moved(end: SlotsEnd, left: Iterator[int]) -> SlotsEnd:
    return msgspec.structs.replace(end, memory=next(left), socket=next(left))
