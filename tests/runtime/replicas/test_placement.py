"""How cores, memory and GPUs are divided between replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.conf.compose import load_config
from ostinato.runtime.errors import StartupError
from ostinato.runtime.replicas.placement import Placement, divide, place_replicas

GIB = 1 << 30
CONFIG = load_config(["device.name=cpu"]).engine


def shares(placements: list[Placement]) -> list[tuple[int | None, float | None]]:
    return [(one.config.device.threads, one.config.device.memory_gib) for one in placements]


def test_one_replica_has_the_whole_machine() -> None:
    assert place_replicas(CONFIG, 1) == [Placement(config=CONFIG)]


@pytest.mark.parametrize(("count", "threads"), [(2, 4), (3, 2), (8, 1), (20, 1)])
def test_cores_and_memory_are_divided_equally(count: int, threads: int) -> None:
    found = divide(CONFIG, count, cores=8, free_bytes=24 * GIB, gpus=[])
    assert shares(found) == [(threads, 24 / count)] * count
    assert [one.gpus for one in found] == [None] * count


def test_what_is_set_counts_for_each_replica() -> None:
    device = replace(CONFIG.device, threads=3, memory_gib=5.0)
    found = divide(replace(CONFIG, device=device), 2, cores=8, free_bytes=24 * GIB, gpus=[])
    assert shares(found) == [(3, 5.0)] * 2


def test_every_replica_has_a_gpu_of_its_own() -> None:
    found = divide(CONFIG, 2, cores=8, free_bytes=24 * GIB, gpus=["0", "GPU-5", "2"])
    assert [one.gpus for one in found] == ["0", "GPU-5"]
    assert shares(found) == [(None, None)] * 2


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(StartupError, match=r"3 engines on this machine need a GPU each.* 2;"):
        divide(CONFIG, 3, cores=8, free_bytes=24 * GIB, gpus=["0", "1"])


def test_a_replica_of_several_ranks_has_a_gpu_for_each() -> None:
    config = load_config(["parallel.tensor=2"]).engine
    gpus = ["0", "GPU-5", "2", "3", "7"]
    found = divide(config, 2, cores=8, free_bytes=24 * GIB, gpus=gpus)
    assert [one.gpus for one in found] == ["0,GPU-5", "2,3"]
    with pytest.raises(
        StartupError, match=r"3 engines on this machine need 2 GPUs each, .* sees 5;"
    ):
        divide(config, 3, cores=8, free_bytes=24 * GIB, gpus=gpus)


def test_the_gpus_that_the_user_allows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    found = place_replicas(load_config().engine, 2)
    assert [one.gpus for one in found] == ["3", "1"]
    assert place_replicas(CONFIG, 2)[0].gpus is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert place_replicas(load_config().engine, 2)[0].gpus is None
