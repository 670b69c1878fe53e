"""A program that preloads the hiding library sees a processor with AVX2 and without AVX-512."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.benchmarks.peers.limited_processor import hiding_library, preloading

# numpy asks CPUID, `detect_isa` reads /proc/cpuinfo. Both run in a thread that blocks SIGSEGV. An
# own handler of SIGSEGV, faulthandler's, is set before. At the end the program reads address 0.
PROGRAM = """
import ctypes, faulthandler, signal, threading
faulthandler.enable()

def show():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGSEGV})
    from numpy._core._multiarray_umath import __cpu_features__ as features
    from ostinato.ops.native.instruction_sets import detect_isa
    print(features["AVX2"], features["AVX512F"], features["AVX512BW"], detect_isa(), flush=True)

thread = threading.Thread(target=show)
thread.start()
thread.join()
ctypes.string_at(0)
"""


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.compiles_late  # the library; an engine of another test may still be alive
def test_newer_instruction_sets_are_hidden():
    flags = Path("/proc/cpuinfo").read_text().split()
    if "cpuid_fault" not in flags or "avx2" not in flags:
        with pytest.raises(RuntimeError, match=r"AVX-512 cannot be hidden|failed"):
            hiding_library()
        return
    library = str(hiding_library())
    limited = run(preloading({}, library))
    assert limited.stdout.split() == ["True", "False", "False", "avx2"], limited.stderr
    # The program's own handler still gets other faults.
    assert limited.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in limited.stderr
    if "avx512bw" in flags:
        assert run(preloading({})).stdout.split()[:3] == ["True", "True", "True"]
