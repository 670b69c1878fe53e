"""The section `lora`: adapters of low rank that requests name in place of the model."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.schema import Section, refuse, setting

__all__ = ("LoraConfig",)

_SPARE_SLOTS = 8  # slots for adapters that are loaded at run time, if `lora.max_adapters` is null


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) in PEFT's format, several in one batch."""

    key = "lora"
    adapters: dict[str, str] = setting(
        {}, "adapters to load at start: name -> local directory or hub id"
    )
    max_adapters: int | None = setting(
        None,
        "adapters that can be loaded at once; null = as many as lora.adapters, and 8 more with "
        "lora.allow_runtime_loading",
        at_least=0,
        at_most=1024,
    )
    max_rank: int = setting(
        16, "the largest rank of an adapter", one_of=(1, 8, 16, 32, 64, 128, 256, 320, 512)
    )
    allow_runtime_loading: bool = setting(
        False, "serve /v1/load_lora_adapter and /v1/unload_lora_adapter"
    )
    directory: str = setting(
        "", "adapters that are loaded at run time must lie in this directory; required for that"
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.max_adapters is not None and self.max_adapters < len(self.adapters):
            refuse(
                "lora.max_adapters",
                f"null or at least {len(self.adapters)}, the number of lora.adapters",
                self.max_adapters,
            )
        if self.allow_runtime_loading and not self.directory:
            refuse(
                "lora.directory",
                "a directory, because lora.allow_runtime_loading=true",
                self.directory,
            )

    @property
    def num_slots(self) -> int:
        """Adapters that can be loaded at once; 0 = requests cannot name adapters."""
        if self.max_adapters is not None:
            return self.max_adapters
        return len(self.adapters) + (_SPARE_SLOTS if self.allow_runtime_loading else 0)
