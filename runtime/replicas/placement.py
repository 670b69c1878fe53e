"""Divides the machine between the replicas of a server: cores and memory, or GPUs.

On a CPU every replica gets an equal part of the cores, and of the memory that was free before the
first replica started. So all replicas have the same limits, also after a restart. On a machine with
GPUs every replica has GPUs of its own, one for each of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.environment import visible_gpus
from ostinato.conf.schema import DeviceName
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores, free_host_memory

__all__ = ("Placement", "divide", "place_replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The part of the machine that one replica has."""

    config: EngineConfig
    # the only GPUs that its process sees, separated by commas; None = the GPUs of this process
    gpus: str | None = None


def place_replicas(config: EngineConfig, num_replicas: int) -> list[Placement]:
    """The placement of each replica on this machine. One replica has the whole machine.

    Raises:
        StartupError: there are fewer GPUs than ranks of all replicas.
    """
    if num_replicas == 1:
        return [Placement(config=config)]
    gpus = [] if config.device.name is DeviceName.cpu else _find_gpus()
    return divide(
        config,
        num_replicas,
        cores=available_cores(),
        free_bytes=free_host_memory().free_bytes,
        gpus=gpus,
    )


def divide(
    config: EngineConfig, num_replicas: int, *, cores: int, free_bytes: int, gpus: Sequence[str]
) -> list[Placement]:
    """The placements of several replicas on a machine with the given resources.

    Args:
        config: the engines' configuration. `device.threads` and `device.memory_gib` are limits of
            each replica.
        num_replicas: at least 1.
        cores: number of cores that this process may use.
        free_bytes: free memory of the host.
        gpus: indices or UUIDs of the GPUs; empty = the replicas run on the CPU.

    Raises:
        StartupError: there are fewer GPUs than ranks of all replicas.
    """
    if gpus:
        num_ranks = config.parallel.num_ranks
        if len(gpus) < num_replicas * num_ranks:
            needed = "a GPU each" if num_ranks == 1 else f"{num_ranks} GPUs each, one for each rank"
            raise StartupError(
                f"{num_replicas} engines on this machine need {needed}, and this process sees "
                f"{len(gpus)}; lower parallel.data, or set device.name=cpu"
            )
        parts = [gpus[number * num_ranks :][:num_ranks] for number in range(num_replicas)]
        return [Placement(config=config, gpus=",".join(part)) for part in parts]
    device = config.device
    if device.threads is None:
        device = replace(device, threads=max(1, cores // num_replicas))
    if device.memory_gib is None:
        device = replace(device, memory_gib=free_bytes / num_replicas / (1 << 30))
    return [Placement(config=replace(config, device=device)) for _ in range(num_replicas)]


def _find_gpus() -> list[str]:
    """The GPUs that this process may use.

    If CUDA_VISIBLE_DEVICES is set, it names them. Otherwise they are all that the driver reports.
    The list is empty without a driver.
    """
    named = visible_gpus()
    if named is not None:
        return named
    import pynvml

    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
