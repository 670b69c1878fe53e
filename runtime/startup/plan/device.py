"""Chooses the device and the number of CPU threads at start-up."""

from __future__ import annotations

import torch

from ostinato.conf.schema import DeviceConfig, DeviceName, InstructionSetName
from ostinato.ops.native.library import use_isa
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores

__all__ = ("choose_isa", "resolve_device", "set_threads")


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
        raise StartupError(f"{setting}: {error}; or leave it at auto") from error


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
