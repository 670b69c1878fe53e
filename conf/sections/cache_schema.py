"""The section `cache`: the paged KV cache, and slower tiers that keep copies of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ostinato.conf.schema import Section, refuse, setting

__all__ = ("CacheConfig", "CacheDType", "StorePolicy")


_DISK_GIB = 8.0  # the default of `disk_gib`


class CacheDType(StrEnum):
    auto = "auto"
    fp8_e4m3 = "fp8_e4m3"
    int8 = "int8"


class StorePolicy(StrEnum):
    """Which blocks are copied to the tiers."""

    prompts = "prompts"
    reused = "reused"
    all = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Section):
    """The paged KV cache."""

    key = "cache"
    block_size: int = setting(16, "tokens per block", one_of=(8, 16, 32, 64, 128))
    dtype: CacheDType = setting(
        CacheDType.auto,
        "dtype of keys and values; auto = the model's own; int8 (CPU) and fp8_e4m3 (GPU) take "
        "about half the memory of 16-bit values",
    )
    memory_gib: float | None = setting(
        None,
        "GiB for KV blocks and for states of recurrent layers; null = what the memory plan leaves",
        above=0,
    )
    state_slots: int | None = setting(
        None,
        "slots for states of a model with recurrent layers: one for each running sequence, the "
        "others for checkpoints of prefixes; null = chosen",
        at_least=2,
    )
    enable_prefix_caching: bool = setting(True, "reuse KV blocks of equal prompt prefixes")
    keep_all_tokens: bool = setting(
        False,
        "layers with a sliding window keep the keys and values of all tokens too; false = they "
        "free the blocks that lie outside of the window",
    )
    disk_dir: str = setting(
        "", "directory for copies of KV blocks, which later starts use too; empty = none"
    )
    disk_gib: float = setting(
        _DISK_GIB,
        "GiB of each engine's copies in cache.disk_dir; the oldest are overwritten",
        above=0,
    )
    host_gib: float = setting(
        0.0, "GiB of host memory for copies of a GPU's KV blocks; 0 = none", at_least=0
    )
    store: StorePolicy = setting(
        StorePolicy.prompts,
        "blocks to copy to host memory and disk: prompts = those of prompts; reused = those that a "
        "second request uses; all = those of outputs too",
    )
    store_salted: bool = setting(
        False, "copy blocks of requests with a cache_salt too; files of cache.disk_dir reveal text"
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        either = "cache.disk_dir or cache.host_gib"
        for key, default, needed, is_used in (
            ("disk_gib", _DISK_GIB, "cache.disk_dir", bool(self.disk_dir)),
            ("store", StorePolicy.prompts, either, self.has_tiers),
            ("store_salted", False, either, self.has_tiers),
        ):
            value = getattr(self, key)
            if value != default and not is_used:
                refuse(f"cache.{key}", f"left out, or used with {needed}", str(value))
        for key, is_set in (("disk_dir", bool(self.disk_dir)), ("host_gib", self.host_gib > 0)):
            if is_set and not self.enable_prefix_caching:
                refuse(
                    f"cache.{key}",
                    "left out, because cache.enable_prefix_caching=false",
                    getattr(self, key),
                )

    def without_tiers(self) -> CacheConfig:
        """The same section without copies of blocks."""
        return replace(
            self,
            disk_dir="",
            disk_gib=_DISK_GIB,
            host_gib=0.0,
            store=StorePolicy.prompts,
            store_salted=False,
        )

    @property
    def has_tiers(self) -> bool:
        """Whether blocks are copied to host memory or to disk."""
        return bool(self.disk_dir) or self.host_gib > 0
