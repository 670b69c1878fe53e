"""Decides whether the layers with a sliding window have KV blocks of their own, and says why.

models/kv_groups.py explains the groups.
"""

from __future__ import annotations

from ostinato.conf.engine_config import EngineConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup, kv_groups

__all__ = ("choose_groups", "describe_groups", "draft_groups")


def choose_groups(
    config: EngineConfig, model: ModelConfig, max_model_len: int
) -> tuple[KVGroup, ...]:
    """The KV groups of an engine. All its ranks choose the same.

    Args:
        config: the engine's configuration.
        model: the whole model.
        max_model_len: tokens of the longest sequence.
    """
    if not model.kind.needs_kv_cache or _why_whole(config, model):
        return WHOLE_CACHE
    return kv_groups(model.attention_windows, max_model_len)


def draft_groups(groups: tuple[KVGroup, ...]) -> tuple[KVGroup, ...]:
    """The group of a draft model or a head, which has the block tables of its model's first group.

    Args:
        groups: those of the model.
    """
    assert not groups[0].window, "choose_groups knows of the draft model"
    return (KVGroup(units=groups[0].units),)


def describe_groups(
    config: EngineConfig, model: ModelConfig, groups: tuple[KVGroup, ...]
) -> str | None:
    """One line about what the layers keep, for the memory plan. None if no layer has a window.

    Args:
        config: the engine's configuration.
        model: the whole model.
        groups: from `choose_groups`.
    """
    num_windowed = sum(window != 0 for window in model.attention_windows)
    if not num_windowed or not model.kind.needs_kv_cache:
        return None
    if groups == WHOLE_CACHE:
        reason = _why_whole(config, model) or "no sequence is longer than the window"
        return (
            f"KV groups: none. Every layer keeps all tokens, although {num_windowed} of "
            f"{len(model.attention_windows)} have a window: {reason}"
        )
    block_size, counts = config.cache.block_size, [num_windowed]
    if len(groups) > 1:
        counts.insert(0, len(model.attention_windows) - num_windowed)
    parts = [
        f"{count} {'layer keeps' if count == 1 else 'layers keep'} "
        f"{f'{group.window:,}' if group.window else 'all'} tokens (blocks of "
        f"{group.units * block_size})"
        for count, group in zip(counts, groups, strict=True)
    ]
    return f"KV groups: {', '.join(parts)}"


def _why_whole(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why layers with a window keep all tokens. None = they need not."""
    cache = config.cache
    if cache.keep_all_tokens:
        return "cache.keep_all_tokens is set"
    if cache.has_tiers:
        key = "cache.disk_dir" if cache.disk_dir else "cache.host_gib"
        return f"{key} copies blocks that hold all layers"
    if config.speculation.uses_model and 0 not in model.attention_windows:
        return "the draft model or head needs a block table of all tokens"
    return None
