"""Compiles a C++ file of the benchmarks to a shared library, once for each content."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from ostinato.conf.environment import cache_dir, cxx

__all__ = ("compiled_library",)


def compiled_library(source: Path, flags: tuple[str, ...]) -> Path:
    """The library of a source file in the cache directory. Compiled if the cache has none.

    Args:
        source: a C++ file without includes of this project.
        flags: the compiler's flags and the linker's. They belong to the key of the cache.

    Raises:
        RuntimeError: the C++ compiler is missing or fails; its message is in the text.
    """
    text = "\0".join((source.read_text(encoding="utf-8"), *flags))
    folder = cache_dir() / "benchmarks"
    library = folder / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "built.so"
        # Libraries that the linker is to search come after the source that needs them.
        command = [cxx(), "-shared", "-fPIC", str(source), *flags, "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"{source.name} cannot be compiled: {error}; set CXX") from error
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        os.replace(built, library)
    return library
