"""Runs programs as on a processor with AVX2 and without AVX-512, by a preloaded library."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ostinato.benchmarks.machine.compiled_library import compiled_library
from ostinato.conf.environment import environment_with

__all__ = ("hiding_library", "preloading")

_SOURCE = Path(__file__).with_name("hidden_avx512.cpp")
_FLAGS = (
    *("-std=c++17", "-O2", "-fno-exceptions", "-fno-threadsafe-statics"),
    # The library needs only the C library, so the engines get no other C++ runtime.
    "-Wl,--as-needed",
    # It is initialised before libraries that ask for the processor's features at their load.
    "-Wl,-z,initfirst",
)


def hiding_library() -> Path:
    """The library that hides AVX-512 and AMX from a program that preloads it.

    Raises:
        RuntimeError: the library cannot be compiled, or this machine does not let a process
            intercept CPUID.
    """
    library = compiled_library(_SOURCE, _FLAGS)
    done = subprocess.run(
        ["true"],
        env=preloading({}, str(library)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"AVX-512 cannot be hidden: {done.stderr.strip() or f'exit code {done.returncode}'}; "
            "the processor and its hypervisor must have CPUID faulting (`cpuid_fault` in "
            "/proc/cpuinfo)"
        )
    return library


def preloading(variables: dict[str, str], *libraries: str) -> dict[str, str]:
    """This process's environment for a program that preloads libraries.

    Args:
        variables: variables that are set unless this process has them.
        libraries: files that come before those that this process preloads; "" = none.
    """
    environment = environment_with(**variables)
    preloaded = [*libraries, environment.get("LD_PRELOAD", "")]
    return environment | {"LD_PRELOAD": ":".join(filter(None, preloaded))}
