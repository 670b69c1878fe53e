"""The optional library FlashInfer: the parts that the ops call, and whether they can run here.

FlashInfer (`pip install ostinato[flashinfer]`) builds its kernels with nvcc when they are first
called, unless its prebuilt package is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

__all__ = ("LEAST_VERSION", "Library", "load_library", "why_unavailable")

LEAST_VERSION = "0.6.18"  # as the extra in pyproject.toml
_DTYPES = (torch.float16, torch.bfloat16)


class Library(NamedTuple):
    """The parts of FlashInfer that the ops call."""

    decode_wrapper: Callable[..., Any]  # BatchDecodeWithPagedKVCacheWrapper
    prefill_wrapper: Callable[..., Any]  # BatchPrefillWithPagedKVCacheWrapper
    fast_decode_plan: Callable[..., None]
    fused_moe: Callable[..., Any]  # cutlass_fused_moe
    activations: Any  # the enum ActivationType


@cache
def load_library() -> Library:
    """The parts of the installed FlashInfer.

    Raises:
        ImportError: it is not installed.
    """
    flashinfer = import_module("flashinfer")
    return Library(
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.fast_decode_plan,
        flashinfer.cutlass_fused_moe,
        flashinfer.ActivationType,
    )


def why_unavailable(
    device: torch.device, dtype: torch.dtype, *, is_here: bool = True
) -> str | None:
    """The reason no kernel of FlashInfer can run on this device in this dtype, or None.

    A kernel can have further conditions, such as the capability of the device.

    Args:
        device: the model's device.
        dtype: the dtype of the activations.
        is_here: whether the device is in this machine. If not, only its type and the dtype are
            checked.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, but the model is on {device.type}"
    if dtype not in _DTYPES:
        return f"needs float16 or bfloat16, but the model has {dtype}"
    if not is_here:
        return None
    if not torch.cuda.is_available():
        return "needs a CUDA device, none is visible"
    return _why_not_installed()


def _why_not_installed() -> str | None:
    needed = f"needs FlashInfer {LEAST_VERSION} or newer"
    remedy = "pip install ostinato[flashinfer]"
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return f"{needed}, which is not installed; {remedy}"
    if _numbers(found) < _numbers(LEAST_VERSION):
        return f"{needed}, {found} is installed; {remedy}"
    return None


def _numbers(version_text: str) -> list[int]:
    """The release of a version: [0, 6, 18] of `0.6.18.post1` and of `0.6.18rc1+cu130`."""
    release = re.match(r"\d+(\.\d+)*", version_text)
    return [] if release is None else [int(part) for part in release[0].split(".")]
