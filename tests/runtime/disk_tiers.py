"""Engines with copies of KV blocks on disk, and what their answers consist of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ostinato import LLM
from ostinato.conf.root import RunConfig
from ostinato.runtime.types.outputs import GenerationOutput
from ostinato.runtime.types.tier_stats import TierStats
from tests.runtime.tiny import tiny_config
from tests.waiting import wait_until

__all__ = ("disk", "facts", "num_cached", "opened", "tiny_disk", "wait_for_disk")


def tiny_disk(directory: Path, *overrides: str, **values: object) -> RunConfig:
    """The tiny model with copies on disk. No load counts as slower than computing."""
    return tiny_config(
        "device.name=cpu",
        "cache.disk_gib=0.02",
        "graphs.cost_table_budget_s=0",
        *overrides,
        cache__disk_dir=str(directory),
        **values,
    )


def disk(llm: LLM) -> TierStats:
    return llm.stats().tiers["disk"]


def wait_for_disk(llm: LLM) -> None:
    """Step until the directory is open. It is opened on a thread."""

    def is_open() -> bool:
        llm._engine.step()
        return disk(llm).num_places > 0

    wait_until(is_open, "the disk was not opened in time")


@contextmanager
def opened(config: RunConfig) -> Iterator[LLM]:
    """An engine whose disk is open. At the end the records of its blocks are checked."""
    with LLM(config=config) as llm:
        wait_for_disk(llm)
        yield llm
        llm._engine.check_integrity()


def facts(outputs: Sequence[GenerationOutput]) -> list[object]:
    """Tokens and the bits of all log-probabilities."""
    return [
        (one.prompt_logprobs, [(each.token_ids, each.logprobs) for each in one.outputs])
        for one in outputs
    ]


def num_cached(outputs: Sequence[GenerationOutput]) -> list[int]:
    return [one.num_cached_tokens for one in outputs]
