"""Chooses the device and the number of CPU threads at start-up."""

from __future__ import annotations

import torch

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import DeviceConfig, DeviceName, InstructionSetName
from ostinato.conf.sections.server_schema import ParallelConfig
from ostinato.ops.native.library import use_isa
from ostinato.ops.parallel.distributed_group import has_nccl
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores

__all__ = ("choose_gpu", "choose_isa", "gpu_of_rank", "resolve_device", "set_threads")


def set_threads(config: DeviceConfig) -> int:
    """Set the number of torch threads for the model; returns the number."""
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
            "exchange values; install a build with NCCL, or set device.name=cpu"
        )
    torch.cuda.set_device(gpu_of_rank(parallel, rank, torch.cuda.device_count()))


def gpu_of_rank(parallel: ParallelConfig, rank: int, num_gpus: int) -> int:
    """The index of a rank's GPU on its machine. Two ranks of an engine never share a GPU.

    Args:
        parallel: the ranks of the engine, and its machines.
        rank: number of the rank in its engine.
        num_gpus: GPUs that this process sees.

    Raises:
        StartupError: there are fewer GPUs than ranks of the engine on this machine.
    """
    here = parallel.ranks_per_machine
    if num_gpus < here:
        raise StartupError(_why_too_few_gpus(parallel, rank // here, num_gpus))
    return rank % here


def _why_too_few_gpus(parallel: ParallelConfig, machine: int, num_gpus: int) -> str:
    """The error of a machine with too few GPUs: all ranks with their machines, and the remedies."""
    num_ranks, machines = parallel.num_ranks, parallel.machines_per_engine
    here, fitting = parallel.ranks_per_machine, max(1, num_gpus)
    subject = f"an engine of {num_ranks} ranks"
    fewer_ranks = f"parallel.tensor x parallel.pipeline to {fitting * machines} or less"
    if machines == 1:
        return (
            f"{subject} needs {num_ranks} GPUs, one for each rank, and this process sees "
            f"{num_gpus}; set {fewer_ranks}, or device.name=cpu"
        )
    places = (_ranks_on(one, here) for one in range(machines))
    # With as many machines as ranks, one GPU on each is enough.
    more = next(
        count
        for count in range(machines, num_ranks + 1)
        if num_ranks % count == 0 and num_ranks // count <= fitting
    )
    each = "a GPU" if here == 1 else f"{here} GPUs"
    return (
        f"{subject} needs {each} on each of its {machines} machines, one for each rank "
        f"({'; '.join(places)}), and on machine {machine} this process sees {num_gpus}; set "
        f"parallel.nodes to {parallel.data * more}, {fewer_ranks}, or device.name=cpu"
    )


def _ranks_on(machine: int, count: int) -> str:
    first = machine * count
    ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
    return f"machine {machine}: {ranks}"
