"""Each rank's part of a machine's cores and memory."""

from __future__ import annotations

import pytest

from ostinato.conf.schema import DeviceConfig
from ostinato.runtime.ranks.rank_share import divide_device

GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "num_ranks", "threads", "memory_gib"),
    [
        (DeviceConfig(), 2, 4, 8.0),
        (DeviceConfig(), 3, 2, 16 / 3),
        (DeviceConfig(), 16, 1, 1.0),
        (DeviceConfig(threads=6, memory_gib=4), 2, 3, 2.0),
        (DeviceConfig(threads=1), 2, 1, 8.0),
        (DeviceConfig(memory_gib=64), 2, 4, 8.0),
    ],
)
def test_ranks_get_equal_parts_of_what_is_there(
    device: DeviceConfig, num_ranks: int, threads: int, memory_gib: float
) -> None:
    found = divide_device(device, num_ranks, cores=8, free_bytes=16 * GIB)
    assert (found.threads, found.memory_gib) == (threads, memory_gib)


def test_ranks_on_gpus_have_the_memory_of_their_gpus() -> None:
    found = divide_device(DeviceConfig(), 2, cores=8, free_bytes=None)
    assert (found.threads, found.memory_gib) == (4, None)
    found = divide_device(DeviceConfig(memory_gib=32), 2, cores=8, free_bytes=None)
    assert found.memory_gib == 16.0
