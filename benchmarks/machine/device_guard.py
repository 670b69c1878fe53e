"""Gives a CPU build of torch a CUDA device guard that does nothing.

With this guard, ops can be traced on tensors that claim a CUDA device, such as fake tensors and the
tensors of a test's simulated device. CUDA itself does not run.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ostinato.benchmarks.machine.compiled_library import compiled_library

__all__ = ("install_device_guard",)

_SOURCE = Path(__file__).with_name("device_guard.cpp")


def install_device_guard() -> None:
    """Compile the guard once for each version of torch, and register it; safe to call twice.

    Does nothing if torch is built with CUDA, because that build has a guard.

    Raises:
        RuntimeError: the C++ compiler fails; its message is in the text.
    """
    if torch.backends.cuda.is_built():
        return
    root = Path(torch.__file__).parent
    flags = ("-std=c++20", "-O1", f"-I{root}/include", f"-L{root}/lib", "-lc10")
    # The version stands for the headers of torch, which a new version at the same place replaces.
    library = compiled_library(_SOURCE, (*flags, f"-DTORCH_RELEASE={torch.__version__}"))
    ctypes.CDLL(str(library))  # a library that is loaded already is not loaded again
