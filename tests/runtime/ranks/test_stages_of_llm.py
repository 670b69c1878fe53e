"""`LLM(pipeline_parallel_size=2)` gives the tokens of an engine without stages.

Log-probabilities are compared, too, bit for bit. One case has two ranks in each stage. It is
compared with an engine of two ranks without stages.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from ostinato import LLM, SamplingParams
from ostinato.conf.errors import ConfigError
from ostinato.runtime.errors import RankFailedError, StartupError
from ostinato.runtime.types.outputs import GenerationOutput
from tests.runtime.ranks.test_ranks_of_llm import (
    DRAFT_MODEL,
    DRAFTS,
    KINDS,
    SETTINGS,
    TEXTS,
    check_draft_model,
    check_drafts,
)

# A cache so small that sequences lose their blocks to others.
SMALL = (*SETTINGS, "cache.memory_gib=0.002")


@pytest.fixture(scope="module")
def staged() -> Iterator[LLM]:
    with LLM(pipeline_parallel_size=2, overrides=(*SMALL, *DRAFTS)) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole() -> Iterator[LLM]:
    with LLM(overrides=SETTINGS) as llm:
        yield llm


def mixed(llm: LLM) -> list[GenerationOutput]:
    """Every kind of request for two texts in one batch. One text fills a block of the cache."""
    texts = [TEXTS[0], TEXTS[1] * 9]
    prompts = [text for text in texts for _ in KINDS]
    return llm.generate(prompts, list(KINDS.values()) * len(texts), use_progress=False)


def facts(outputs: list[GenerationOutput]) -> list[object]:
    return [
        (one.prompt_logprobs, [(each.token_ids, each.logprobs) for each in one.outputs])
        for one in outputs
    ]


def test_all_kinds_of_requests_have_the_bits_of_one_process(staged: LLM, whole: LLM) -> None:
    expected = facts(mixed(whole))
    assert facts(mixed(staged)) == expected
    assert staged.stats().num_preemptions > 0
    assert facts(mixed(staged)) == expected, "hits in the prefix cache change an output"
    assert staged.stats().prefix_hits > 0
    for ours, theirs in zip(staged.embed(TEXTS), whole.embed(TEXTS), strict=True):
        np.testing.assert_allclose(ours.embedding, theirs.embedding, atol=1e-5)


def test_drafts_change_no_token(staged: LLM) -> None:
    check_drafts(staged)


def test_a_draft_model_changes_no_token() -> None:
    with LLM(pipeline_parallel_size=2, overrides=(*SETTINGS, *DRAFT_MODEL)) as llm:
        check_draft_model(llm)


def test_each_rank_has_its_layers(staged: LLM) -> None:
    last, first = staged.model.ranks
    assert (last.rank, last.pid) == (0, os.getpid())
    assert first.first_layer == 0
    assert last.first_layer == first.num_layers
    assert first.num_layers > 0
    assert last.num_layers > 0


def test_steps_of_both_lanes_are_in_flight(staged: LLM) -> None:
    engine = staged._engine
    most = 0
    for output in staged.stream(TEXTS[0], SamplingParams(n=4, max_tokens=20, ignore_eos=True)):
        most = max(most, len(engine._in_flight))
        assert output is not None
    # The stream gives an output when the step of one lane has been read. Then the step of the other
    # lane is in flight.
    assert most == 1


@pytest.mark.slow
def test_a_rank_that_ends_ends_the_engine() -> None:
    with LLM(pipeline_parallel_size=2, overrides=SETTINGS) as llm:
        os.kill(llm.model.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(
            RankFailedError, match=r"^rank 1: its process \d+ was killed by SIGKILL"
        ):
            mixed(llm)
        with pytest.raises(RankFailedError, match="the engine has ended and a new one must be"):
            mixed(llm)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.pipeline=9",), "parallel.pipeline=9: the model has 5 layers; set parallel"),
        (
            ("graphs.mode=captured", "graphs.form=model"),
            "set graphs.form=layer or parallel.pipeline=1",
        ),
    ],
)
def test_what_is_refused_is_named_with_the_remedy(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(StartupError, match=message.replace(".", r"\.")):
        LLM(overrides=(*SETTINGS, "parallel.pipeline=2", *overrides))


def test_stages_need_processes() -> None:
    with pytest.raises(ConfigError, match=r"auto, processes or ray with parallel\.pipeline=2"):
        LLM(pipeline_parallel_size=2, distributed_executor_backend="uni")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "like"),
    [
        (("parallel.pipeline=2",), ()),
        (("parallel.pipeline=2", *DRAFTS), ()),
        (("parallel.pipeline=3",), ()),
        (("parallel.pipeline=2", "parallel.tensor=2"), ("parallel.tensor=2",)),
    ],
)
def test_captured_stages_have_the_bits_of_one_stage(
    ways: tuple[str, ...], like: tuple[str, ...]
) -> None:
    settings = tuple(one for one in SETTINGS if not one.startswith(("graphs.mode", "model.dtype")))
    with LLM(overrides=(*settings, *like)) as llm:
        expected = facts(mixed(llm))
    with LLM(overrides=(*settings, *ways)) as llm:
        assert facts(mixed(llm)) == expected
        assert llm.stats().steps_by_kind["captured"] > 0
        assert not llm.stats().late_compiles
