"""The only environment variables that the engine reads; everything else is Hydra configuration.

| variable | meaning | default |
|---|---|---|
| `OSTINATO_CACHE_DIR` | where compiled kernels and graphs are kept | `~/.cache/ostinato` |

The default follows `XDG_CACHE_HOME` when that is set. Shells that complete a command line pass it
in `COMP_LINE`.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ("cache_dir", "completion_line", "without_kernel_pool")


def cache_dir() -> Path:
    """The directory for everything that is built once and reused; it may not exist yet."""
    explicit = os.environ.get("OSTINATO_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostinato"


def completion_line() -> str:
    """What the user has typed so far when a shell asks for completions; empty otherwise."""
    return os.environ.get("COMP_LINE", "")


def without_kernel_pool() -> None:
    """Keep torch from starting its pool of processes that compile Triton kernels.

    On a machine without a GPU they import torch twice, seconds of processor time at every start,
    and are never used. torch has no other switch than its variable `TORCH_WARM_POOL`; a value
    that the user set is kept.
    """
    os.environ.setdefault("TORCH_WARM_POOL", "0")
