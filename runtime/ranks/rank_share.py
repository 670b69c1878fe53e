"""Divides a CPU's cores and memory between the ranks of an engine."""

from __future__ import annotations

import dataclasses

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import DeviceConfig
from ostinato.runtime.host_resources import available_cores, free_host_memory

__all__ = ("divide_device", "share_of_rank")

_GIB = 1 << 30


def share_of_rank(config: EngineConfig) -> EngineConfig:
    """The configuration of one rank: with its part of this machine's cores and free memory."""
    device = divide_device(
        config.device,
        config.parallel.ranks_per_machine,
        cores=available_cores(),
        free_bytes=free_host_memory().free_bytes,
    )
    return dataclasses.replace(config, device=device)


def divide_device(
    device: DeviceConfig, num_ranks: int, *, cores: int, free_bytes: int
) -> DeviceConfig:
    """An equal part of a CPU for each rank.

    Args:
        device: `threads` and `memory_gib` are those of these ranks together; None = all there is.
        num_ranks: those on this machine, at least 1.
        cores: the cores that this process may use.
        free_bytes: free memory of the host.
    """
    free_gib = free_bytes / _GIB
    free_gib = free_gib if device.memory_gib is None else min(device.memory_gib, free_gib)
    return dataclasses.replace(
        device,
        threads=max(1, (device.threads or cores) // num_ranks),
        memory_gib=free_gib / num_ranks,
    )
