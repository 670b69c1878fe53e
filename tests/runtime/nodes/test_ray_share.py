"""The resources that an engine requests from a Ray cluster, checked without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.conf.compose import load_config
from ostinato.runtime.errors import StartupError
from ostinato.runtime.nodes.ray_nodes import count_parts, count_room, share_cluster

GIB = float(1 << 30)


def test_an_engine_has_the_cores_of_its_ranks_or_threads() -> None:
    nodes = [{"CPU": 4.0, "memory": 8 * GIB}, {"CPU": 4.0, "memory": 6 * GIB}]
    config = load_config(["parallel.executor=ray", "parallel.tensor=2", "parallel.data=2"]).engine
    share = share_cluster(config, nodes)
    assert share.demand == {"CPU": 2}
    assert share.config.device.threads == 2
    assert share.config.device.memory_gib == 3  # both engines may be on the second machine
    divided = ["parallel.executor=ray", "parallel.tensor=4", "parallel.nodes=2"]
    config = load_config(divided).engine
    assert count_parts(config) == 2
    assert share_cluster(config, nodes).demand == {"CPU": 2}
    config = load_config(["parallel.executor=ray", "device.threads=3"]).engine
    share = share_cluster(config, nodes)
    assert share.demand == {"CPU": 3}
    assert share.config.device.memory_gib == 6


def test_an_engine_on_gpus_has_one() -> None:
    config = load_config(["parallel.executor=ray", "parallel.data=3"]).engine
    share = share_cluster(config, [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}])
    assert share.demand == {"CPU": 1, "GPU": 1}
    assert share.config.device == config.device


def test_a_part_of_an_engine_has_a_gpu_for_each_of_its_ranks() -> None:
    divided = ["parallel.executor=ray", "parallel.tensor=4", "parallel.nodes=2"]
    config = load_config([*divided, "device.name=cuda"]).engine
    share = share_cluster(config, [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}])
    assert share.demand == {"CPU": 2, "GPU": 2}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["parallel.data=5", "device.threads=1"],
            "5 x (CPU 1) is needed, each on one machine, and",
        ),
        (["parallel.tensor=3"], "the cluster has room for 0 of them: CPU 2; CPU 2; lower"),
        (["device.name=cuda"], "1 x (CPU 1, GPU 1) is needed"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_the_cluster_has(
    overrides: list[str], words: str
) -> None:
    config = load_config(["parallel.executor=ray", *overrides]).engine
    with pytest.raises(StartupError, match=r"parallel\.executor=ray") as caught:
        share_cluster(config, [{"CPU": 2.0}, {"CPU": 2.0}])
    assert words in str(caught.value)


@given(
    st.lists(
        st.fixed_dictionaries({"CPU": st.integers(0, 9), "GPU": st.integers(0, 3)}), max_size=5
    ),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_the_room_of_a_cluster_is_what_can_be_placed_one_by_one(
    nodes: list[dict[str, int]], cpus: int, gpus: int
) -> None:
    demand = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    left = [dict(node) for node in nodes]
    placed = 0
    while node := next((n for n in left if all(n[k] >= v for k, v in demand.items())), None):
        for name, amount in demand.items():
            node[name] -= amount
        placed += 1
    assert count_room(nodes, demand) == placed
