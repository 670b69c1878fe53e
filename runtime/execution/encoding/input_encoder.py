"""`InputEncoder`: computes what stands for an image or for audio, and stores it on its rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch

from ostinato.runtime.execution.executor import BeginEncoding

__all__ = ("InputEncoder",)


class InputEncoder(Protocol):
    """The encoder of one rank, with the memory for its results."""

    @property
    def device(self) -> torch.device:
        """Where the results are."""
        ...

    def begin(self, call: BeginEncoding) -> Generator[None, None, None]:
        """Encode and store one input. The generator yields after each unit of work."""
        ...

    def touch(self) -> None:
        """Write zeros to the memory that measured steps read, so that it is mapped."""
        ...

    def warm_up(self) -> None:
        """Encode a small input, so that all kernels are loaded. Nothing of it stays stored."""
        ...
