"""Huge pages for large tensors: scattered cache blocks cost one address translation each otherwise.

With 4 KiB pages every block of a KV cache is a page of its own, and under a hypervisor a missed
translation costs about as much as the block's data. Linux gives 2 MiB pages to memory that asks for
them before it is first written to.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

__all__ = ("advise_huge_pages",)

_HUGE_PAGE_BYTES = 2 << 20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask Linux to back a CPU tensor with huge pages; call it between `empty` and the first write.

    Args:
        tensor: contiguous; its contents are not touched.

    Returns:
        Whether the request was made and accepted. False is no error: the tensor is smaller than a
        huge page or not on the CPU, or the system has none.
    """
    size = tensor.untyped_storage().nbytes()
    if (
        tensor.device.type != "cpu"
        or size < _HUGE_PAGE_BYTES
        or not sys.platform.startswith("linux")
    ):
        return False
    begin = -(-tensor.untyped_storage().data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.untyped_storage().data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE) == 0
