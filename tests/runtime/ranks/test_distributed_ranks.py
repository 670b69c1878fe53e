"""Engines whose ranks exchange values by torch.distributed: here with gloo, on GPUs with NCCL."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from ostinato import LLM
from ostinato.runtime.errors import RankFailedError
from tests.runtime.ranks.test_ranks_of_llm import GREEDY, KINDS, SETTINGS, TEXTS

GLOO = (*SETTINGS, "parallel.exchange=gloo")


def facts(llm: LLM) -> list[object]:
    """Tokens and log-probabilities of every kind of request, in one batch of two texts."""
    prompts = [text for text in TEXTS[:2] for _ in KINDS]
    outputs = llm.generate(prompts, list(KINDS.values()) * 2, use_progress=False)
    return [
        (one.prompt_logprobs, [(each.token_ids, each.logprobs) for each in one.outputs])
        for one in outputs
    ]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[object]]:
    with LLM(tensor_parallel_size=2, overrides=SETTINGS) as llm:
        yield facts(llm)


def test_two_ranks_have_the_bits_of_shared_memory_and_leave_nothing(expected: list[object]) -> None:
    """The bits are equal because `a + b == b + a`, and because the sums are made in float32."""

    def check_used() -> None:
        """Checks that no descriptor and no process is left. Those of earlier tests may be gone."""
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert {one.pid for one in psutil.Process().children()} <= children

    descriptors = len(os.listdir("/proc/self/fd"))
    children = {one.pid for one in psutil.Process().children()}
    with LLM(tensor_parallel_size=2, overrides=GLOO) as llm:
        assert facts(llm) == expected
    check_used()
    with LLM(tensor_parallel_size=2, overrides=GLOO) as llm:
        os.kill(llm.model.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(
            RankFailedError, match=r"^rank 1: its process \d+ was killed by SIGKILL"
        ):
            llm.generate(TEXTS, GREEDY, use_progress=False)
    del llm
    gc.collect()  # the traceback of the error held the connections of gloo
    check_used()


@pytest.mark.slow
def test_steps_that_keep_their_tokens_on_the_device_send_them_to_the_other_ranks(
    expected: list[object],
) -> None:
    """Steps overlap, as they do on a GPU."""
    with LLM(tensor_parallel_size=2, overrides=(*GLOO, "scheduler.overlap=true")) as llm:
        assert facts(llm) == expected


@pytest.mark.slow
def test_a_stopped_rank_ends_the_group() -> None:
    with LLM(tensor_parallel_size=2, overrides=GLOO) as llm:
        os.kill(llm.model.ranks[1].pid, signal.SIGSTOP)
        with pytest.raises(RankFailedError, match="rank 1: it has been stopped for"):
            llm.generate(TEXTS, GREEDY, use_progress=False)


@pytest.mark.parametrize(
    "division", ["parallel.pipeline=2", pytest.param("parallel.pipeline=3", marks=pytest.mark.slow)]
)
def test_stages_have_the_bits_of_shared_memory(division: str) -> None:
    with LLM(overrides=(*SETTINGS, division)) as llm:
        expected = facts(llm)
    with LLM(overrides=(*GLOO, division)) as llm:
        assert facts(llm) == expected


@pytest.mark.slow
def test_captured_stages_whose_tokens_stay_on_the_device_have_the_bits_of_shared_memory() -> None:
    """On GPUs, stages run in this way: captured, and with overlapped steps."""
    settings = tuple(one for one in SETTINGS if not one.startswith("graphs.mode"))
    settings = (*settings, "parallel.pipeline=2")
    with LLM(overrides=settings) as llm:
        expected = facts(llm)
    with LLM(overrides=(*settings, "parallel.exchange=gloo", "scheduler.overlap=true")) as llm:
        assert facts(llm) == expected
        assert llm.stats().steps_by_kind["captured"] > 0
        assert not llm.stats().late_compiles


@pytest.mark.slow
def test_four_ranks_in_two_stages_have_the_bits_of_shared_memory(expected: list[object]) -> None:
    divided = ("parallel.tensor=2", "parallel.pipeline=2")
    with LLM(overrides=(*GLOO, *divided)) as llm:
        assert facts(llm) == expected


@pytest.mark.slow
def test_captured_steps_have_the_bits_of_shared_memory() -> None:
    settings = tuple(one for one in SETTINGS if not one.startswith("graphs.mode"))
    with LLM(tensor_parallel_size=2, overrides=settings) as llm:
        expected = facts(llm)
    with LLM(tensor_parallel_size=2, overrides=(*settings, "parallel.exchange=gloo")) as llm:
        assert facts(llm) == expected
        assert not llm.stats().late_compiles
