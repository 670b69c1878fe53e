"""Draft heads (EAGLE-3, MTP) with tensor-parallel ranks and pipeline stages.

Answers with drafts equal those without. The first token of each draft is compared with that of an
engine in one process. With stages all first tokens are equal, with tensor parallelism at least 90%.
So the head reads the same hidden states, embeddings and logits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ostinato import LLM
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.speculation_schema import NO_DRAFTS
from ostinato.models import demo
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import RankFailedError
from tests.runtime.drafters import DraftRecorder
from tests.runtime.ranks.test_rank_deaths import disturb, together
from tests.runtime.ranks.test_ranks_of_llm import GREEDY, KINDS, SETTINGS, TEXTS
from tests.runtime.speculation.eagle_reference import write_head
from tests.runtime.speculation.next_token_reference import ReferenceLayer
from tests.runtime.speculation.test_equality import GLM
from tests.runtime.speculation.test_next_token import config
from tests.runtime.tiny import MODEL, tiny_config

DRAFTS = ("speculation.max_tokens=3", "speculation.adaptive=false")
# The bundled model and its draft head. The model's embedding is its output head too.
BUNDLED = (
    *SETTINGS,
    *DRAFTS,
    "speculation.method=eagle3",
    f"speculation.model={Path(demo.__file__).parent}/eagle3",
)
PROMPTS = [[5, 6, 7, 8] * 3, list(range(20, 120)), [9, 10], [*[5, 6, 7, 8] * 3, 11]]
SAMPLED = [GREEDY, KINDS["seeded"], KINDS["penalties"], KINDS["scored"]]
Drawn = dict[tuple[int, ...], list[int]]
Head = Callable[..., RunConfig]


def tiny(*words: str, **model: object) -> RunConfig:
    """A model with random weights, of 6 layers by default. Its embedding is not its output head."""
    settings = {**MODEL, "num_hidden_layers": 6, "eos_token_id": 299, **model}
    return tiny_config(*DRAFTS, "graphs.cost_table_budget_s=0", *words, model__config=settings)


def eagle3(directory: Path, *words: str) -> RunConfig:
    if not (directory / "config.json").exists():
        write_head(directory, MODEL, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    return tiny("speculation.method=eagle3", f"speculation.model={directory}", *words)


def mtp(directory: Path, *words: str) -> RunConfig:
    del directory
    return tiny("speculation.method=mtp", *words, **{**GLM, "num_hidden_layers": 4})


def stored_mtp(directory: Path, *words: str) -> RunConfig:
    """A model that is loaded from files, with 3 layers and a next-token layer."""
    if not (directory / "config.json").exists():
        ReferenceLayer("glm4-moe", directory)
    return config(directory, "graphs.mode=eager", "speculation.method=mtp", *DRAFTS, *words)


def drawn_by(llm: LLM) -> Drawn:
    """Compares answers with and without drafts, then with hits in the prefix cache.

    Returns the drafts of the first round, by the tokens before them.
    """
    recorder = DraftRecorder(llm)
    answers: list[object] = []
    found: Drawn = {}
    for speculation in (True, False, True):
        if not speculation:
            found = {tuple(before): drafts for before, drafts in recorder.drawn if drafts}
            llm.reset_prefix_cache()
        kinds = [msgspec.structs.replace(one, speculation=speculation) for one in SAMPLED]
        outputs = llm.generate(PROMPTS, kinds, use_progress=False)
        answers.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert answers[0] == answers[1] == answers[2]
    llm._engine.check_integrity()
    assert found
    return found


def share_equal(drawn: Drawn, expected: Drawn) -> float:
    """Of drafts after the same tokens, the share with the same first token."""
    both = drawn.keys() & expected.keys()
    assert len(both) > 20
    return sum(drawn[one][0] == expected[one][0] for one in both) / len(both)


def test_the_bundled_head_drafts_with_two_ranks_and_ends_with_them() -> None:
    with LLM(tensor_parallel_size=2, overrides=BUNDLED) as llm:
        drawn_by(llm)
        stats = llm.stats().speculation
        assert stats is not None
        before = stats.num_draft_tokens, stats.num_accepted_tokens
        llm.generate(TEXTS, GREEDY, use_progress=False)
        stats = llm.stats().speculation
        assert stats is not None
        drafted = stats.num_draft_tokens - before[0]
        assert stats.num_accepted_tokens - before[1] > 0.5 * drafted > 0
        os.kill(llm.model.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(RankFailedError):
            llm.generate(TEXTS, GREEDY, use_progress=False)


def check_divisions(head: Head, directory: Path, *divisions: str, mode: str = "eager") -> list[int]:
    """Compares answers of divided engines with and without drafts.

    The drafts are compared with those of an engine in one process.

    Returns for each division the first layer of rank 0.
    """
    graphs = f"graphs.mode={mode}"
    layers: list[int] = []
    with LLM(config=head(directory, graphs)) as llm:
        expected = drawn_by(llm)
    for division in divisions:
        with LLM(config=head(directory, graphs, *division.split())) as llm:
            # Tensor parallelism changes the last bits of sums, so it can change a draft.
            least = 0.9 if "tensor" in division else 1.0
            assert share_equal(drawn_by(llm), expected) >= least
            assert not llm.stats().late_compiles
            layers.append(llm.model.ranks[0].first_layer)
    return layers


def test_an_eagle_head_drafts_with_two_stages_as_in_one_process(tmp_path: Path) -> None:
    """The head reads hidden states of both stages. One of them enters the last stage."""
    assert check_divisions(eagle3, tmp_path, "parallel.pipeline=2") == [3]


def test_a_next_token_layer_drafts_with_ranks_and_stages_as_in_one_process(tmp_path: Path) -> None:
    check_divisions(mtp, tmp_path, "parallel.tensor=2", "parallel.pipeline=2")


@pytest.mark.slow
@pytest.mark.parametrize("head", [eagle3, mtp, stored_mtp])
@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_further_divisions_draft_like_one_process(head: Head, mode: str, tmp_path: Path) -> None:
    check_divisions(
        head,
        tmp_path,
        "parallel.tensor=2",
        "parallel.pipeline=3",
        "parallel.pipeline=2 parallel.tensor=2",
        "parallel.pipeline=3 parallel.exchange=gloo",
        mode=mode,
    )


@pytest.mark.slow
@pytest.mark.parametrize("division", ["parallel.tensor=2", "parallel.pipeline=2"])
@pytest.mark.parametrize("head", [eagle3, mtp])
def test_streams_with_drafts_go_on_after_the_kill_of_a_rank(
    head: Head, division: str, tmp_path: Path
) -> None:
    async def tokens(config: RunConfig, *, kills: bool) -> list[list[int]]:
        client = EngineClient(config)
        try:
            await client.start()
            if kills:
                assert await disturb(client, 1, signal.SIGKILL) == {"killed": 1}
            return await together(client)
        finally:
            await client.close()

    async def scenario() -> None:
        drafting = head(tmp_path, division, "server.restart_backoff_s=0.01")
        plain = dataclasses.replace(drafting, speculation=NO_DRAFTS)
        expected = await tokens(plain, kills=False)
        assert await tokens(drafting, kills=True) == expected

    asyncio.run(scenario())
