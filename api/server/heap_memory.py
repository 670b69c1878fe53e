"""Returns free memory of the heaps to the system, so that the process is no larger than it must be.

glibc keeps freed blocks in its heaps. It returns only what lies behind the last block in use. One
answer with many log-probabilities takes tens of MiB in small pieces, and a later small object
behind them would keep all of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from pathlib import Path

__all__ = ("return_free_memory", "return_large_blocks")

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BLOCK = 256 << 10  # bytes
_LOOK_S = 5.0
_GROWTH = 8 << 20  # bytes that the process has grown by before free memory is looked for


def return_large_blocks() -> None:
    """Let glibc return the memory of large request bodies to the system when it is freed.

    glibc maps blocks above a threshold one by one, and unmaps them when they are freed. It raises
    the threshold to the size of the largest freed block. Later bodies are then placed in the heaps,
    beside small objects, and the heaps grow with each body. A fixed threshold prevents that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl and macOS have none
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


async def return_free_memory() -> None:
    """Return free memory whenever the process has grown; runs until it is cancelled.

    It looks every few seconds. glibc returns the memory on a thread, which takes milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    least = _resident_bytes()
    while True:
        await asyncio.sleep(_LOOK_S)
        size = _resident_bytes()
        if size > least + _GROWTH:
            gc.collect()  # errors keep their frames, and so the bodies in them, until then
            await asyncio.to_thread(trim, 0)
            least = _resident_bytes()
        least = min(least, size)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
