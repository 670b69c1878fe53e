"""Imports torch in an engine process, in half the time of `import torch` if there is no GPU.

    begin_reading()     a thread maps torch's library, while the main thread imports other modules
    import_torch()      imports torch without modules that a start from a bundle does not use

`_POSTPONED` names these modules. `torch._meta_registrations` also imports `torch._decomp`,
`torch._prims` and `torch._refs`. All of them are imported when a compiler of torch is imported,
when an attribute of one of them is read, or by `import_rest`. Until then, an op that torch
implements for the device "meta" in Python raises NotImplementedError for tensors of this device,
and `torch.Generator()` raises RuntimeError.
Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Generator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ("begin_reading", "import_rest", "import_torch", "without_collections")

_POSTPONED = (
    "torch._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.quantization",
)
# Importing one of these imports the postponed modules first. The postponed modules import none of
# these.
_NEED_REST = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx",
    "transformers",
)


def begin_reading() -> threading.Thread | None:
    """Let a thread map torch's largest library, which a later `import torch` finds in memory.

    The library's initialisers run in the thread. They take 0.2 s without the interpreter's lock.
    Meanwhile the system's loader lets no other thread load a library. So the caller imports the
    modules that are libraries before, and others afterwards.

    Returns:
        The thread; None if torch is imported already, or was built for GPUs. Such a build chooses
        between libraries of the GPU's maker before it maps its own.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    gpu_libraries = (library.with_name(f"libtorch_{kind}.so") for kind in ("cuda", "hip", "xpu"))
    if not library.is_file() or any(path.is_file() for path in gpu_libraries):
        return None
    # A function of a CDLL runs without the lock of the interpreter. `ctypes.CDLL(library)` would
    # hold the lock. RTLD_LAZY looks up 43,000 of the library's functions only when they are called.
    opener = ctypes.CDLL(None).dlopen
    opener.restype = ctypes.c_void_p
    arguments = (ctypes.c_char_p(os.fsencode(library)), ctypes.c_int(os.RTLD_LAZY))
    thread = threading.Thread(target=opener, args=arguments, name="read-torch", daemon=True)
    thread.start()
    return thread


def import_torch() -> None:
    """Import torch and postpone two of its modules. Imports all of torch if there may be a GPU."""
    if "torch" in sys.modules:
        return
    if not Path("/dev/nvidiactl").exists():
        for name in _POSTPONED:
            sys.modules[name] = _Postponed(name)
        sys.meta_path.insert(0, _Finder())
    with without_collections():
        importlib.import_module("torch")


def import_rest() -> None:
    """Import the postponed modules, if they are not imported yet."""
    for finder in [each for each in sys.meta_path if isinstance(each, _Finder)]:
        finder.import_rest()


class _Postponed(ModuleType):
    """Stands for a module until one of its attributes is read."""

    def __getattr__(self, name: str) -> Any:
        # `inspect` asks every module of the process for `__file__`.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"{self.__name__} is not imported yet and has no {name}")
        import_rest()
        return getattr(sys.modules[self.__name__], name)


class _Finder(importlib.abc.MetaPathFinder):
    """Imports the postponed modules before a module that needs them. It finds no module itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _NEED_REST:
            self.import_rest()
        return None

    def import_rest(self) -> None:
        with self._lock:
            for name in _POSTPONED:
                if isinstance(sys.modules.get(name), _Postponed):
                    del sys.modules[name]
                    importlib.import_module(name)
            with contextlib.suppress(ValueError):  # another call has removed it
                sys.meta_path.remove(self)


@contextlib.contextmanager
def without_collections() -> Generator[None]:
    """A context without garbage collections: each would visit all objects of imported modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
