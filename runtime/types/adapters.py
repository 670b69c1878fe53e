"""`ServedAdapter`: a low-rank adapter that an engine has, or is to load."""

from __future__ import annotations

import msgspec

__all__ = ("ServedAdapter",)


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A low-rank adapter in PEFT's format, and the slot that it takes in the engine.

    A slot is a place for one adapter in the parameters of the linear layers.
    """

    name: str  # requests name it as their `model`
    path: str  # the directory of its files, absolute
    digest: str  # SHA-256 of its files, in hexadecimal
    slot: int  # 0 to `lora.num_slots` - 1
    created: int = 0  # unix time of the load, in seconds
