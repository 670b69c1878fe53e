"""Divides cores and memory between the ranks of an engine."""

from __future__ import annotations

import dataclasses

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import DeviceConfig
from ostinato.runtime.host_resources import available_cores, free_host_memory

__all__ = ("divide_device", "share_of_rank")

_GIB = 1 << 30


def share_of_rank(config: EngineConfig, *, on_gpu: bool = False) -> EngineConfig:
    """The configuration of one rank, with its part of this machine's cores and free memory.

    With `on_gpu` each rank has the memory of its own GPU, unless `device.memory_gib` is set.
    """
    device = divide_device(
        config.device,
        config.parallel.ranks_per_machine,
        cores=available_cores(),
        free_bytes=None if on_gpu else free_host_memory().free_bytes,
    )
    return dataclasses.replace(config, device=device)


def divide_device(
    device: DeviceConfig, num_ranks: int, *, cores: int, free_bytes: int | None
) -> DeviceConfig:
    """An equal part of the cores and the memory for each rank.

    Args:
        device: `threads` and `memory_gib` are those of these ranks together; None = all there is.
        num_ranks: ranks of the engine on this machine, at least 1.
        cores: the cores that this process may use.
        free_bytes: free memory that the ranks share; None = each has the memory of its GPU, unless
            `device.memory_gib` is set.
    """
    limits = [] if device.memory_gib is None else [device.memory_gib]
    limits += [] if free_bytes is None else [free_bytes / _GIB]
    return dataclasses.replace(
        device,
        threads=max(1, (device.threads or cores) // num_ranks),
        memory_gib=min(limits) / num_ranks if limits else None,
    )
