"""Which links (memory and sockets between ranks) the ranks and the bridge of a machine get."""

from __future__ import annotations

import os

import pytest

from ostinato.models.sharding import shard_of_rank
from ostinato.ops.parallel.exchange import Exchange
from ostinato.runtime.ranks.link_ends import RankLayout, close_all, create_links

SLOT_BYTES = 4096
LAYOUTS = [
    RankLayout(tensor, pipeline, machines)
    for tensor in (1, 2, 4)
    for pipeline in (1, 2, 3)
    for machines in range(1, tensor * pipeline + 1)
    if tensor * pipeline % machines == 0
]


@pytest.mark.parametrize("exchange", [Exchange.shared_memory, Exchange.nccl])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_its_links_and_each_link_between_machines_two_bridges(
    layout: RankLayout, exchange: Exchange
) -> None:
    """With NCCL, tensor-parallel groups have no link. Links between stages are as on CPUs."""
    has_groups = not exchange.is_distributed
    made = [
        create_links(layout, machine, SLOT_BYTES, exchange) for machine in range(layout.machines)
    ]
    try:
        counts = [len(held) for links in made for held in links.ranks]
        for rank, count in enumerate(counts):
            shard = shard_of_rank(rank, layout.tensor, layout.pipeline)
            neighbours = (not shard.stage.is_first) + (not shard.stage.is_last)
            own = has_groups * ((shard.size > 1) + layout.group_is_spread(shard))
            assert count == own + 2 * neighbours
        leaving = [
            (one.stage, one.place, number, one.machine)
            for number, links in enumerate(made)
            for one in links.relay.leaving
        ]
        arriving = [
            (one.stage, one.place, one.machine, number)
            for number, links in enumerate(made)
            for one in links.relay.arriving
        ]
        assert sorted(leaving) == sorted(arriving)
        for number, links in enumerate(made):
            assert links.relay.exchange is exchange
            assert has_groups or not links.relay.groups
            for group in links.relay.groups:
                assert sorted([number, *group.machines]) == layout.machines_of(group.stage)
        if layout.machines == 1:
            assert made[0].relay.descriptors() == []
    finally:
        for links in made:
            close_all([*links.ranks, links.relay.descriptors()])


def test_a_stage_is_on_one_machine_where_that_is_possible() -> None:
    layout = RankLayout(tensor=2, pipeline=2, machines=2)
    assert layout.members(1) == [0, 1]
    assert layout.machines_of(1) == [0]
    assert layout.machines_of(0) == [1]
    assert not layout.group_is_spread(shard_of_rank(0, 2, 2))
    assert not layout.has_spread_groups
    # Stages 0 and 2 are on one machine each, and stage 1 is on both.
    layout = RankLayout(tensor=4, pipeline=3, machines=2)
    assert not layout.group_is_spread(shard_of_rank(0, 4, 3))
    assert layout.has_spread_groups


def test_ends_keep_their_order_in_another_process() -> None:
    layout = RankLayout(tensor=2, pipeline=2, machines=4)
    links = create_links(layout, 0, SLOT_BYTES)
    try:
        own = links.relay.descriptors()
        moved = [os.dup(one) for one in own]
        there = links.relay.with_descriptors(moved)
        assert there.descriptors() == moved
        assert there.groups[0].stage == links.relay.groups[0].stage
        close_all([moved])
    finally:
        close_all([*links.ranks, links.relay.descriptors()])
