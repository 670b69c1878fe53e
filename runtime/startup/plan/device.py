"""Chooses the device and the number of CPU threads at start-up."""

from __future__ import annotations

import torch

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import DeviceConfig, DeviceName, InstructionSetName
from ostinato.ops.native.library import use_isa
from ostinato.ops.parallel.distributed_group import has_nccl
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores

__all__ = ("choose_gpu", "choose_isa", "gpu_of_rank", "resolve_device", "set_threads")


def set_threads(config: DeviceConfig) -> int:
    """Set the number of torch threads for the model; returns it."""
    threads = config.threads or available_cores()
    torch.set_num_threads(threads)
    return threads


def choose_isa(config: DeviceConfig, *, is_cpu: bool) -> None:
    """Let the CPU kernels use the instruction set of the configuration, if it names one.

    Raises:
        StartupError: the machine does not run the instruction set, the process already uses
            another one, or the model does not run on a CPU.
    """
    if config.isa is InstructionSetName.auto:
        return
    setting = f"device.isa={config.isa}"
    if not is_cpu:
        raise StartupError(f"{setting} is for CPUs; leave it out, or set device.name=cpu")
    try:
        use_isa(config.isa.value)
    except ValueError as error:
        raise StartupError(f"{setting}: {error}; device.isa=auto works here") from error


def resolve_device(name: DeviceName) -> torch.device:
    """The device to run on.

    Raises:
        StartupError: device.name=cuda, but torch sees no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if name is DeviceName.cuda and not has_cuda:
        raise StartupError(
            "device.name=cuda, but torch sees no CUDA device; install a CUDA build of torch or use "
            "device.name=cpu"
        )
    if name is DeviceName.cpu or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_gpu(config: EngineConfig, rank: int) -> None:
    """Make the GPU of a rank the current device of its process. On a CPU it does nothing.

    An engine of one rank keeps the current device.

    Raises:
        StartupError: there are fewer GPUs than ranks; or parallel.tensor is above 1 and this build
            of torch has no NCCL; or device.name=cuda and torch sees no CUDA device.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1 or resolve_device(config.device.name).type == "cpu":
        return
    if parallel.tensor > 1 and not has_nccl():
        raise StartupError(
            f"parallel.tensor={parallel.tensor}: this build of torch has no NCCL, by which GPUs "
            "exchange values; install one that has it, or set device.name=cpu"
        )
    place = rank % parallel.ranks_per_machine
    torch.cuda.set_device(gpu_of_rank(place, parallel.ranks_per_machine, torch.cuda.device_count()))


def gpu_of_rank(place: int, num_ranks: int, num_gpus: int) -> int:
    """The index of a rank's GPU. No two ranks of an engine have the same one.

    Args:
        place: number of the rank among those of its engine on this machine.
        num_ranks: ranks of the engine on this machine.
        num_gpus: GPUs that this process sees.

    Raises:
        StartupError: there are fewer GPUs than ranks.
    """
    if num_gpus < num_ranks:
        raise StartupError(
            f"an engine of {num_ranks} ranks needs {num_ranks} GPUs, one for each rank, and this "
            f"process sees {num_gpus}; set parallel.tensor x parallel.pipeline to "
            f"{max(1, num_gpus)} or less, or device.name=cpu"
        )
    return place
