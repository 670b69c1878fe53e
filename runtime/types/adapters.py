"""`ServedAdapter`: an adapter that an engine has. `LoRARequest`: one that a caller asks for."""

from __future__ import annotations

import msgspec

__all__ = ("LoRARequest", "ServedAdapter")


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A low-rank adapter in PEFT's format, and the slot that it takes in the engine.

    A slot is a place for one adapter in the parameters of the linear layers.
    """

    name: str  # requests name it as their `model`
    path: str  # the directory of its files, absolute
    digest: str  # SHA-256 of its files, in hexadecimal
    slot: int  # 0 to `lora.num_slots` - 1
    created: int = 0  # unix time of the load, in seconds


class LoRARequest(msgspec.Struct, frozen=True):
    """Names an adapter in a call of `LLM` or `AsyncEngine`, as in vLLM.

    The first call with it loads the adapter. An adapter of the same name that has another id or
    path is another adapter, and replaces the first one.

    Args:
        lora_name: the adapter's name.
        lora_int_id: a number of at least 1.
        lora_path: a local directory or a hub id.
        base_model_name: accepted and not read.
        load_inplace: read the adapter's files again, and load them if they have changed.

    Raises:
        ValueError: `lora_int_id` is below 1, or `lora_path` is empty.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError(
                f"lora_path of {self.lora_name!r} is empty; give a directory or a hub id"
            )

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path
