"""Engines with recurrent layers have the slots of their plan, on several ranks too."""

from __future__ import annotations

import pytest

from ostinato import LLM, SamplingParams
from ostinato.benchmarks.simulate.fleet import simulate_open
from ostinato.benchmarks.simulate.specs import measured_spec
from tests.benchmarks.simulate.simulations import make_spec, random_traffic, rows
from tests.runtime.hybrid import SLOT_BYTES, hybrid_config

PROMPTS = [[(7 * index) % 299 for index in range(43)], [5, 6, 7]]
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
MEASURED, UNMEASURED = (f"graphs.cost_table_budget_s={seconds}" for seconds in (600, 0))


def answers(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS)]


def test_an_engine_has_the_slots_of_its_plan() -> None:
    words = ("scheduler.max_num_seqs=null", "cache.state_slots=6", "device.name=cpu")
    llm = LLM(config=hybrid_config(*words, MEASURED))
    stats = llm.stats()
    assert (stats.num_state_slots, stats.num_free_state_slots) == (6, 6)
    assert stats.max_num_seqs == 5
    costs = llm._engine.cost_table
    assert costs is not None
    assert max(costs.seqs) == 5
    first = answers(llm)
    assert answers(llm) == first
    assert llm.stats().num_free_state_slots == 6
    spec = measured_spec(hybrid_config(*words, MEASURED))
    assert (spec.num_states, spec.limits.max_num_seqs) == (7, 5)


@pytest.mark.parametrize("words", ["parallel.pipeline=2", "parallel.tensor=2"])
@pytest.mark.parametrize("attention", [0, 3])
def test_ranks_of_which_one_has_no_attention(words: str, attention: int) -> None:
    """With two stages, rank 0 has layers 2 and 3."""
    common = {"attention": (attention,)}
    expected = answers(LLM(config=hybrid_config("device.name=cpu", UNMEASURED, **common)))
    llm = LLM(config=hybrid_config("device.name=cpu", MEASURED, words, **common))
    assert answers(llm) == expected
    blocks = 8 * 256 * llm.stats().num_blocks
    states = (llm.stats().num_state_slots + 1) * SLOT_BYTES
    planned = sum(rank.memory_bytes for rank in llm.model.ranks)
    assert planned >= blocks + 3 * states
    assert planned < blocks + 3 * states + (4 << 20)
    llm.close()


@pytest.mark.parametrize("num_states", [0, 4, 20])
def test_simulated_engines_end_all_requests(num_states: int) -> None:
    spec = make_spec(num_states=num_states)
    results = simulate_open(spec, lambda: random_traffic(3, 60, 40.0, shared=40))
    assert len(rows(results)) == 60
