"""Loads libraries of C++ kernels (build.py) and makes them the CPU implementations of the ops.

`load("core")`, or `load_part` for some of its kernels, is called once, before the first call that
should be fast. Until then the ops run as plain torch. `load("core", isa="avx2")` builds the kernels
for a lower instruction set and installs them beside the default ones, as
`torch.ops.ostinato_avx2.*` with the same schemas, so that a test can compare instruction sets in
one process.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ostinato.conf.environment import forbids_execution
from ostinato.ops.native.abi import check_abi
from ostinato.ops.native.build import (
    LIBRARIES,
    PARTS,
    REMEDY,
    NativeBuildError,
    build,
    discard,
    intact_libraries,
)
from ostinato.ops.native.instruction_sets import EMULATED, check_runnable, runnable_levels
from ostinato.ops.register import define_alias

__all__ = (
    "NativeLibrary",
    "complete_core",
    "core_library",
    "kernel_address",
    "load",
    "load_core",
    "load_part",
    "loaded_isa",
    "pool_threads_setter",
    "set_pool_threads",
    "use_isa",
)


class NativeLibrary(NamedTuple):
    """A loaded library."""

    isa: str  # one of ISA_LEVELS or EMULATED
    namespace: str  # torch.ops namespace that its kernels implement
    path: Path
    functions: ctypes.CDLL  # its C functions (core/install.cpp)


# Key: name of the library, namespace. Loops go over a copy, because another thread may load a
# library meanwhile. They do not take the lock `_loading`, because a thread that compiles holds it.
_loaded: dict[tuple[str, str], NativeLibrary] = {}
_chosen: dict[str, str] = {}  # the level chosen for the namespace "ostinato", the only key
_loading = threading.Lock()
_LOG = logging.getLogger(__name__)


def use_isa(isa: str) -> None:
    """Choose the instruction set behind `torch.ops.ostinato`, before its kernels are loaded.

    The choice holds for the rest of the process. Without this call, `load` uses the best level that
    the machine runs, or the next level if the best cannot be built.

    Args:
        isa: a level of ISA_LEVELS.

    Raises:
        ValueError: this machine does not run it, or the process uses another one already.
    """
    check_runnable(isa)
    with _loading:
        used = _default_isa()
        if used not in (None, isa):
            raise ValueError(f"this process uses {used} already; choose {isa} in another process")
        _chosen["ostinato"] = isa


def loaded_isa() -> str | None:
    """The instruction set of the loaded kernels of `torch.ops.ostinato`; None = none is loaded."""
    loaded = (each.isa for (_, space), each in _loaded.copy().items() if space == "ostinato")
    return next(loaded, None)


def _default_isa() -> str | None:
    return loaded_isa() or _chosen.get("ostinato")


def load(name: str, isa: str | None = None) -> NativeLibrary:
    """Load a library and install its kernels. Build it first if neither cache nor wheel has one.

    Later calls with the same arguments return the loaded library.

    Args:
        name: one of LIBRARIES or PARTS. The kernels of a whole library replace those of a part that
            was loaded before.
        isa: None = the level of `use_isa` or of an earlier call, else the best level that can be
            built; the kernels become the CPU implementation of `torch.ops.ostinato`. A level of
            ISA_LEVELS or EMULATED = its kernels are installed as `torch.ops.ostinato_<isa>`, for
            the ops whose modules were imported before this call.

    Raises:
        ValueError: `name` is unknown, or `isa` is unknown or not supported by this processor.
        NativeBuildError: the library cannot be built, or does not load.
        RuntimeError: the library does not fit this package (abi.py).
    """
    namespace = "ostinato" if isa is None else f"ostinato_{isa}"
    with _loading:
        if (name, namespace) not in _loaded:
            _loaded[name, namespace] = _load(name, isa, namespace)
        return _loaded[name, namespace]


def load_part(part: str) -> NativeLibrary:
    """Load a part of a library for `torch.ops.ostinato`. Build it if it was never built here.

    The whole library is loaded in its place if it is loaded or compiled already, or if another part
    of it is loaded. So a process with several models has the kernels of all of them.

    Args:
        part: one of PARTS.

    Raises:
        NativeBuildError: it cannot be built, or does not load.
    """
    whole = PARTS[part].library
    with _loading:
        loaded = [name for name, _ in _parts_of(whole, "ostinato")]
        is_loaded = (whole, "ostinato") in _loaded
        isa = _default_isa() or runnable_levels()[0]
        if not is_loaded and loaded == [part]:
            return _loaded[part, "ostinato"]
        # A thread may be building the whole library now, if the configuration did not show that the
        # part suffices. Then both are compiled. That costs only time: each has a directory and a
        # lock of its own, and their bits are the same. Later starts load the whole library.
        if not is_loaded and not loaded and not intact_libraries(whole, isa):
            _loaded[part, "ostinato"] = _load(part, None, "ostinato")
            return _loaded[part, "ostinato"]
    return load(whole)


def load_core(part: str) -> None:
    """Load the library "core", unless it or this part of it is loaded.

    Raises:
        NativeBuildError: it cannot be built, or does not load.
    """
    if (part, "ostinato") not in _loaded:
        load("core")


def complete_core(dtype: torch.dtype) -> None:
    """Load the library "core" if a part of it is loaded that has no kernels for this dtype.

    An earlier model of the process can have loaded the part. Its kernels replaced the plain ones,
    also for a model that loads no kernels.

    Raises:
        NativeBuildError: it cannot be built, or does not load.
    """
    own = f"core-{str(dtype).removeprefix('torch.')}"
    if any(not part.startswith(own) for part, _ in _parts_of("core", "ostinato")):
        load("core")


def _parts_of(name: str, namespace: str) -> list[tuple[str, NativeLibrary]]:
    """The loaded parts of a library."""
    return [
        (part, loaded)
        for (part, where), loaded in _loaded.copy().items()
        if where == namespace and part in PARTS and PARTS[part].library == name
    ]


def _load(name: str, isa: str | None, namespace: str) -> NativeLibrary:
    if name not in LIBRARIES and name not in PARTS:
        known = ", ".join((*LIBRARIES, *PARTS))
        raise ValueError(f"name must be one of {known}, got {name!r}")
    runnable = runnable_levels()
    known = [*runnable, *(f"amx_on_{each}" for each in runnable if f"amx_on_{each}" in EMULATED)]
    if isa is None:
        level, path, library = _open_default(name)
    elif isa in known:
        level, (path, library) = isa, _open(name, isa)
    else:
        raise ValueError(f"isa must be one of {', '.join(known)} on this processor, got {isa!r}")
    check_abi(library, str(path))
    if isa is not None:
        _define_aliases(library, namespace)
    replace = None
    for _, part in _parts_of(name, namespace):  # at most one
        replace = ctypes.cast(part.functions.ostinato_replace, ctypes.c_void_p)
    if library.ostinato_install(namespace.encode(), replace) != 0:
        raise NativeBuildError(f"torch {torch.__version__} refused the kernels of {path}; {REMEDY}")
    if (first := _first()) is not None:
        first.functions.ostinato_thread_state.restype = ctypes.c_void_p
        state = first.functions.ostinato_thread_state()
        library.ostinato_share_threads(ctypes.c_void_p(state))
    return NativeLibrary(level, namespace, path, library)


def _first() -> NativeLibrary | None:
    """The library that was loaded first. All other libraries share its thread state."""
    return next(iter(_loaded.copy().values()), None)


def set_pool_threads(count: int) -> None:
    """Choose the threads for the kernel calls that the calling thread makes from now on.

    Args:
        count: the most threads of the process's thread pool (core/thread_pool.h) that a call uses,
            the caller included; 0 = torch's own threads, as many as `torch.get_num_threads()`.
    """
    pool_threads_setter()(count)


def pool_threads_setter() -> Callable[[int], object]:
    """The function behind `set_pool_threads`. It has no effect if no library was loaded before."""
    first = _first()
    return (lambda count: None) if first is None else first.functions.ostinato_set_pool_threads


def core_library() -> ctypes.CDLL:
    """The library "core" or a loaded part of it. Both have the functions of CPU graphs."""
    parts = _parts_of("core", "ostinato")
    return parts[0][1].functions if parts else load("core").functions


def kernel_address(op: str) -> int | None:
    """The address of the C++ kernel of `ostinato::<op>`; None if no loaded library has one."""
    for (_, namespace), loaded in _loaded.copy().items():
        find = loaded.functions.ostinato_kernel
        find.restype = ctypes.c_void_p
        if namespace == "ostinato" and (address := find(op.encode())):
            return int(address)
    return None


def _define_aliases(library: ctypes.CDLL, namespace: str) -> None:
    library.ostinato_kernel_name.restype = ctypes.c_char_p
    index = 0
    while (name := library.ostinato_kernel_name(index)) is not None:
        define_alias(namespace, name.decode())
        index += 1


def _open_default(name: str) -> tuple[str, Path, ctypes.CDLL]:
    """A library for the process's instruction set, and the name of that set.

    If no set was chosen, this chooses the best one that the machine runs. If the best cannot be
    built, for instance because the compiler is older than the processor, it takes the next.
    """
    if (isa := _default_isa()) is not None:
        return isa, *_open(name, isa)
    best, *others = runnable_levels()
    try:
        return best, *_open(name, best)
    except NativeBuildError as error:
        if not others:
            raise
        try:
            opened = _open(name, others[0])
        except NativeBuildError:
            raise error from None
        _LOG.warning(
            "the CPU kernels run on %s, because those for %s failed: %s", others[0], best, error
        )
        return others[0], *opened


def _open(name: str, isa: str) -> tuple[Path, ctypes.CDLL]:
    """The library `name` for `isa`: from cache or wheel if it is intact and loads, else built."""
    for path in intact_libraries(name, isa):
        try:
            return path, ctypes.CDLL(str(path))
        # it was built against another C++ runtime, for instance in a cache from another machine
        except OSError:
            if not forbids_execution(path):
                discard(path)
    path = build(name, isa)
    try:
        return path, ctypes.CDLL(str(path))
    except OSError as error:
        remedy = REMEDY
        if forbids_execution(path):
            remedy = (
                "its file system is mounted noexec; set OSTINATO_CACHE_DIR to a directory on "
                "another one"
            )
        raise NativeBuildError(f"{path} was built but does not load: {error}; {remedy}") from error
