"""Names the class of this machine's processor, and measures its peak rate of multiply-adds.

Results of kernels are kept in `benchmarks/results/<class>/`, because results of processors with
different instruction sets cannot be compared.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from ostinato.ops.native import build
from ostinato.ops.native.instruction_sets import detect_isa, instruction_set

__all__ = ("RESULTS", "fma_peak", "processor_class")

RESULTS = Path(__file__).parents[1] / "results"
_SOURCE = Path(__file__).with_name("fma_rate.cpp")
_NATIVE = Path(build.__file__).parent
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}


def processor_class(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The vendor and the best instruction set that the machine runs, such as "amd-avx2"."""
    vendor = ""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("vendor_id"):
            vendor = line.partition(":")[2].strip()
            break
    return f"{_VENDORS.get(vendor, 'other')}-{detect_isa()}"


def fma_peak(isa: str) -> float:
    """GFLOP/s of one thread's float32 multiply-adds in registers, the best of 30 loops.

    Raises:
        NativeBuildError: there is no C++ compiler.
        subprocess.CalledProcessError: the compiler failed, or the processor does not run `isa`.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fma_rate"
        flags = ("-std=c++17", "-O2", f"-I{_NATIVE}", *instruction_set(isa).flags)
        command = [build.find_compiler(), *flags, str(_SOURCE), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True)
        done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return float(done.stdout)
