"""A drafter's rows of logits are in the plan: limits, memory, buckets, buffers."""

from __future__ import annotations

import pytest

from ostinato.conf.compose import load_config
from ostinato.graphs.buckets import GraphKey
from ostinato.runtime.errors import StartupError
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.sampling.sampler import sampling_bytes
from ostinato.runtime.startup.plan.engine_plan import make_plan
from tests.models.families.test_bert import TINY as BERT
from tests.runtime.drafters import ReplayDrafter, make_llm
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

CONFIG = tiny_config("graphs.mode=captured", "scheduler.max_num_batched_tokens=24")


def test_the_plan_has_room_for_the_rows_of_all_sequences() -> None:
    """8 sequences of 4 rows are 32 rows; a step of 24 tokens has at most 24."""
    plain, drafting = (make_plan(CONFIG.engine, 1, max_drafts=count) for count in (0, 3))
    assert (plain.source.limits.rows_per_seq, drafting.source.limits.rows_per_seq) == (1, 4)
    more = sampling_bytes(24, 8, VOCAB_SIZE) - sampling_bytes(8, 8, VOCAB_SIZE)
    assert drafting.memory.activation_bytes - plain.memory.activation_bytes == more > 0
    added = set(drafting.buckets.keys) - set(plain.buckets.keys)
    assert added == {
        *(GraphKey(2 * size, size, 2) for size in range(1, 9)),
        *(GraphKey(4 * size, size, 4) for size in range(1, 7)),
    }


def test_the_engine_is_built_as_planned() -> None:
    drafter = ReplayDrafter(max_drafts=3, vocab_size=VOCAB_SIZE)
    config = tiny_config("scheduler.max_num_batched_tokens=24")
    with make_llm(config, drafter) as drafting, make_llm(config, None) as plain:
        for llm, rows in ((drafting, 24), (plain, 8)):
            executor = llm._engine._executor
            assert isinstance(executor, InlineExecutor)
            buffers = executor._runner._buffers
            assert buffers.max_num_rows == len(buffers.host.logits_indices) == rows
            assert len(buffers.host.sampled_rows) == 8
        assert drafting._engine._scheduler.drafts is not None
        assert plain._engine._scheduler.drafts is None


def test_drafts_that_fit_no_step_are_refused() -> None:
    config = tiny_config(
        "scheduler.max_num_batched_tokens=24",
        "speculation.method=ngram",
        "speculation.max_tokens=30",
    )
    with pytest.raises(StartupError) as error:
        make_plan(config.engine, 1)
    assert str(error.value) == (
        "speculation.max_tokens=30 needs steps of 31 tokens, and "
        "scheduler.max_num_batched_tokens=24; lower the first or raise the second"
    )


def test_the_plan_follows_the_configured_drafter() -> None:
    config = tiny_config("speculation.method=auto", "speculation.max_tokens=3")
    assert make_plan(config.engine, 1).source.limits.rows_per_seq == 4
    config = tiny_config("speculation=none", "speculation.max_tokens=3")
    assert make_plan(config.engine, 1).source.limits.rows_per_seq == 1


def test_a_model_that_does_not_generate_refuses_drafts() -> None:
    config = load_config(
        ["model.load_format=dummy", "speculation.method=ngram", "graphs.mode=eager"],
        values={"model.config": {"architectures": ["BertModel"], "model_type": "bert", **BERT}},
    )
    with pytest.raises(
        StartupError, match=r"speculation\.method=ngram is for models that generate"
    ):
        make_plan(config.engine, 1)
