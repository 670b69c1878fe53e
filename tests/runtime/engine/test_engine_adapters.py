"""Adapters of an engine: loads between steps, and requests with several adapters in one step."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ostinato import LLM, SamplingParams
from ostinato.benchmarks.workload.random_adapter import write_random_adapter
from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig
from ostinato.models.adapters.peft_adapter import Adapter
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.execution import rank_adapters
from ostinato.runtime.types.params import PoolingParams
from ostinato.runtime.types.request import Request
from tests.models.minilm import minilm_directory
from tests.runtime.adapted_engines import (
    GREEDY,
    adapted_answers,
    load_adapters,
    run_requests,
)
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

ROOM = ("device.name=cpu", "lora.max_adapters=3", "lora.max_rank=8")
NUMBERS = random.Random(0)
PROMPTS = [
    [NUMBERS.randrange(2, VOCAB_SIZE) for _ in range(NUMBERS.randint(1, 60))] for _ in range(12)
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_random_adapter(folder / str(seed), MODEL, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config=tiny_config(*ROOM)) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM, adapters: list[Path]) -> list[list[int]]:
    """The answers of an eager engine. Prompts have the base model and the adapters in turns."""
    return adapted_answers(llm, adapters[:3], PROMPTS)


def slot_of(index: int) -> int:
    return index % 4 - 1


def test_requests_of_one_step_have_adapters_of_their_own(
    llm: LLM, adapters: list[Path], expected: list[list[int]]
) -> None:
    digests = load_adapters(llm._engine, adapters[:3])
    for index, prompt in enumerate(PROMPTS[:8]):
        llm.reset_prefix_cache()
        assert run_requests(llm._engine, [prompt], [slot_of(index)], digests) == [expected[index]]
    with LLM(config=tiny_config("device.name=cpu")) as plain:
        answers = plain.generate(PROMPTS, GREEDY, use_progress=False)
    same = [
        one.outputs[0].token_ids == tokens for one, tokens in zip(answers, expected, strict=True)
    ]
    assert same == [slot_of(index) < 0 for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "settings",
    [
        ("graphs.mode=captured",),
        ("speculation.method=ngram", "speculation.max_tokens=3"),
        pytest.param(("graphs.mode=captured", "graphs.form=model"), marks=pytest.mark.slow),
        pytest.param(("parallel.tensor=2",), marks=pytest.mark.slow),
        pytest.param(("parallel.pipeline=2",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_engines_give_the_same_tokens(
    settings: tuple[str, ...], adapters: list[Path], expected: list[list[int]]
) -> None:
    with LLM(config=tiny_config(*ROOM, *settings)) as other:
        assert adapted_answers(other, adapters[:3], PROMPTS) == expected
        assert other.stats().late_compiles == []


def test_a_replaced_adapter_shares_no_blocks_with_its_successor(
    llm: LLM, adapters: list[Path], expected: list[list[int]]
) -> None:
    del expected  # its fixture has filled the prefix cache
    engine = llm._engine
    prompt = PROMPTS[0] * 2 + PROMPTS[1]
    [first, *_] = load_adapters(engine, adapters[:1])
    before = run_requests(engine, [prompt], [0], [first])
    [second, *_] = load_adapters(engine, adapters[3:])
    hits = engine.stats().prefix_hits
    after = run_requests(engine, [prompt], [0], [second])
    assert engine.stats().prefix_hits == hits
    assert after != before
    with pytest.raises(InvalidRequestError, match="is not loaded in this engine"):
        run_requests(engine, [prompt], [0], [first])
    load_adapters(engine, adapters[:1])
    assert run_requests(engine, [prompt], [0], [first]) == before
    assert engine.stats().prefix_hits > hits, "its own blocks are found again"


def test_steps_go_on_while_an_adapter_is_loaded(
    llm: LLM, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()
    read = rank_adapters.read_adapter

    def read_later(*arguments: Any) -> Adapter:
        may_read.wait(60)
        return read(*arguments)

    monkeypatch.setattr(rank_adapters, "read_adapter", read_later)
    engine = llm._engine
    may_read.set()
    [digest, *_] = load_adapters(engine, adapters[:1])
    sampling = msgspec.structs.replace(GREEDY, max_tokens=150)
    request = Request(
        request_id="long",
        prompt_token_ids=PROMPTS[0],
        sampling=sampling,
        adapter_slot=0,
        cache_keys=(digest,),
    )
    engine.add_request(request)
    alone: list[int] = []
    while engine.has_work:
        alone += [token for output in engine.step() for token in output.new_token_ids]
    engine.add_request(request)
    may_read.clear()
    for slot, directory in ((1, adapters[1]), (2, adapters[2])):
        engine.begin_adapter(slot, str(directory), "another digest")
    with pytest.raises(InvalidRequestError, match="an adapter is being loaded into slot 2"):
        engine.begin_adapter(2, str(adapters[2]), "another digest")
    tokens: list[int] = []
    while len(tokens) < 20:
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    assert engine.take_adapters() == []
    may_read.set()
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    assert tokens == alone
    ended = engine.take_adapters()
    assert [slot for slot, _ in ended] == [1, 2]
    assert all("files have changed" in failure for _, failure in ended)


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_is_not_there_is_refused(llm: LLM, adapters: list[Path], slot: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"adapter slot {slot} must be in \[0, 3\)"):
        llm._engine.begin_adapter(slot, str(adapters[0]), "")


def test_a_failed_load_leaves_the_slot_empty(
    llm: LLM, adapters: list[Path], tmp_path: Path
) -> None:
    engine = llm._engine
    [digest, *_] = load_adapters(engine, adapters[:1])
    other = write_random_adapter(tmp_path, MODEL | {"hidden_size": 32}, rank=4)
    engine.begin_adapter(0, str(other), "")
    while engine.has_work:
        engine.step()
    [(slot, failure)] = engine.take_adapters()
    assert slot == 0
    assert "must have shape" in failure
    with pytest.raises(InvalidRequestError, match="is not loaded"):
        run_requests(engine, PROMPTS[:1], [0], [digest])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n=1, use_beam_search=True, max_tokens=8),
        SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1),
    ],
    ids=["beams", "log-probabilities"],
)
def test_every_way_of_sampling_uses_the_adapter(
    llm: LLM, adapters: list[Path], sampling: SamplingParams
) -> None:
    engine = llm._engine
    [digest, *_] = load_adapters(engine, adapters[:1])

    def outputs(slot: int) -> list[object]:
        engine.add_request(
            Request(
                request_id="one",
                prompt_token_ids=PROMPTS[2],
                sampling=sampling,
                adapter_slot=slot,
                cache_keys=() if slot < 0 else (digest,),
            )
        )
        found: list[object] = []
        while engine.has_work:
            for output in engine.step():
                found.append((output.new_token_ids, output.logprobs, output.beams))
        return found

    assert outputs(0) == outputs(0) != outputs(-1)


def test_a_vector_is_that_of_the_adapter(llm: LLM, adapters: list[Path]) -> None:
    engine = llm._engine
    [digest, *_] = load_adapters(engine, adapters[:1])
    vectors = []
    for slot in (0, -1, 0):
        engine.add_request(
            Request(
                request_id="one",
                prompt_token_ids=PROMPTS[2],
                sampling=GREEDY,
                pooling=PoolingParams(),
                adapter_slot=slot,
                cache_keys=() if slot < 0 else (digest,),
            )
        )
        while engine.has_work:
            vectors += [output.pooled for output in engine.step()]
    assert vectors[0] == vectors[2] != vectors[1]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (tiny_config(*ROOM, "model.implementation=transformers"), "runs through transformers"),
        (load_config([*ROOM, f"model.path={minilm_directory()}"]), "BertModel is an encoder"),
    ],
    ids=["transformers", "encoder"],
)
def test_models_without_room_for_adapters_are_refused(config: RunConfig, text: str) -> None:
    with pytest.raises(StartupError, match=text):
        LLM(config=config)
