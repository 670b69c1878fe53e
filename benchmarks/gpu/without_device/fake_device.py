"""Makes torch, Inductor and Triton compile for a GPU that is absent, from its description.

A description is a file of benchmarks/machine/gpus/. Compilers find the described GPU as the only
CUDA device.

Nothing runs: tensors are fake (shapes without memory), and a kernel that would be launched raises
an error. The functions through which compilers query the device are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ostinato.benchmarks.machine.described_device import DescribedDevice
from ostinato.benchmarks.machine.device_guard import install_device_guard

__all__ = ("fake_device", "replaced")

_REGISTERS = 64 * 1024  # registers of a multiprocessor


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner`, also new ones, and restore or remove them at the end."""
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def fake_device(device: DescribedDevice) -> Iterator[None]:
    """Inside, the only CUDA device is the described one. Use one device in a process.

    Args:
        device: the description.
    """
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import fuse_attention
    from torch._inductor.runtime import triton_helpers

    install_device_guard()
    properties = _properties(device)
    answers: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *arguments: properties,
        "get_device_capability": lambda *arguments: device.capability,
        "get_device_name": lambda *arguments: device.name,
        "mem_get_info": lambda *arguments: (device.memory_bytes, device.memory_bytes),
        "get_rng_state": lambda *arguments: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *arguments: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    interface = {
        "is_available": staticmethod(lambda: True),
        "current_device": staticmethod(lambda: 0),
        "get_compute_capability": staticmethod(lambda index=None: device.arch),
        "get_device_properties": staticmethod(lambda index=None: properties),
    }
    worker = {
        "get_device_properties": staticmethod(lambda index=None: properties),
        "current_device": staticmethod(lambda: 0),
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, **answers))
        # torch.tensor(..., device="cuda") would otherwise allocate.
        stack.enter_context(replaced(FakeTensorMode, avoid_device_init=True))
        # A build of torch with CUDA would allocate a real tensor for the first fake one.
        stack.enter_context(replaced(fake_tensor, init_gpu_context=lambda device: None))
        # Before it compiles, Inductor would trace patterns of torch's own attention, in order to
        # recognise them in programs. Tracing them needs a GPU. The patterns are left out, because
        # no compiled layer calls that attention.
        stack.enter_context(replaced(fuse_attention, _sfdp_init=lambda device=None: None))
        stack.enter_context(replaced(CudaInterface, **interface))
        stack.enter_context(replaced(CudaInterface.Worker, **worker))
        stack.enter_context(replaced(torch._C, _cuda_getCurrentRawStream=lambda index: 0))
        stack.enter_context(replaced(triton_helpers, set_driver_to_gpu=lambda: None))
        stack.enter_context(replaced(driver, _active=_Driver(device)))
        yield


def _properties(device: DescribedDevice) -> SimpleNamespace:
    """The result of `torch.cuda.get_device_properties` for the device."""
    return SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=device.multiprocessors,
        total_memory=device.memory_bytes,
        warp_size=32,
        max_threads_per_multi_processor=device.threads_per_multiprocessor,
        regs_per_multiprocessor=_REGISTERS,
        max_threads_per_block=1024,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=device.shared_per_program,
        shared_memory_per_multiprocessor=device.shared_per_multiprocessor,
        L2_cache_size=device.l2_bytes,
        gcnArchName="",
        is_integrated=False,
    )


class _Driver:
    """The functions of a driver that Triton needs to compile. It cannot load or launch kernels."""

    def __init__(self, device: DescribedDevice) -> None:
        self._device = device
        properties = {
            "max_shared_mem": device.shared_per_program,
            "max_num_regs": _REGISTERS,
            "multiprocessor_count": device.multiprocessors,
            "warpSize": 32,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda index: properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._device.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)
