"""Loads libraries of C++ kernels (build.py) and installs them under the ops.

`load("core")` once, before the first call that should be fast; until then the ops run as plain
torch. `load("core", isa="avx2")` builds and installs a lesser level beside the default, as
`torch.ops.ostinato_avx2.*` with the same schemas, so that a test compares levels in one process.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from ostinato.ops.native.build import (
    ISA_LEVELS,
    LIBRARIES,
    REMEDY,
    NativeBuildError,
    build,
    detect_isa,
    intact_libraries,
)
from ostinato.ops.register import define_twin

__all__ = ("NativeLibrary", "core_library", "kernel_address", "load", "set_threads")


class NativeLibrary(NamedTuple):
    """A loaded library."""

    isa: str  # one of ISA_LEVELS
    namespace: str  # torch.ops namespace that its kernels implement
    path: Path


_loaded: dict[tuple[str, str], NativeLibrary] = {}  # by name and namespace
_loading = threading.Lock()


def load(name: str, isa: str | None = None) -> NativeLibrary:
    """Build unless the cache holds an intact library, load it, install its kernels.

    Later calls are free.

    Args:
        name: one of LIBRARIES.
        isa: a level of ISA_LEVELS, installed as `torch.ops.ostinato_<isa>`, where an op exists if
            its module was imported before this call; None = the machine's best, installed as the
            CPU implementation of `torch.ops.ostinato`.

    Raises:
        ValueError: `name` is unknown, `isa` is unknown or more than this processor runs.
        NativeBuildError: no compiler was found, or it failed.
    """
    namespace = "ostinato" if isa is None else f"ostinato_{isa}"
    with _loading:
        if (name, namespace) not in _loaded:
            _loaded[name, namespace] = _load(name, isa, namespace)
        return _loaded[name, namespace]


def _load(name: str, isa: str | None, namespace: str) -> NativeLibrary:
    if name not in LIBRARIES:
        raise ValueError(f"name must be one of {', '.join(LIBRARIES)}, got {name!r}")
    best = detect_isa()
    level = best if isa is None else isa
    runnable = list(ISA_LEVELS)[list(ISA_LEVELS).index(best) :]
    if level not in runnable:
        raise ValueError(
            f"isa must be one of {', '.join(runnable)} on this processor, got {level!r}"
        )
    path, library = _open(name, level)
    if isa is not None:
        _define_twins(library, namespace)
    if library.ostinato_install(namespace.encode()) != 0:
        raise NativeBuildError(f"torch {torch.__version__} refused the kernels of {path}; {REMEDY}")
    for first in list(_loaded.values())[:1]:
        owner = ctypes.CDLL(str(first.path))
        owner.ostinato_crew.restype = ctypes.c_void_p
        library.ostinato_use_crew(ctypes.c_void_p(owner.ostinato_crew()))
    return NativeLibrary(level, namespace, path)


def set_threads(count: int) -> None:
    """Let the kernels of every loaded library use `count` threads; 0 = as many as torch has.

    Unlike `torch.set_num_threads` this leaves other OpenMP loops alone.
    """
    for library in _loaded.values():
        ctypes.CDLL(str(library.path)).ostinato_set_threads(count)


def core_library() -> ctypes.CDLL:
    """The loaded library "core"."""
    return ctypes.CDLL(str(load("core").path))


def kernel_address(op: str) -> int:
    """Where the C++ kernel of `ostinato::<op>` is, for tapes (tape.py).

    Raises:
        KeyError: no loaded library has one.
    """
    for (_, namespace), loaded in _loaded.items():
        library = ctypes.CDLL(str(loaded.path))
        library.ostinato_kernel.restype = ctypes.c_void_p
        if namespace == "ostinato" and (address := library.ostinato_kernel(op.encode())):
            return int(address)
    raise KeyError(f"no loaded library has a kernel of {op}")


def _define_twins(library: ctypes.CDLL, namespace: str) -> None:
    library.ostinato_kernel_name.restype = ctypes.c_char_p
    index = 0
    while (name := library.ostinato_kernel_name(index)) is not None:
        define_twin(namespace, name.decode())
        index += 1


def _open(name: str, isa: str) -> tuple[Path, ctypes.CDLL]:
    """The library `name` for `isa`, from the cache when it is intact and loads, else built."""
    for path in intact_libraries(name, isa):
        try:
            return path, ctypes.CDLL(str(path))
        except OSError:  # built against another C++ runtime, for instance in a moved cache
            path.unlink(missing_ok=True)
    path = build(name, isa)
    try:
        return path, ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path} was built but does not load: {error}; {REMEDY}") from error
