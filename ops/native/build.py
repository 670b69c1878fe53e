"""Compiles the C++ kernels in ops/native/*/ into the libraries of `LIBRARIES` and caches them.

Each library is compiled on its first use, unless a wheel has brought it. How a C++ kernel becomes
the CPU implementation of an op:

1. Python owns the schema: `register_op(name, {"CompositeExplicitAutograd": kernel}, fake=...)`.
   That Python kernel runs until the library is loaded. Afterwards the C++ kernel runs for CPU
   tensors.
2. A .cpp file that `LIBRARIES` names reads the arguments in the schema's order and registers
   itself (core/kernel.h, core/call.h):

       #include "core/kernel.h"
       static void scale_rows(ostinato::Call& call) {
         // also optional_tensor(), integer(), boolean(), text()
         const ostinato::Tensor x = call.tensor();
         const double factor = call.number();
         const ostinato::Tensor out = call.empty(x.sizes, x.dim, x.dtype);
         call.threads().run(call.threads().count(), [&](int worker) { ... });
         call.give(out);
       }
       OSTINATO_KERNEL(scale_rows, scale_rows);

   A kernel throws std::invalid_argument (OSTINATO_CHECK) for bad input, which reaches Python as a
   ValueError. Its file includes no heavy headers, because a first start waits for the compiler.
3. `load(library)` of library.py installs the kernels. The macros OSTINATO_ISA and OSTINATO_AMX name
   the instruction set that the kernels are compiled for (instruction_sets.py). A kernel can use all
   intrinsics of that instruction set.

This module imports no torch, so that an engine process can build while it imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from ostinato.conf.environment import cache_dir, cxx, forbids_execution
from ostinato.ops.native.compiler_group import CompilerGroup
from ostinato.ops.native.instruction_sets import instruction_set

__all__ = (
    "LIBRARIES",
    "PARTS",
    "PREBUILT_DIR",
    "REMEDY",
    "NativeBuildError",
    "Part",
    "adopt",
    "build",
    "content_key",
    "discard",
    "find_compiler",
    "intact_libraries",
    "prebuilt_path",
)

_SOURCE_DIR = Path(__file__).parent
PREBUILT_DIR = _SOURCE_DIR / "prebuilt"  # libraries that a wheel carries (wheel_build/backend.py)

LIBRARIES: dict[str, tuple[tuple[str, ...], ...]] = {
    # Name of a library: its sources, without .cpp, in groups. Each group is compiled by one process
    # as one translation unit, so that the headers are parsed once. So two sources of a group cannot
    # define the same name. Every library needs core/install, core/call and core/thread_pool.
    "core": (
        (
            "core/install",
            "core/call",
            "core/thread_pool",
            "core/cpu_graph",
            "attention/attention",
            "attention/encoder_attention",
            "attention/cross_attention",
        ),
        (
            "linear/linear",
            "linear/pack",
            "linear/compress",
            "linear/compressed_linear",
            "moe/moe_linear",
            "moe/route",
            "rows/elementwise",
            "rows/activation",
            "rows/sampling",
            "rows/logprobs",
            "collectives/collectives",
            "collectives/draws",
        ),
    ),
    # Loaded for models with quantised weights only.
    "quantized": (
        (
            "core/install",
            "core/call",
            "core/thread_pool",
            "quantized/quantized",
        ),
        (
            "quantized/blocks",
            "quantized/pack",
            "quantized/pack_blocks",
            "quantized/pack_stored",
            "quantized/repack",
            "quantized/unpack",
        ),
    ),
    # Loaded for models with quantised weights and experts only.
    "quantized_moe": (
        ("core/install", "core/call", "core/thread_pool", "moe/quantized_moe_linear"),
    ),
    # Loaded for models with recurrent layers only.
    "recurrent": (
        (
            "core/install",
            "core/call",
            "core/thread_pool",
            "recurrent/delta_rule",
            "recurrent/short_conv",
            "recurrent/state_space",
        ),
    ),
    # Loaded for engines with `lora.num_slots` only.
    "adapters": (("core/install", "core/call", "core/thread_pool", "adapters/add_adapters"),),
}


class Part(NamedTuple):
    """Some of a library's kernels, which compile in less time than all of them."""

    library: str  # the name in LIBRARIES
    elements: int  # OSTINATO_ELEMENTS (core/elements.h)
    units: tuple[tuple[str, ...], ...]


def _dense(*linear: str) -> tuple[tuple[str, ...], ...]:
    """The sources of a dense decoder's kernels, with those for its linear layers."""
    first = ("core/install", "core/call", "core/thread_pool", "core/cpu_graph")
    rows = ("rows/elementwise", "rows/activation", "rows/sampling", "rows/logprobs")
    return (*first, "attention/attention"), (*linear, *rows)


PARTS: dict[str, Part] = {
    # By name. A decoder with one dtype for weights and cache calls no other kernels of `core`,
    # unless it has experts, several ranks or a draft model. The kernels of a part compute the same
    # bits as those of `core`.
    "core-bfloat16": Part("core", 2, _dense("linear/linear", "linear/pack")),
    "core-bfloat16-compressed": Part(
        "core", 2, _dense("linear/compressed_linear", "linear/compress")
    ),
    "core-float32": Part("core", 1, _dense("linear/linear", "linear/pack")),
}
REMEDY = "install g++ or set graphs.attention=reference graphs.pack_weights=false"
# -ffp-contract=off: the compiler must not turn products and sums into fused multiply-adds in some
# loops and not in others, because a row's bits must not depend on the loop that computes it.
# Kernels that need a fused multiply-add call it by name.
_FLAGS = (
    # The standard headers of C++20 take 0.2 to 0.3 s longer in each unit. Templates of lambdas are
    # the only part of C++20 that the kernels use; g++ and clang++ accept them in C++17.
    "-std=c++17",
    "-Wno-c++20-extensions",
    "-O2",  # -O3 is not faster, and takes a third longer to compile at a first start
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
)
_LOCK_TIMEOUT_S = 300.0

_LOG = logging.getLogger(__name__)


class NativeBuildError(RuntimeError):
    """The C++ kernels cannot be built or loaded here; the text names the remedy."""


def build(library: str, isa: str) -> Path:
    """The file of a library for an instruction set. Built unless the cache has an intact one.

    Several processes and threads may call this at the same time: one builds, the others wait.

    Raises:
        NativeBuildError: no compiler was found, or it failed, or the cache cannot be written, or
            compiled code must not run from its file system.
    """
    directory = _directory(library, isa)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "lock", timeout=_LOCK_TIMEOUT_S):
            found = next(iter(_intact(directory)), None)
            if found is None and forbids_execution(directory):
                raise NativeBuildError(
                    f"the file system of {directory} is mounted noexec, so that compiled kernels "
                    "do not load from there; set OSTINATO_CACHE_DIR to a directory on another one"
                )
            return found or _build(library, isa, directory)
    except ChildProcessError as error:
        raise NativeBuildError(f"the CPU kernels cannot be compiled: {error}; {REMEDY}") from error
    except OSError as error:  # also raised when the lock times out
        raise NativeBuildError(
            f"the CPU kernels cannot be built in {directory}: {error}; set OSTINATO_CACHE_DIR "
            f"to a writable directory, or graphs.attention=reference graphs.pack_weights=false"
        ) from error


def adopt(library: str, isa: str, data: bytes) -> None:
    """Put a library that was built elsewhere from the same sources into the cache.

    Args:
        library: one of LIBRARIES or PARTS.
        isa: an instruction set. The file must have been built for `content_key(library, isa)`.
        data: the file's content, read from a place where only the user can write.
    """
    directory = _directory(library, isa)
    with contextlib.suppress(OSError):  # `build` will run and report the error
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="build-", delete=False) as file:
            file.write(data)
        Path(file.name).replace(directory / f"{hashlib.sha256(data).hexdigest()[:32]}.so")


def intact_libraries(library: str, isa: str) -> list[Path]:
    """The existing files of a library or a part for an instruction set.

    The file in the cache comes first, then the file of the wheel.
    """
    prebuilt = prebuilt_path(library, isa)
    return [*_intact(_directory(library, isa)), *([prebuilt] if prebuilt.is_file() else [])]


def discard(path: Path) -> None:
    """Remove a file from the cache because it does not load. A wheel's file is not removed."""
    if path.parent != PREBUILT_DIR:
        with contextlib.suppress(OSError):  # `build` will write another file beside it
            path.unlink(missing_ok=True)


def prebuilt_path(library: str, isa: str) -> Path:
    """Where a wheel holds a library that was compiled from exactly these sources.

    The name does not depend on torch's version: the kernels use torch's stable ABI.
    """
    return PREBUILT_DIR / f"{_key(library, isa, 'stable-abi')}.so"


def _directory(library: str, isa: str) -> Path:
    return cache_dir() / "native" / content_key(library, isa)


def content_key(library: str, isa: str) -> str:
    """A name with a digest of everything that the library depends on, except the compiler.

    So a start that finds the library in the cache needs no compiler.
    """
    return _key(library, isa, version("torch"))


def _key(library: str, isa: str, torch: str) -> str:
    digest = hashlib.sha256()
    flags = (*instruction_set(isa).flags, *_defines(library), *_FLAGS)
    parts = (isa, *flags, torch, sys.platform, platform.machine())
    digest.update("\0".join(parts).encode())
    digest.update(_source_digest(library, _source_times(_SOURCE_DIR), _SOURCE_DIR))
    return f"{library}-{isa}-{digest.hexdigest()[:20]}"


def _source_times(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Path below `directory`, time of the last change in ns, and bytes of each source."""
    found: list[tuple[str, int, int]] = []
    for folder in os.scandir(directory):
        for file in os.scandir(folder) if folder.is_dir() else ():
            if file.name.endswith((".h", ".cpp")):
                stat = file.stat()
                found.append((f"{folder.name}/{file.name}", stat.st_mtime_ns, stat.st_size))
    return tuple(sorted(found))


@cache
def _source_digest(library: str, times: tuple[tuple[str, int, int], ...], directory: Path) -> bytes:
    """A digest of a library's sources and of all headers. A start asks for it about ten times.

    Args:
        library: one of LIBRARIES or PARTS.
        times: from `_source_times`; the sources are read again after a change.
        directory: the directory of the sources.
    """
    digest = hashlib.sha256()
    sources = [f"{name}.cpp" for unit in _units(library) for name in unit]
    for name in (*sources, *(name for name, *_ in times if name.endswith(".h"))):
        digest.update(name.encode() + b"\0" + (directory / name).read_bytes())
    return digest.digest()


def _units(library: str) -> tuple[tuple[str, ...], ...]:
    return PARTS[library].units if library in PARTS else LIBRARIES[library]


def _defines(library: str) -> tuple[str, ...]:
    return (f"-DOSTINATO_ELEMENTS={PARTS[library].elements}",) if library in PARTS else ()


def _intact(directory: Path) -> list[Path]:
    """The libraries whose name is the digest of their content. A truncated file is not listed."""
    intact = []
    for path in directory.glob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process just replaced it
            if path.stem == _digest(path):
                intact.append(path)
    return intact


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _build(library: str, isa: str, directory: Path) -> Path:
    """Compile each unit in a process of its own, link, move the result in with one rename."""
    compiler = find_compiler()
    _remove_stale(directory)
    include = (f"-I{_SOURCE_DIR}", f"-I{_torch_directory() / 'include'}")
    flags = (*_FLAGS, *_defines(library), *instruction_set(isa).flags, *include)
    units = _units(library)
    # The group ends first: at an error or a Ctrl-C, the pool then waits for no compiler.
    with (
        ThreadPoolExecutor(max_workers=min(len(units), os.cpu_count() or 1)) as pool,
        CompilerGroup(directory) as group,
    ):
        commands, objects = [], []
        for number, names in enumerate(units):
            unit = group.scratch / f"unit{number}.cpp"
            unit.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
            objects.append(unit.with_suffix(".o"))
            commands.append([compiler, *flags, "-c", str(unit), "-o", str(objects[-1])])
        list(pool.map(partial(_run, group), commands))
        linked = _link(group, compiler, objects)
        path = directory / f"{_digest(linked)}.so"
        for stale in directory.glob("*.so"):
            stale.unlink(missing_ok=True)
        linked.replace(path)
    return path


def _remove_stale(directory: Path) -> None:
    """Remove scratch directories that a crash of the machine left, also those of other libraries.

    The caller holds the lock of `directory`. A library that another process builds is left alone.
    """
    for scratch in directory.parent.glob("*/build-*/"):
        lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if scratch.parent != directory:
            lock = FileLock(scratch.parent / "lock", timeout=0)
        with contextlib.suppress(OSError), lock:  # the time-out is an OSError too
            shutil.rmtree(scratch)


def _link(group: CompilerGroup, compiler: str, objects: list[Path]) -> Path:
    """Link the units into a library that needs torch's library `libtorch_cpu.so`.

    On Linux, the linker gets an empty library of that name. Reading the symbols of torch's own
    library would take a third of a second. The loader finds the symbols when it loads the result.
    """
    scratch = group.scratch
    linked = scratch / "linked.so"
    needed = [f"-L{_torch_directory() / 'lib'}", "-ltorch_cpu"]
    if sys.platform == "linux":
        named, empty = scratch / "libtorch_cpu.so", scratch / "empty.cpp"
        empty.touch()
        name = f"-Wl,-soname,{named.name}"
        _run(group, [compiler, "-shared", "-nostdlib", name, str(empty), "-o", str(named)])
        needed = ["-Wl,--push-state,--no-as-needed", str(named), "-Wl,--pop-state"]
    _run(group, [compiler, "-shared", *map(str, objects), "-o", str(linked), *needed])
    return linked


def _torch_directory() -> Path:
    spec = importlib.util.find_spec("torch")  # finds it without importing it
    assert spec is not None, "torch is installed"
    assert spec.origin is not None, "torch is a package of files"
    return Path(spec.origin).parent


def find_compiler() -> str:
    """The compiler that Inductor would use for its own C++.

    Raises:
        NativeBuildError: it is not installed.
    """
    name = cxx()
    found = shutil.which(name)
    if found is None:
        raise NativeBuildError(
            f"the CPU kernels need a C++ compiler and none was found (tried {name}): {REMEDY}"
        )
    return found


def _run(group: CompilerGroup, command: list[str]) -> None:
    try:
        done = group.run(command)
    except OSError as error:
        raise NativeBuildError(f"{' '.join(command)} did not start: {error}; {REMEDY}") from error
    if done.returncode != 0:
        text = done.stderr.strip()
        _LOG.info("%s failed:\n%s", " ".join(command), text[-4000:])
        lines = text.splitlines() or ["it printed nothing"]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise NativeBuildError(
            f"the C++ compiler {command[0]} failed with exit code {done.returncode}: {reason}; "
            f"{REMEDY}"
        )
