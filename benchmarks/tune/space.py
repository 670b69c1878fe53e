"""The search space of `run tune`: which settings vary, and which values they may have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, cast

from ostinato.benchmarks.tune.goals import Goals
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.speculation_schema import SpeculationMethod

__all__ = ("Space", "Value", "Variant", "apply_values", "is_alike", "searched_keys", "value_of")

Value = int | float | bool | str | None

_USUAL_KEYS = (
    "scheduler.max_num_seqs",
    "scheduler.max_num_batched_tokens",
    "scheduler.itl_target_ms",
    "cache.block_size",
    "device.threads",
)
_SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DRAFT_TOKENS = (1, 3, 7)
_MEMORY_SHARES = (0.25, 0.5, 1.0)
_ALIKE = 0.1  # targets whose relative difference is at most this count as equal


class Variant(NamedTuple):
    """The settings on which step costs depend. Each variant has its own step-cost table."""

    threads: int
    block_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values that each key may have. The value None leaves the choice to the engine.

    Args:
        choices: {key: values}, in the order of `tune.keys`.
        targets_ms: lowest and highest scheduler.itl_target_ms; None = it is not searched.
        variants: the variants with known step costs.
    """

    choices: dict[str, tuple[Value, ...]]
    targets_ms: tuple[float, float] | None
    variants: tuple[Variant, ...]

    @classmethod
    def of(
        cls,
        config: RunConfig,
        goals: Goals,
        *,
        variants: tuple[Variant, ...],
        floor_ms: float,
        cache_gib: float,
    ) -> Space:
        """The space of a configuration.

        Args:
            config: `tune.keys` names the keys to search.
            goals: the ITL goal is the highest ITL target to try.
            variants: the variants with known step costs.
            floor_ms: milliseconds of a decode step of one sequence.
            cache_gib: the KV cache's memory in the engine's memory plan.
        """
        keys = searched_keys(config)
        known: dict[str, tuple[Value, ...]] = {
            "scheduler.max_num_seqs": (None, *_SEQS),
            "scheduler.max_num_batched_tokens": (None, *_TOKENS),
            "cache.memory_gib": tuple(round(share * cache_gib, 3) for share in _MEMORY_SHARES),
            "cache.enable_prefix_caching": (True, False),
            "cache.block_size": tuple(sorted({one.block_size for one in variants})),
            "device.threads": tuple(sorted({one.threads for one in variants})),
            "speculation.method": _methods(config),
            "speculation.max_tokens": tuple(
                sorted({*_DRAFT_TOKENS, config.speculation.max_tokens})
            ),
        }
        targets = None
        if "scheduler.itl_target_ms" in keys:
            most = goals.itl_ms or 20 * floor_ms
            targets = (min(1.2 * floor_ms, 0.5 * most), max(most, 2.4 * floor_ms))
        return cls(
            choices={key: known[key] for key in keys if key in known},
            targets_ms=targets,
            variants=variants,
        )

    def is_legal(self, values: Mapping[str, Value]) -> bool:
        """Whether these values are valid together and their step costs are known."""
        seqs = values.get("scheduler.max_num_seqs")
        tokens = values.get("scheduler.max_num_batched_tokens")
        if seqs is not None and tokens is not None and cast(int, tokens) < cast(int, seqs):
            return False
        return any(
            values.get("device.threads", one.threads) == one.threads
            and values.get("cache.block_size", one.block_size) == one.block_size
            for one in self.variants
        )


def _methods(config: RunConfig) -> tuple[Value, ...]:
    """No drafts, and the configured drafts; with a draft model, only the configured drafts."""
    method = config.speculation.drafter
    if config.speculation.uses_model:
        return (method,)
    usual = SpeculationMethod.auto if method is SpeculationMethod.none else method
    return (SpeculationMethod.none, usual)


def searched_keys(config: RunConfig) -> list[str]:
    """The keys to search."""
    return config.tune.keys or list(_USUAL_KEYS)


def value_of(config: RunConfig, key: str) -> Value:
    """A key's value, as plain data."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def apply_values(config: RunConfig, values: Mapping[str, Value]) -> RunConfig:
    """The configuration with these values.

    Raises:
        ConfigError: the values are not valid together.
    """
    changes: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        present = getattr(getattr(config, section), name)
        # A study stores the names of choices.
        is_name = isinstance(value, str)
        kind = SpeculationMethod if key == "speculation.method" and is_name else type(present)
        chosen = kind(value) if issubclass(kind, StrEnum) else value
        changes.setdefault(section, {})[name] = chosen
    try:
        sections = {
            name: dataclasses.replace(getattr(config, name), **fields)
            for name, fields in changes.items()
        }
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return dataclasses.replace(config, **sections)


def is_alike(values: Mapping[str, Value], others: Mapping[str, Value]) -> bool:
    """Whether two configurations are too similar for a real run to distinguish them.

    All values are equal, and ITL targets differ by at most a tenth.
    """
    one, other = (dict(its) for its in (values, others))
    targets = [its.pop("scheduler.itl_target_ms", None) for its in (one, other)]
    if one != other:
        return False
    low, high = (None if its is None else float(its) for its in targets)
    if low is None or high is None:
        return low is high
    return abs(low - high) <= _ALIKE * max(low, high)
