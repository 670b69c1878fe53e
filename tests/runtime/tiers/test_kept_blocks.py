"""Requests that may use only a part of the blocks that an earlier engine left on disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ostinato import LLM, SamplingParams
from tests.runtime.disk_tiers import disk, facts, num_cached, opened, tiny_disk
from tests.runtime.tiny import tiny_config

PROMPT = [(7 * position + 3) % 290 + 2 for position in range(61)]  # 7 full blocks
KINDS = [
    SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=4, use_beam_search=True, best_of=3, n=2),
]


def test_scored_and_parallel_requests_load_what_they_may(tmp_path: Path) -> None:
    with LLM(config=tiny_config("device.name=cpu")) as llm:
        cold = [llm.generate([PROMPT], one, use_progress=False) for one in KINDS]
    with opened(tiny_disk(tmp_path)) as llm:
        llm.generate([PROMPT], KINDS[0], use_progress=False)
    with opened(tiny_disk(tmp_path)) as llm:
        warm = [llm.generate([PROMPT], one, use_progress=False) for one in KINDS]
        assert [facts(one) for one in warm] == [facts(one) for one in cold]
        assert disk(llm).num_loaded_blocks == 7


def test_a_directory_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a directory")
    with caplog.at_level(logging.WARNING), LLM(config=tiny_disk(taken)) as llm:
        one = SamplingParams(temperature=0.0, max_tokens=1)
        assert num_cached(llm.generate([PROMPT], one, use_progress=False)) == [0]
        assert not llm.stats().tiers
    assert [one for one in caplog.messages if "no copies on disk" in one and str(taken) in one]
