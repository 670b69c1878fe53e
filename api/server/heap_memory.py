"""Returns free memory of the heaps to the system, so that the process does not stay large.

glibc keeps freed blocks in its heaps. It returns only the memory after the last block in use. One
answer with many log-probabilities takes tens of MiB in small pieces. A small object that lies
behind these pieces would keep the memory of all of them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

__all__ = ("return_free_memory", "return_large_blocks")

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BLOCK = 256 << 10  # bytes
_LOOK_S = 5.0
_GROWTH = 8 << 20  # free memory is returned if the process has grown by more than this


def return_large_blocks() -> None:
    """Let glibc return the memory of large request bodies to the system when it is freed.

    glibc maps each block above a threshold by itself, and unmaps it when it is freed. But glibc
    raises the threshold to the size of the largest freed block. Then later bodies are placed in the
    heaps, between small objects, and the heaps grow with each body. A fixed threshold prevents
    this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl and macOS do not have mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


async def return_free_memory() -> None:
    """Return free memory whenever the process has grown. Runs until it is cancelled.

    It checks the size every few seconds. Returning the memory takes milliseconds, so a thread does
    it. If the C library has no `malloc_trim`, this function returns at once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    least = _resident_bytes()
    while True:
        await asyncio.sleep(_LOOK_S)
        size = _resident_bytes()
        if size > least + _GROWTH:
            await asyncio.to_thread(trim, 0)
            least = _resident_bytes()
        least = min(least, size)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
