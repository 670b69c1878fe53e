"""Copies of KV blocks on disk with two ranks and with two stages, each with files of its own.

A block is loaded only if both ranks have their part. Otherwise it is computed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato import SamplingParams
from ostinato.conf.compose import load_config
from tests.runtime.disk_tiers import disk, facts, num_cached, opened
from tests.runtime.ranks.test_ranks_of_llm import SETTINGS

TEXTS = [
    "Once upon a time there was a scheduler with blocks, and each of its blocks had a table.",
    "The scheduler of a serving engine plans the next step while the last one still runs, and",
]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.7, seed=3, max_tokens=8, ignore_eos=True, logprobs=1),
]


class Restarts:
    """Engines that are started one after the other with the same directory."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        settings = [*SETTINGS, *overrides, f"cache.disk_dir={directory}", "cache.disk_gib=0.1"]
        self._config = load_config(settings)
        self._directory = directory

    def run(self) -> tuple[list[object], list[int], int]:
        """Facts, cached tokens, and blocks that could not be read, of a new engine."""
        with opened(self._config) as llm:
            outputs = llm.generate(TEXTS, SAMPLING, use_progress=False)
            return facts(outputs), num_cached(outputs), disk(llm).num_failed_blocks

    def file(self, name: str) -> Path:
        (engine,) = self._directory.glob("*/engine-*")
        return engine / name


def test_stages_find_their_blocks_after_a_restart(tmp_path: Path) -> None:
    engines = Restarts(tmp_path, "parallel.pipeline=2")
    expected, found, _ = engines.run()
    assert found == [0, 0]
    again, found, num_failed = engines.run()
    assert again == expected
    assert min(found) >= 16
    assert num_failed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "division",
    [
        ("parallel.tensor=2",),
        ("parallel.pipeline=2",),
        ("parallel.tensor=2", "parallel.pipeline=2"),
    ],
)
def test_what_one_rank_has_lost_is_computed(division: tuple[str, ...], tmp_path: Path) -> None:
    engines = Restarts(tmp_path, *division)
    expected, _, _ = engines.run()
    again, whole, _ = engines.run()
    assert again == expected
    assert min(whole) >= 16
    blocks = engines.file("rank-1/blocks.kv")
    data = blocks.read_bytes()
    blocks.write_bytes(bytes(len(data) // 2) + data[len(data) // 2 :])
    damaged, found, num_failed = engines.run()
    assert damaged == expected
    assert num_failed > 0
    assert sum(found) < sum(whole)
    assert engines.run()[:2] == (expected, whole), "what was computed was not stored again"
    engines.file("rank-1/index.kv").unlink()
    assert engines.run() == (expected, [0, 0], 0)
