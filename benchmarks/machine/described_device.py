"""Descriptions of GPUs, so that programs can be compiled for a GPU that is not here."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ("DescribedDevice", "described_device", "described_devices")

_FOLDER = Path(__file__).parent / "gpus"
_REGISTERS = 64 * 1024  # of 32 bits in a multiprocessor, for all capabilities from 8.0
_RESERVED_SHARED_MEMORY = 1024  # bytes that the device keeps for itself, per program


class DescribedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU as its vendor describes it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    memory_bytes_s: float  # nominal
    bf16_flop_s: float  # nominal, dense, float32 sums
    l2_bytes: int
    shared_per_multiprocessor: int  # bytes
    shared_per_program: int  # bytes, the most that one program may have
    threads_per_multiprocessor: int
    programs_per_multiprocessor: int

    @property
    def arch(self) -> int:
        """The compute capability as one number: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]

    def resident_programs(self, registers: int, shared_bytes: int, num_threads: int) -> int:
        """How many programs of a kernel run on a multiprocessor at the same time.

        Registers, shared memory, threads and the number of programs are limited.

        Args:
            registers: the registers of a thread; they are given out in groups of 8.
            shared_bytes: shared memory of a program.
            num_threads: threads of a program.
        """
        by_registers = _REGISTERS // (max(-(-registers // 8), 1) * 8 * num_threads)
        by_memory = self.shared_per_multiprocessor // (shared_bytes + _RESERVED_SHARED_MEMORY)
        by_threads = self.threads_per_multiprocessor // num_threads
        return min(by_registers, by_memory, by_threads, self.programs_per_multiprocessor)


def described_devices() -> list[str]:
    """The names of all descriptions."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def described_device(name: str) -> DescribedDevice:
    """The description in benchmarks/machine/gpus/<name>.yaml.

    Raises:
        ValueError: there is no such file, or the file has other fields or types.
    """
    if name not in described_devices():
        raise ValueError(f"device {name!r} is not one of {', '.join(described_devices())}")
    text = (_FOLDER / f"{name}.yaml").read_bytes()
    try:
        return msgspec.yaml.decode(text, type=DescribedDevice)
    except msgspec.ValidationError as error:
        raise ValueError(f"benchmarks/machine/gpus/{name}.yaml: {error}") from error
