"""`LLM` with `lora_request`: the adapters of each prompt, loads, replacements, prefixes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.benchmarks.workload.random_adapter import write_random_adapter
from ostinato.runtime.errors import InvalidRequestError, StartupError
from tests.runtime.tiny import MODEL, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: LoRARequest(
            name, number, str(write_random_adapter(folder / name, MODEL, seed=number))
        )
        for number, name in enumerate(NAMES, 1)
    }


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config=tiny_config("lora.max_adapters=2", "device.name=cpu")) as made:
        yield made
        assert made._adapters._registry.num_free + len(made._adapters._registry.served) == 2


def tokens(llm: LLM, *ones: LoRARequest | None) -> list[list[int]]:
    answers = llm.generate(
        [PROMPT] * len(ones), GREEDY, use_progress=False, lora_request=list(ones)
    )
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.fixture(scope="module")
def expected(llm: LLM, asked: dict[str, LoRARequest]) -> dict[str | None, list[int]]:
    """The answers one at a time; more adapters than slots, so some are replaced."""
    found: dict[str | None, list[int]] = {name: tokens(llm, asked[name])[0] for name in NAMES}
    found[None] = tokens(llm, None)[0]
    assert len(set(map(tuple, found.values()))) == 5, "the adapters make no difference"
    return found


def test_the_prompts_of_a_call_have_adapters_of_their_own(
    llm: LLM, asked: dict[str, LoRARequest], expected: dict[str | None, list[int]]
) -> None:
    for names in (("a", None, "b", "a"), ("c",), (None, "d"), ("b", "b")):
        ones = [None if name is None else asked[name] for name in names]
        assert tokens(llm, *ones) == [expected[name] for name in names]
    one = llm.generate([PROMPT] * 2, GREEDY, use_progress=False, lora_request=asked["c"])
    assert [each.outputs[0].token_ids for each in one] == [expected["c"]] * 2
    streamed = [
        token
        for output in llm.stream(PROMPT, GREEDY, lora_request=asked["d"])
        for token in output.new_token_ids
    ]
    assert streamed == expected["d"]


def test_adapters_share_no_prefix(
    llm: LLM, asked: dict[str, LoRARequest], expected: dict[str | None, list[int]]
) -> None:
    llm.reset_prefix_cache()
    for name, num_cached in (("a", 0), ("b", 0), ("a", 16), (None, 0), ("b", 16), (None, 16)):
        one = None if name is None else asked[name]
        [answer] = llm.generate([PROMPT], GREEDY, use_progress=False, lora_request=one)
        assert answer.num_cached_tokens == num_cached
        assert answer.outputs[0].token_ids == expected[name]


def test_an_adapter_that_was_replaced_comes_back_with_its_prefixes(
    llm: LLM, asked: dict[str, LoRARequest], expected: dict[str | None, list[int]]
) -> None:
    """The digest is the identity, not the slot or the name."""
    llm.reset_prefix_cache()
    assert tokens(llm, asked["a"]) == [expected["a"]]
    for name in "bcd":
        assert tokens(llm, asked[name]) == [expected[name]]
    [answer] = llm.generate([PROMPT], GREEDY, use_progress=False, lora_request=asked["a"])
    assert (answer.num_cached_tokens, answer.outputs[0].token_ids) == (16, expected["a"])
    other = LoRARequest("a", 7, asked["b"].lora_path)  # the name now means other weights
    [answer] = llm.generate([PROMPT], GREEDY, use_progress=False, lora_request=other)
    assert (answer.num_cached_tokens, answer.outputs[0].token_ids) == (16, expected["b"])


def test_a_stream_keeps_its_adapter(
    llm: LLM, asked: dict[str, LoRARequest], expected: dict[str | None, list[int]]
) -> None:
    stream = llm.stream(PROMPT, LONG, lora_request=asked["a"])
    next(stream)
    assert tokens(llm, asked["b"]) == [expected["b"]]
    with pytest.raises(InvalidRequestError, match="no slot is free"):
        tokens(llm, asked["b"], asked["c"])
    assert tokens(llm, asked["c"]) == [expected["c"]], "b is replaced, not a"
    stream.close()
    assert tokens(llm, asked["b"], asked["d"]) == [expected["b"], expected["d"]]


def test_what_is_refused_leaves_the_engine_as_it_was(
    llm: LLM, asked: dict[str, LoRARequest], expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    large = write_random_adapter(tmp_path / "large", MODEL, rank=64)
    cases = [
        (LoRARequest("x", 1, str(large)), "rank"),
        (LoRARequest("x", 1, "/no/such"), "neither a directory"),
        ([asked["a"]] * 3, "length 3"),
        ([asked[name] for name in "abc"], "the call names 3 adapters"),
    ]
    for one, message in cases:
        count = 3 if message == "the call names 3 adapters" else 2
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate([PROMPT] * count, GREEDY, use_progress=False, lora_request=one)
    with pytest.raises(InvalidRequestError, match="prompt has 0 tokens"):
        llm.generate([PROMPT, []], GREEDY, use_progress=False, lora_request=asked["a"])
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    assert tokens(llm, asked["a"], None) == [expected["a"], expected[None]]


def test_the_arguments_of_vllm_and_configured_adapters(
    asked: dict[str, LoRARequest], expected: dict[str | None, list[int]]
) -> None:
    path = asked["a"].lora_path
    with LLM(config=tiny_config("device.name=cpu", lora__adapters={"a": path})) as llm:
        assert tokens(llm, asked["a"], None) == [expected["a"], expected[None]]
    with LLM(config=tiny_config("device.name=cpu")) as llm:
        with pytest.raises(InvalidRequestError, match=r"lora\.max_adapters=0; start with"):
            tokens(llm, asked["a"])
        assert tokens(llm, None) == [expected[None]]
    with pytest.raises(StartupError, match=r"lora\.adapters, a=/no/such: "):
        LLM(config=tiny_config("device.name=cpu", lora__adapters={"a": "/no/such"}))


def test_vectors_have_adapters_too(llm: LLM, asked: dict[str, LoRARequest]) -> None:
    texts = [PROMPT, PROMPT, PROMPT]
    ones = [asked["a"], None, asked["b"]]
    vectors = [each.embedding for each in llm.embed(texts, lora_request=ones)]
    assert len({tuple(vector) for vector in vectors}) == 3
    for vector, one in zip(vectors, ones, strict=True):
        [alone] = llm.embed([PROMPT], lora_request=one)
        assert alone.embedding == vector


def test_an_object_with_adapters_is_freed_when_it_is_deleted(asked: dict[str, LoRARequest]) -> None:
    llm = LLM(config=tiny_config("lora.max_adapters=1", "device.name=cpu"))
    tokens(llm, asked["a"])
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(llm)
        del llm
        assert gone() is None, "a cycle of references keeps it"
    finally:
        gc.enable()
