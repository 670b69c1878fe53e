"""Describes this machine for start-up lines and benchmark records: processor, GPUs, versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import pynvml

__all__ = ("cpu_name", "gpu_names", "package_versions")

_PACKAGES = ("ostinato", "torch", "triton", "transformers", "flashinfer-python")


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and the cores that this process may run on: "AMD EPYC 9B45, 2 cores"."""
    name = platform.processor() or platform.machine()
    try:
        lines = cpuinfo.read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass  # not Linux, or a processor without a name there: the platform's name is used
    cores = (
        len(psutil.Process().cpu_affinity()) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}"


def gpu_names() -> list[str]:
    """Name, memory and driver of every NVIDIA GPU; empty without a driver. Does not start CUDA."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        names: list[str] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            name = pynvml.nvmlDeviceGetName(handle)
            names.append(f"{name}, {int(total) / 2**30:.0f} GiB, driver {driver}")
        return names
    finally:
        pynvml.nvmlShutdown()


def package_versions() -> dict[str, str]:
    """Installed versions of Python and of the packages that a measurement depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
