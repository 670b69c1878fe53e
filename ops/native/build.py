"""Compiles ops/native/*.cpp on first use, caches the library, installs its kernels under the ops.

How a C++ kernel becomes the CPU implementation of an op (binding.h holds the whole interface):

1. Python owns the schema: `register_op(name, {"CompositeExplicitAutograd": kernel}, fake=...)`.
   That Python kernel serves until the library is loaded; then the C++ kernel wins on CPU tensors.
2. Any ops/native/*.cpp file reads the arguments in the schema's order and registers itself:

       #include "binding.h"
       static void scale_rows(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
         ostinato::Call call(stack);
         // also optional_tensor(), integer(), boolean(), text()
         const ostinato::Tensor x = call.tensor();
         const double factor = call.number();
         const ostinato::Tensor out = ostinato::empty(x.sizes, x.dim, x.dtype);
         ostinato::on_workers(ostinato::num_threads(), [&](int worker) { ... });  // torch's threads
         call.give(out);  // left out when the op returns nothing
       }
       OSTINATO_KERNEL(scale_rows, scale_rows);

   Throw std::invalid_argument (OSTINATO_CHECK) for bad input; it reaches Python as a ValueError.
   Keep heavy headers out: each file is one compiler process, and the whole build has to stay near
   five seconds on two cores.
3. `load()` once, before the first call that should be fast. The macro OSTINATO_ISA tells the level:
   3 avx512bf16, 2 avx512, 1 avx2, 0 portable; above 0 its intrinsics may be used freely.

`load(isa="avx2")` builds and installs a lesser level beside the default, as
`torch.ops.ostinato_avx2.*` with the same schemas, so that a test compares levels in one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from ostinato.conf.environment import cache_dir
from ostinato.ops.register import define_twin

__all__ = (
    "ISA_LEVELS",
    "NativeBuildError",
    "NativeLibrary",
    "detect_isa",
    "load",
    "set_threads",
)

_SOURCE_DIR = Path(__file__).parent
_REMEDY = "install g++ or set graphs.attention=reference graphs.pack_weights=false"
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_FEATURES_AVX2 = {"avx2", "fma", "f16c"}
_FEATURES_AVX512 = _FEATURES_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

ISA_LEVELS: dict[str, tuple[int, tuple[str, ...], set[str]]] = {
    # name: (OSTINATO_ISA, compiler flags, features of /proc/cpuinfo), best first
    "avx512bf16": (3, (*_AVX512_FLAGS, "-mavx512bf16"), _FEATURES_AVX512 | {"avx512_bf16"}),
    "avx512": (2, _AVX512_FLAGS, _FEATURES_AVX512),
    "avx2": (1, _AVX2_FLAGS, _FEATURES_AVX2),
    "portable": (0, (), set()),
}
# -ffp-contract=off: a row's arithmetic must not depend on which loop the compiler fused; kernels
# that want fused multiply-add say so.
_FLAGS = (
    "-std=c++20",
    "-O2",  # -O3 measured no faster, and takes a third longer to compile at a first start
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
)
_LOCK_TIMEOUT_S = 300.0


class NativeBuildError(RuntimeError):
    """The C++ kernels can not be built here; the text names the command and the remedy."""


class NativeLibrary(NamedTuple):
    """A loaded library."""

    isa: str  # one of ISA_LEVELS
    namespace: str  # torch.ops namespace that its kernels implement
    path: Path


_loaded: dict[str, NativeLibrary] = {}
_loading = threading.Lock()


def detect_isa() -> str:
    """The best level of ISA_LEVELS that this machine's processor runs."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "portable"
    features: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                features = set(line.split())
                break
    except OSError:
        return "portable"
    return next(name for name, (_, _, needed) in ISA_LEVELS.items() if needed <= features)


def load(isa: str | None = None) -> NativeLibrary:
    """Build unless the cache holds an intact library, load it, install its kernels.

    Later calls are free.

    Args:
        isa: a level of ISA_LEVELS, installed as `torch.ops.ostinato_<isa>`, where an op exists if
            its module was imported before this call; None = the machine's best, installed as the
            CPU implementation of `torch.ops.ostinato`.

    Raises:
        ValueError: `isa` is unknown or more than this processor runs.
        NativeBuildError: no compiler was found, or it failed.
    """
    namespace = "ostinato" if isa is None else f"ostinato_{isa}"
    with _loading:
        if namespace not in _loaded:
            _loaded[namespace] = _load(isa, namespace)
        return _loaded[namespace]


def _load(isa: str | None, namespace: str) -> NativeLibrary:
    best = detect_isa()
    level = best if isa is None else isa
    runnable = list(ISA_LEVELS)[list(ISA_LEVELS).index(best) :]
    if level not in runnable:
        raise ValueError(
            f"isa must be one of {', '.join(runnable)} on this processor, got {level!r}"
        )
    path, library = _open(level)
    if isa is not None:
        _define_twins(library, namespace)
    if library.ostinato_install(namespace.encode()) != 0:
        raise NativeBuildError(
            f"torch {torch.__version__} refused the kernels of {path}; {_REMEDY}"
        )
    return NativeLibrary(level, namespace, path)


def set_threads(count: int) -> None:
    """Let the kernels of every loaded library use `count` threads; 0 = as many as torch has.

    Unlike `torch.set_num_threads` this leaves other OpenMP loops alone.
    """
    for library in _loaded.values():
        ctypes.CDLL(str(library.path)).ostinato_set_threads(count)


def _define_twins(library: ctypes.CDLL, namespace: str) -> None:
    library.ostinato_kernel_name.restype = ctypes.c_char_p
    index = 0
    while (name := library.ostinato_kernel_name(index)) is not None:
        define_twin(namespace, name.decode())
        index += 1


def _open(isa: str) -> tuple[Path, ctypes.CDLL]:
    """The library for `isa`, from the cache when it is intact and loads, else built."""
    directory = cache_dir() / "native" / _content_key(isa)
    for path in _intact(directory):
        try:
            return path, ctypes.CDLL(str(path))
        except OSError:  # built against another C++ runtime, for instance in a moved cache
            path.unlink(missing_ok=True)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "lock", timeout=_LOCK_TIMEOUT_S):
            # another process may have built it while this one waited
            path = next(iter(_intact(directory)), None) or _build(isa, directory)
    except OSError as error:  # the lock's timeout is one too
        raise NativeBuildError(
            f"the CPU kernels can not be built in {directory}: {error}; set OSTINATO_CACHE_DIR "
            f"to a writable directory, or graphs.attention=reference graphs.pack_weights=false"
        ) from error
    try:
        return path, ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path} was built but does not load: {error}; {_REMEDY}") from error


def _content_key(isa: str) -> str:
    """All that the library depends on but the compiler, so that a warm start needs none."""
    digest = hashlib.sha256()
    parts = (isa, *ISA_LEVELS[isa][1], *_FLAGS, torch.__version__, sys.platform, platform.machine())
    digest.update("\0".join(parts).encode())
    for source in sorted((*_SOURCE_DIR.glob("*.cpp"), *_SOURCE_DIR.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"{isa}-{digest.hexdigest()[:20]}"


def _intact(directory: Path) -> list[Path]:
    """Libraries whose content is what their name promises; a truncated one is not listed."""
    intact = []
    for path in directory.glob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process just replaced it
            if path.stem == _digest(path):
                intact.append(path)
    return intact


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _build(isa: str, directory: Path) -> Path:
    """Compile each source in a process of its own, link, move the result in with one rename."""
    compiler = _find_compiler()
    torch_dir = Path(torch.__file__).parent
    number, isa_flags, _ = ISA_LEVELS[isa]
    include = f"-I{torch_dir / 'include'}"
    # the largest first: it decides how long the build takes
    sources = sorted(_SOURCE_DIR.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        flags = (*_FLAGS, *isa_flags, f"-DOSTINATO_ISA={number}", include)
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        # One core is left to the thread that traces the model meanwhile (runtime/build.py): it is
        # what a first start waits for.
        workers = max(1, min(len(commands), (os.cpu_count() or 1) - 1))
        with ThreadPoolExecutor(max_workers=workers) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / "ostinato.so"
        libraries = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu"]
        _run([compiler, "-shared", *map(str, objects), "-o", str(linked), *libraries])
        path = directory / f"{_digest(linked)}.so"
        for stale in directory.glob("*.so"):
            stale.unlink(missing_ok=True)
        linked.replace(path)
    return path


def _find_compiler() -> str:
    """The compiler that Inductor uses for its own C++, CXX respected."""
    from torch._inductor.cpp_builder import (
        get_cpp_compiler,
    )  # over a second to import; only to build
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler as error:
        from torch._inductor import config

        tried = ", ".join(str(name) for name in config.cpp.cxx if name)
        raise NativeBuildError(
            f"the CPU kernels need a C++ compiler and none was found (tried {tried}): {_REMEDY}"
        ) from error


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NativeBuildError(f"{' '.join(command)} did not start: {error}; {_REMEDY}") from error
    if done.returncode != 0:
        raise NativeBuildError(
            f"{' '.join(command)} failed with exit code {done.returncode}; {_REMEDY}\n"
            f"{done.stderr[-4000:]}"
        )
