"""Reads the resources of a compiled Triton kernel from the assembler's report."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton.backends.nvidia.compiler import get_ptxas

__all__ = ("Resources", "read_resources")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a compiled kernel."""

    registers: int  # per thread
    spill_bytes: int  # stored and loaded
    shared_bytes: int
    num_wgmma: int  # instructions in the PTX, as the next two
    num_mma: int
    num_copies: int  # asynchronous
    num_threads: int


def read_resources(ptx: str, shared_bytes: int, num_warps: int, arch: int) -> Resources:
    """The resources of a kernel.

    Args:
        ptx: the kernel's PTX.
        shared_bytes: shared memory of a program, as the compiler reports it.
        num_warps: warps of a program.
        arch: the compute capability as one number: 90 for 9.0.

    Raises:
        RuntimeError: the assembler refuses the text.
    """
    log = _assemble(ptx, arch)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None, f"the assembler's report has no registers: {log}"
    return Resources(
        registers=int(registers[1]),
        spill_bytes=sum(map(int, spills)),
        shared_bytes=shared_bytes,
        num_wgmma=ptx.count("wgmma.mma_async"),
        num_mma=ptx.count("mma.sync"),
        num_copies=len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
        num_threads=32 * num_warps,
    )


def _assemble(ptx: str, arch: int) -> str:
    """The report of the assembler that Triton itself would call."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        suffix = "a" if arch >= 90 else ""
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(source)]
        command += ["-o", str(Path(folder) / "kernel.cubin")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{command[0]} could not assemble the kernel: {run.stderr}")
        return run.stderr
