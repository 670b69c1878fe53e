"""Which engines have drafts if `speculation.method` is not set."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.speculation_schema import SpeculationMethod
from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.startup.plan.model_source import open_model
from ostinato.runtime.startup.plan.planning import plan_engine
from tests.models.families.test_bert import TINY as BERT
from tests.runtime.tiny import tiny_config

DEMO = (
    "graphs.mode=eager",
    "graphs.bundle=false",
    "cache.memory_gib=0.02",
    "model.max_model_len=256",
    "scheduler.max_num_seqs=4",
)


def encoder_config() -> RunConfig:
    return load_config(
        ["model.load_format=dummy", "graphs.mode=eager"],
        values={"model.config": {"architectures": ["BertModel"], "model_type": "bert", **BERT}},
    )


@pytest.mark.parametrize(
    ("words", "method", "rows"),
    [
        ((), "auto", 8),
        (("speculation.max_tokens=3",), "auto", 4),
        (("speculation=none",), "none", 1),
        (("speculation=ngram",), "ngram", 8),
        (("speculation.adaptive=false",), "none", 1),
        (("speculation=auto", "speculation.adaptive=false"), "auto", 8),
        (("graphs.cost_table_budget_s=0",), "none", 1),
        (("speculation=auto", "graphs.cost_table_budget_s=0"), "auto", 8),
        (("scheduler.max_num_seqs=1", "scheduler.max_num_batched_tokens=7"), "none", 1),
        (("scheduler.max_num_seqs=1", "scheduler.max_num_batched_tokens=8"), "auto", 8),
        (("model.dtype=float16",), "none", 1),
        (("graphs.pack_weights=false",), "none", 1),
        (("graphs.attention=reference",), "none", 1),
        (("graphs.attention=cpu", "model.dtype=bfloat16"), "auto", 8),
    ],
)
def test_the_default_is_auto_where_it_changes_no_bit_and_costs_are_measured(
    words: tuple[str, ...], method: str, rows: int
) -> None:
    plan = make_plan(tiny_config(*words).engine, 1)
    assert plan.config.speculation.method is SpeculationMethod(method)
    assert plan.source.limits.rows_per_seq == rows


def test_a_gpu_and_an_encoder_have_no_drafts_by_default() -> None:
    on_gpu = open_model(tiny_config().engine, torch.device("cuda"))
    for source in (on_gpu, make_plan(encoder_config().engine, 1).source):
        assert source.speculation.method is SpeculationMethod.none
        assert source.limits.rows_per_seq == 1


def test_drafts_give_way_where_their_rows_leave_too_little_memory() -> None:
    """The memory suffices for a plan without drafts, and not for one with drafts."""
    config = tiny_config("model.config.vocab_size=20000", "speculation.max_tokens=31").engine
    drafting, plain = (
        open_model(dataclasses.replace(config, speculation=section))
        for section in (
            dataclasses.replace(config.speculation, method=SpeculationMethod.auto),
            dataclasses.replace(config.speculation, method=SpeculationMethod.none),
        )
    )
    more = (
        plan_engine(config, drafting).activation_bytes - plan_engine(config, plain).activation_bytes
    )
    plan = plan_engine(config, plain)
    needed = plan.weights_bytes + plan.activation_bytes + plan.kv_bytes
    share = config.device.memory_fraction
    gib = (needed + more / 2) / share / (1 << 30)
    device = dataclasses.replace(config.device, memory_gib=gib)
    small = make_plan(dataclasses.replace(config, device=device), 1)
    assert small.config.speculation.method is SpeculationMethod.none
    large = make_plan(config, 1)
    assert large.config.speculation.method is SpeculationMethod.auto


def test_drafts_by_default_change_no_token() -> None:
    prompts = ["Count to ten: one, two", "Once upon a time"]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
    tokens = []
    for words in ((), ("speculation=none",)):
        with LLM(overrides=(*DEMO, *words)) as llm:
            outputs = [llm.generate(prompts, params, use_progress=False) for _ in range(2)]
            tokens.append([[one.outputs[0].token_ids for one in each] for each in outputs])
            drafts = llm.stats().speculation
            assert (drafts is None) == bool(words)
    assert tokens[0] == tokens[1]


def test_random_weights_have_no_drafts_by_default() -> None:
    for words, is_drafting in (((), False), (("speculation=auto",), True)):
        with LLM(config=tiny_config(*words)) as llm:
            assert (llm.stats().speculation is not None) == is_drafting
            assert llm.model.speculates == is_drafting
