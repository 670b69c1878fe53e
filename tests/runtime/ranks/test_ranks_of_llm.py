"""`LLM(tensor_parallel_size=2)`: every kind of request, the death of a rank, and the clean-up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from ostinato import LLM, SamplingParams
from ostinato.models import demo
from ostinato.runtime.errors import RankFailedError
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams
from tests.waiting import wait_until

# Sums in another order change the last bits of a logit. In float32 that changes no token.
SETTINGS = (
    "model.dtype=float32",
    "graphs.mode=eager",
    "cache.memory_gib=0.02",
    "model.max_model_len=256",
    "scheduler.max_num_seqs=6",
    "scheduler.max_num_batched_tokens=64",
    "graphs.cost_table_budget_s=0",
)
DRAFTS = ("speculation=auto", "speculation.adaptive=false")
# The bundled model drafts for itself.
DRAFT_MODEL = (
    "speculation.method=draft",
    f"speculation.model={Path(demo.__file__).parent}",
    "speculation.max_tokens=3",
    "speculation.adaptive=false",
)
TEXTS = ["Once upon a time", "The scheduler", "A block table is", "Count to ten: one, two"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.7, seed=3, max_tokens=16),
    "several": SamplingParams(temperature=0.7, seed=5, n=2, max_tokens=12),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=16),
    "bad words": SamplingParams(temperature=0, bad_words=("the", "a"), max_tokens=16),
    "beams": SamplingParams(use_beam_search=True, best_of=3, n=2, temperature=0, max_tokens=10),
    "grammar": SamplingParams(
        temperature=0,
        max_tokens=60,
        structured_outputs=StructuredOutputsParams(regex="[a-f]{4}(-x){3}"),
    ),
    "scored": SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=8),
}


@pytest.fixture(scope="module")
def divided() -> Iterator[LLM]:
    with LLM(tensor_parallel_size=2, overrides=(*SETTINGS, *DRAFTS)) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole() -> Iterator[LLM]:
    with LLM(overrides=SETTINGS) as llm:
        yield llm


def test_all_kinds_of_requests_have_the_tokens_of_one_rank(divided: LLM, whole: LLM) -> None:
    """One batch has requests of all kinds, among them beams, grammars and scored prompts."""
    prompts = [text for text in TEXTS for _ in KINDS]
    params = list(KINDS.values()) * len(TEXTS)
    found = divided.generate(prompts, params, use_progress=False)
    expected = whole.generate(prompts, params, use_progress=False)
    for one, other in zip(found, expected, strict=True):
        assert [each.token_ids for each in one.outputs] == [
            each.token_ids for each in other.outputs
        ]
    scored = list(KINDS).index("scored")
    for one, other in zip(found[scored :: len(KINDS)], expected[scored :: len(KINDS)], strict=True):
        assert one.prompt_logprobs
        ours, theirs = (
            [
                score.logprob
                for score in [*(each.prompt_logprobs or []), *(each.outputs[0].logprobs or [])]
            ]
            for each in (one, other)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
    forms = found[list(KINDS).index("grammar") :: len(KINDS)]
    assert all(re.fullmatch("[a-f]{4}(-x){3}", one.outputs[0].text) for one in forms)
    for ours, theirs in zip(divided.embed(TEXTS), whole.embed(TEXTS), strict=True):
        np.testing.assert_allclose(ours.embedding, theirs.embedding, atol=1e-4)


def check_drafts(llm: LLM) -> None:
    """Compares answers with and without drafts. The last run can draft from the earlier answers."""
    kinds = [GREEDY, KINDS["seeded"], KINDS["scored"], KINDS["grammar"]]
    plain = [msgspec.structs.replace(one, speculation=False) for one in kinds]
    answers = [
        [each.outputs[0].token_ids for each in llm.generate(TEXTS, params, use_progress=False)]
        for params in (plain, kinds, kinds)
    ]
    assert answers[0] == answers[1] == answers[2]
    found = llm.stats().speculation
    assert found is not None
    assert found.num_accepted_tokens > 0
    llm._engine.check_integrity()


def test_drafts_change_no_token(divided: LLM) -> None:
    check_drafts(divided)


def check_draft_model(llm: LLM) -> None:
    """Compares answers with and without drafts of a model that is nearly always right."""
    drafts = llm.stats().speculation
    assert drafts is not None
    before = drafts.num_draft_tokens, drafts.num_accepted_tokens
    kinds = [GREEDY, KINDS["seeded"], KINDS["penalties"], KINDS["scored"], KINDS["grammar"]]
    plain = [msgspec.structs.replace(one, speculation=False) for one in kinds]
    for _ in range(2):  # the second time with hits in the prefix cache
        answers = [
            [
                (one.outputs[0].token_ids, one.outputs[0].logprobs)
                for text in TEXTS
                for one in llm.generate([text] * len(kinds), params, use_progress=False)
            ]
            for params in (plain, kinds)
        ]
        assert answers[0] == answers[1]
    drafts = llm.stats().speculation
    assert drafts is not None
    drafted = drafts.num_draft_tokens - before[0]
    assert drafts.num_accepted_tokens - before[1] > 0.5 * drafted > 0
    assert drafts.drafting_seconds > 0
    llm._engine.check_integrity()


def test_a_draft_model_changes_no_token_and_dies_with_a_rank() -> None:
    with LLM(tensor_parallel_size=2, overrides=(*SETTINGS, *DRAFT_MODEL)) as llm:
        check_draft_model(llm)
        os.kill(llm.model.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(RankFailedError):
            llm.generate(TEXTS, GREEDY, use_progress=False)


def test_a_batch_changes_no_token(divided: LLM) -> None:
    divided.reset_prefix_cache()
    together = divided.generate(TEXTS, KINDS["seeded"], use_progress=False)
    for text, one in zip(TEXTS, together, strict=True):
        divided.reset_prefix_cache()
        [alone] = divided.generate(text, KINDS["seeded"], use_progress=False)
        assert alone.outputs[0].token_ids == one.outputs[0].token_ids


def test_each_rank_writes_its_profile(divided: LLM, tmp_path: Path) -> None:
    divided._engine.start_profile(str(tmp_path))
    divided.generate(TEXTS[0], GREEDY, use_progress=False)
    traces = divided._engine.stop_profile()
    assert len(set(traces)) == 2
    assert sorted(map(Path, traces)) == sorted(tmp_path.iterdir())


def test_nothing_is_left_of_closed_and_of_failed_ranks() -> None:
    def used() -> tuple[int, set[int]]:
        children = {one.pid for one in psutil.Process().children()}
        return len(os.listdir("/proc/self/fd")), children

    with LLM(overrides=SETTINGS):  # the first engine of a process opens files that stay open
        pass
    before = used()
    with LLM(tensor_parallel_size=2, overrides=SETTINGS) as llm:
        llm.generate(TEXTS[0], GREEDY, use_progress=False)
        assert len(used()[1] - before[1]) == 1
    assert used() == before
    with LLM(tensor_parallel_size=2, overrides=SETTINGS) as llm:
        os.kill(llm.model.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(
            RankFailedError, match=r"^rank 1: its process \d+ was killed by SIGKILL"
        ):
            llm.generate(TEXTS, GREEDY, use_progress=False)
        with pytest.raises(
            RankFailedError, match=r"^the engine has ended and a new one must be made: rank 1: "
        ):
            llm.generate(TEXTS, GREEDY, use_progress=False)
    assert used() == before


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_no_rank_outlives_a_program_that_is_killed(stops: bool) -> None:
    """Even a stopped rank ends, although it cannot notice that its socket was closed."""
    code = (
        "from ostinato import LLM, SamplingParams\n"
        f"llm = LLM(tensor_parallel_size=2, overrides={SETTINGS!r})\n"
        "print(llm.model.ranks[1].pid, flush=True)\n"
        "while True:\n"
        "    llm.generate('Once', SamplingParams(max_tokens=200), use_progress=False)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        rank = psutil.Process(int(program.stdout.readline()))
        if stops:
            rank.suspend()
        program.kill()
    wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
