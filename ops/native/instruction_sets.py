"""The instruction sets that the C++ kernels are compiled for, and those that this machine runs.

`detect_isa()` returns the best one that this machine runs. A process uses it unless `device.isa`
names another, or the kernels for it cannot be built. This module does not import torch.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = (
    "EMULATED",
    "ISA_LEVELS",
    "InstructionSet",
    "check_runnable",
    "detect_isa",
    "instruction_set",
    "isa_levels",
    "runnable_levels",
    "why_no_tiles",
)


class InstructionSet(NamedTuple):
    """The flags that a library is compiled with, and the processor features that it needs."""

    flags: tuple[str, ...]  # the compiler's flags
    features: frozenset[str]  # /proc/cpuinfo must name all of them


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_AMX = (*_AVX512BF16, "-mavx512vbmi", "-mgfni")
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_HAS_AVX512BF16 = _HAS_AVX512 | {"avx512_bf16", "avx512_vnni"}
_HAS_AMX = _HAS_AVX512BF16 | {"avx512vbmi", "gfni", "amx_tile", "amx_bf16", "amx_int8"}

ISA_LEVELS: dict[str, InstructionSet] = {
    "amx": InstructionSet((*_AMX, "-DOSTINATO_ISA=3", "-DOSTINATO_AMX=1"), _HAS_AMX),
    "avx512bf16": InstructionSet((*_AVX512BF16, "-DOSTINATO_ISA=3"), _HAS_AVX512BF16),
    "avx512": InstructionSet((*_AVX512, "-DOSTINATO_ISA=2"), _HAS_AVX512),
    "avx2": InstructionSet((*_AVX2, "-DOSTINATO_ISA=1"), _HAS_AVX2),
    "portable": InstructionSet(("-DOSTINATO_ISA=0",), frozenset()),
}
"""By name, best first. OSTINATO_ISA chooses the vectors of core/simd.h: 3 = AVX-512 with bfloat16,
2 = AVX-512, 1 = AVX2, 0 = the compiler's own. OSTINATO_AMX chooses matrix tiles (core/amx.h).
"""

EMULATED: dict[str, InstructionSet] = {
    f"amx_on_{name}": InstructionSet((*level.flags, "-DOSTINATO_AMX=2"), level.features)
    for name, level in ISA_LEVELS.items()
    if name != "amx"
}
"""Levels for tests: the kernels of `amx` with the vectors of another level. C++ code emulates the
tile instructions (core/amx_emulation.h), which is slow."""

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023  # ARCH_REQ_XCOMP_PERM
_TILE_DATA = 18  # the processor's number for the state of the tile registers


def instruction_set(name: str) -> InstructionSet:
    """An entry of ISA_LEVELS or EMULATED.

    Raises:
        KeyError: no instruction set has that name.
    """
    return ISA_LEVELS[name] if name in ISA_LEVELS else EMULATED[name]


def isa_levels() -> list[str]:
    """The levels of ISA_LEVELS that a compiler for this kind of machine can build."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return list(ISA_LEVELS) if is_x86 else ["portable"]


def detect_isa() -> str:
    """The best level of ISA_LEVELS that the machine runs."""
    return runnable_levels()[0]


def runnable_levels() -> list[str]:
    """The levels of ISA_LEVELS that this machine runs, best first; "portable" is always the last.

    "amx" is among them if the processor has it and the operating system lets this process use it.
    """
    features = _cpu_features()
    names = [name for name in isa_levels() if ISA_LEVELS[name].features <= features]
    return names[1:] if names[0] == "amx" and why_no_tiles() is not None else names


def check_runnable(isa: str) -> None:
    """Check that this machine runs a level of ISA_LEVELS.

    Raises:
        ValueError: it does not run it; the text gives the reason, and the levels that it runs.
    """
    runnable = runnable_levels()
    if isa not in runnable:
        missing = sorted(instruction_set(isa).features - _cpu_features())
        reason = f"the processor reports no {', '.join(missing)}" if missing else None
        if reason is None and isa == "amx":
            reason = why_no_tiles()
        raise ValueError(
            f"{isa} does not run here{f' ({reason})' if reason else ''}; this machine runs "
            f"{', '.join(runnable)}"
        )


def why_no_tiles() -> str | None:
    """Why this process cannot use the tile registers of AMX; None if it can.

    On Linux a process needs permission to use them. This function asks for it by one system call
    (arch_prctl(2)). The permission holds for all present and later threads, and for child processes
    until they exec.
    """
    if "amx_tile" not in _cpu_features():
        return "the processor reports no amx_tile"
    if not sys.platform.startswith("linux"):
        return f"tile registers are used on Linux only, and this is {sys.platform}"
    return _request_permission(os.getpid())


@functools.cache
def _request_permission(process: int) -> str | None:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    arguments = (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if syscall(*(ctypes.c_long(each) for each in arguments)) == 0:
        return None
    code = ctypes.get_errno()
    name = errno.errorcode.get(code, str(code))
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM) failed: {name}, {os.strerror(code)}"


@functools.cache
def _cpu_features() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split())
    except OSError:
        pass
    return frozenset()
