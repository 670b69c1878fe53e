"""Engines of two ranks on two GPUs; skipped where there are fewer.

tests/runtime/ranks/test_distributed_ranks.py tests the same code between CPUs.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch

from ostinato import LLM
from ostinato.runtime.errors import RankFailedError, StartupError
from tests.gpu.test_engine_gpu import GREEDY, generate, make_prompts
from tests.gpu.tiny_llama import cuda_config
from tests.runtime.ranks.test_rank_deaths import together
from tests.runtime.ranks.test_ranks_on_machines import Site, tokens_on_one_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("overrides", [("graphs.mode=eager",), (), ("graphs.form=model",)])
def test_two_ranks_have_the_tokens_of_one(overrides: tuple[str, ...]) -> None:
    """In float32 the other order of sums changes no token of these prompts."""
    prompts = make_prompts(16)
    with LLM(config=cuda_config(*overrides)) as one:
        expected = generate(one, prompts)
    with LLM(config=cuda_config("parallel.tensor=2", *overrides)) as two:
        assert generate(two, prompts) == expected
        assert generate(two, prompts) == expected, "hits in the prefix cache change a token"
        assert not two.stats().late_compiles
        assert [one.rank for one in two.model.ranks] == [0, 1]
        if not overrides:
            assert two.stats().steps_by_kind["captured"] > 0


@pytest.mark.parametrize("overrides", [("graphs.mode=eager",), ()])
def test_two_stages_have_the_tokens_of_one_process(overrides: tuple[str, ...]) -> None:
    prompts = make_prompts(16)
    with LLM(config=cuda_config(*overrides)) as one:
        expected = generate(one, prompts)
    with LLM(config=cuda_config("parallel.pipeline=2", *overrides)) as two:
        assert generate(two, prompts) == expected
        assert generate(two, prompts) == expected, "hits in the prefix cache change a token"
        assert not two.stats().late_compiles
        if not overrides:
            assert two.stats().steps_by_kind["captured"] > 0


def test_two_ranks_start_again_from_the_bundle_that_the_first_has_saved() -> None:
    prompts = make_prompts(4)
    found = []
    for _ in range(2):
        with LLM(config=cuda_config("parallel.tensor=2", "graphs.bundle=true")) as llm:
            found.append(generate(llm, prompts))
    assert found[0] == found[1]


@pytest.mark.parametrize("division", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_two_machines_with_a_gpu_each_have_the_tokens_of_one(
    division: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second machine is a `run rank` process on this machine that sees only the second GPU."""
    settings = ("device.name=cuda", "graphs.mode=captured", division, "parallel.rank_timeout_s=100")

    async def scenario() -> None:
        expected = await tokens_on_one_machine(*settings)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        site = Site(*settings, CUDA_VISIBLE_DEVICES="1")
        try:
            await site.start()
            assert [one.machine for one in site.ranks] == [0, 1]
            assert await together(site.client) == expected
        finally:
            await site.close()

    asyncio.run(scenario())


@pytest.mark.whole_device
def test_each_rank_has_a_gpu_of_its_own() -> None:
    free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    with LLM(config=cuda_config("parallel.tensor=2")) as llm:
        generate(llm, make_prompts(2))
        now = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        assert all(after < before for before, after in zip(free, now, strict=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_a_rank_ends_the_step_that_waits_for_it(number: signal.Signals) -> None:
    with LLM(config=cuda_config("parallel.tensor=2")) as llm:
        generate(llm, make_prompts(2))
        os.kill(llm.model.ranks[1].pid, number)
        with pytest.raises(RankFailedError, match=r"^rank 1: "):
            llm.generate(make_prompts(8), GREEDY, use_progress=False)


def test_more_ranks_than_gpus_are_refused() -> None:
    if torch.cuda.device_count() >= 4:
        pytest.skip("there are GPUs for four ranks")
    with pytest.raises(StartupError, match="an engine of 4 ranks needs 4 GPUs, one for each rank"):
        LLM(config=cuda_config("parallel.tensor=4"))
