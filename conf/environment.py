"""The only environment variables that the engine reads; everything else is Hydra configuration.

| variable | meaning | default |
|---|---|---|
| `OSTINATO_CACHE_DIR` | where compiled kernels and graphs are kept | `~/.cache/ostinato` |
| `CXX` | the C++ compiler for the CPU's kernels, as for torch's own | `g++`, `clang++` on macOS |

The default follows `XDG_CACHE_HOME` when that is set. Shells that complete a command line pass it
in `COMP_LINE`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = (
    "cache_dir",
    "completion_line",
    "cxx",
    "environment_with",
    "prepare_compiler",
    "with_own_caches",
)


def cache_dir() -> Path:
    """The directory for everything that is built once and reused; it may not exist yet."""
    explicit = os.environ.get("OSTINATO_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostinato"


def completion_line() -> str:
    """What the user has typed so far when a shell asks for completions; empty otherwise."""
    return os.environ.get("COMP_LINE", "")


def cxx() -> str:
    """The C++ compiler, a command or a path; it may not be there."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def environment_with(**changes: str) -> dict[str, str]:
    """This process's environment for a child, with these variables; what the user set is kept."""
    return {**changes, **os.environ}


def with_own_caches(directory: Path) -> dict[str, str]:
    """This process's environment for a child that keeps what it compiles in `directory`."""
    environment = {**os.environ, "OSTINATO_CACHE_DIR": str(directory)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return environment


def prepare_compiler(*, kernel_pool: bool) -> None:
    """Settings of torch's compiler that it reads from the environment only, each unless it is set.

    What Inductor has built is kept in our cache directory: its own default lies in a directory for
    temporary files, and the next start would build again.

    Args:
        kernel_pool: whether torch may keep a pool of processes that compile Triton kernels. On a
            machine without a GPU they import torch twice, seconds of processor time at every
            start, and are never used.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
    if not kernel_pool:
        os.environ.setdefault("TORCH_WARM_POOL", "0")
