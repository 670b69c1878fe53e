"""Gives a CPU build of torch a CUDA device guard that does nothing.

With this guard, ops can be traced on tensors that claim a CUDA device, such as fake tensors and the
tensors of a test's simulated device. CUDA itself does not run.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from ostinato.conf.environment import cache_dir, cxx

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
    text = _SOURCE.read_text(encoding="utf-8") + torch.__version__
    folder = cache_dir() / "device-guard"
    library = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(library)
    ctypes.CDLL(str(library))  # a library that is loaded already is not loaded again


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / "guard.so"
        command = [cxx(), "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root}/include"]
        command += [str(_SOURCE), "-o", str(built), f"-L{root}/lib", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        os.replace(built, library)
