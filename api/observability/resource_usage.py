"""CPU, memory and GPU usage of the server's processes, read on demand.

CPU time is a sum since the start of a process. The difference of two readings gives a rate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import psutil

__all__ = ("GpuUse", "MachineProbe", "MachineUse", "ProcessUse")


class ProcessUse(msgspec.Struct, frozen=True):
    """One process."""

    cpu_seconds: float  # time in user mode and in the system
    resident_bytes: int
    num_threads: int


class GpuUse(msgspec.Struct, frozen=True):
    """One GPU, from NVML."""

    index: int
    name: str
    utilization: float  # share of NVML's last sample period in which a kernel ran, 0 to 1
    memory_used_bytes: int
    memory_total_bytes: int
    power_watts: float | None
    temperature_celsius: float | None


class MachineUse(msgspec.Struct, frozen=True):
    """One reading."""

    # Keys are "api", "engine" (its first rank) and "engine rank 1". With several engines they are
    # "engine 0", "engine 0 rank 1" and so on. Processes that do not run are left out.
    processes: dict[str, ProcessUse]
    num_cpus: int  # processors that this process may use
    memory_total_bytes: int
    memory_available_bytes: int
    gpus: list[GpuUse]


class MachineProbe:
    """Reads the usage. The first reading imports psutil and NVML."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._gpus: list[Any] | None = None  # NVML's handles; None = not searched yet

    def read(
        self, engine_pids: Sequence[int | None], rank_pids: Sequence[Sequence[int]] = ()
    ) -> MachineUse:
        """Read the usage, which takes about a millisecond.

        Args:
            engine_pids: process ids of the engines; None = an engine does not run.
            rank_pids: for each engine, the process ids of its ranks after the first; empty = none.
        """
        import psutil

        memory = psutil.virtual_memory()
        found = {"api": self._process(os.getpid())}
        for number, pid in enumerate(engine_pids):
            if pid is not None:
                name = "engine" if len(engine_pids) == 1 else f"engine {number}"
                found[name] = self._process(pid)
                for rank, each in enumerate(rank_pids[number] if rank_pids else (), start=1):
                    found[f"{name} rank {rank}"] = self._process(each)
        return MachineUse(
            processes={name: use for name, use in found.items() if use is not None},
            num_cpus=len(os.sched_getaffinity(0)),
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            gpus=self._read_gpus(),
        )

    def _process(self, pid: int) -> ProcessUse | None:
        import psutil

        try:
            process = self._processes.get(pid)
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                return ProcessUse(
                    times.user + times.system, process.memory_info().rss, process.num_threads()
                )
        except psutil.Error:  # the process ended
            self._processes.pop(pid, None)
            return None

    def _read_gpus(self) -> list[GpuUse]:
        import pynvml

        if self._gpus is None:
            try:
                pynvml.nvmlInit()
                count = pynvml.nvmlDeviceGetCount()
                self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            except pynvml.NVMLError:  # no driver, no GPU
                self._gpus = []
        uses: list[GpuUse] = []
        for index, handle in enumerate(self._gpus):
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                name = pynvml.nvmlDeviceGetName(handle)
                rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
            except pynvml.NVMLError:  # the GPU was lost, or this process may not read it
                continue
            uses.append(
                GpuUse(
                    index=index,
                    name=name if isinstance(name, str) else name.decode(),
                    utilization=float(rates.gpu) / 100,
                    memory_used_bytes=int(memory.used),
                    memory_total_bytes=int(memory.total),
                    power_watts=_optional(
                        lambda h=handle: pynvml.nvmlDeviceGetPowerUsage(h) / 1000
                    ),
                    temperature_celsius=_optional(
                        lambda h=handle: pynvml.nvmlDeviceGetTemperature(
                            h, pynvml.NVML_TEMPERATURE_GPU
                        )
                    ),
                )
            )
        return uses


def _optional(read: Any) -> float | None:
    """The result of `read`; None if the GPU does not report this value."""
    import pynvml

    try:
        return float(read())
    except pynvml.NVMLError:
        return None
