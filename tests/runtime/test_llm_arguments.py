"""`LLM` as users of vLLM call it: their keyword arguments and their forms of prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ostinato import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.offline_prompts import prompt_text

TEXT = "Once upon a time"
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        max_num_seqs=4,
        block_size=8,
        kv_cache_memory_bytes=16 << 20,
        enable_prefix_caching=False,
        tensor_parallel_size=1,
        seed=7,
        overrides=["graphs.attention=reference", "graphs.pack_weights=false"],
    ) as llm:
        yield llm


def test_arguments_reach_the_engine(llm: LLM):
    assert llm.model.max_model_len == 128
    llm.generate([TEXT] * 2, GREEDY, use_progress=False)
    assert llm.generate([TEXT], GREEDY, use_progress=False)[0].num_cached_tokens == 0


def test_where_only_text_will_do():
    assert prompt_text({"prompt": TEXT}) == prompt_text(TEXT) == TEXT
    with pytest.raises(InvalidRequestError, match="a score needs texts, got token ids"):
        prompt_text({"prompt_token_ids": [1]})  # type: ignore[typeddict-item]


def test_all_forms_of_a_prompt_are_one_prompt(llm: LLM):
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    forms = [
        TEXT,
        [TEXT],
        ids,
        [ids],
        {"prompt": TEXT},
        [{"prompt": TEXT}],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids}],
        [{"prompt": TEXT, "prompt_token_ids": ids}],
    ]
    answers = [llm.generate(form, sampling_params=GREEDY, use_progress=False) for form in forms]
    assert {len(each) for each in answers} == {1}
    assert {tuple(each[0].prompt_token_ids) for each in answers} == {tuple(ids)}
    assert len({tuple(each[0].outputs[0].token_ids) for each in answers}) == 1
    mixed = llm.generate([TEXT, ids, {"prompt": TEXT}], GREEDY, use_progress=False)
    assert [each.prompt for each in mixed] == [TEXT, None, TEXT]
    streamed = list(llm.stream({"prompt": TEXT}, GREEDY))
    assert "".join(each.text_delta for each in streamed) == answers[0][0].outputs[0].text


@pytest.mark.parametrize(
    "prompt",
    [{"text": TEXT}, {"prompt": TEXT, "mm_processor_kwargs": {}}, {"prompt": 3}, {}],
)
def test_another_dictionary_is_refused(llm: LLM, prompt: dict):
    with pytest.raises(InvalidRequestError, match="a prompt is a text, token ids, "):
        llm.generate([prompt], GREEDY)  # pyright: ignore[reportArgumentType]


def test_a_seed_makes_a_run_repeatable(llm: LLM):
    drawn = SamplingParams(max_tokens=12, temperature=1.5)
    first = llm.generate([TEXT] * 3, drawn, use_progress=False)
    assert len({tuple(each.outputs[0].token_ids) for each in first}) > 1  # each has its own seed
    with LLM(
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        seed=7,
        overrides=["graphs.attention=reference", "graphs.pack_weights=false"],
    ) as one:
        once = one.generate([TEXT] * 3, drawn, use_progress=False)
    with LLM(
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        seed=7,
        overrides=["graphs.attention=reference", "graphs.pack_weights=false"],
    ) as two:
        again = two.generate([TEXT] * 3, drawn, use_progress=False)
    assert [e.outputs[0].token_ids for e in once] == [e.outputs[0].token_ids for e in again]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_expert_parallel": True}, "experts are divided by tensor_parallel_size"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "parallel.executor must be auto, processes or ray with parallel.tensor=2, got 'inline'",
        ),
        ({"data_parallel_size": 2}, "parallel.data=2 needs engine processes, and LLM runs one"),
        ({"max_modellen": 4}, "did you mean max_model_len?"),
        ({"block_size": 17}, "cache.block_size must be one of 8, 16, 32, 64, 128, got 17"),
        ({"config": load_config(), "dtype": "float32"}, "config=... or settings"),
        ({"config": load_config(), "overrides": ["seed=1"]}, "settings (seed=1), not both"),
    ],
)
def test_an_argument_that_can_not_be_met_is_refused(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(**arguments)


def test_the_async_engine_takes_the_same_arguments():
    """The configuration is read when the object is made; no process starts before `start`."""
    AsyncEngine("some/dir", max_model_len=64, tensor_parallel_size=1, data_parallel_size=2)
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        AsyncEngine(max_modellen=64)
    with pytest.raises(ConfigError, match="takes config="):
        AsyncEngine(config=load_config(), dtype="float32")
    with pytest.raises(ConfigError, match="takes config="):
        AsyncEngine(config=load_config(), overrides=["seed=1"])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_tokens": 1.5}, "max_tokens=1.5: Expected `int | null`, got `float`"),
        ({"seed": 1.5}, "seed=1.5: Expected `int | null`, got `float`"),
        ({"temperature": "x"}, "temperature='x': Expected `float`, got `str`"),
        ({"ignore_eos": "no"}, "ignore_eos='no': Expected `bool`, got `str`"),
        ({"bad_words": "Once"}, "bad_words='Once': Expected `array`, got `str`"),
        ({"logit_bias": {"1": 5}}, "logit_bias={'1': 5}: Expected `int`, got `str`"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5: Expected `array | null`, got `int`"),
        (
            {"structured_outputs": {"regx": "a"}},
            "structured_outputs={'regx': 'a'}: Object contains unknown field `regx`",
        ),
        (
            {"structured_outputs": {"regex": 5}},
            "structured_outputs={'regex': 5}: Expected `str | null`, got `int`",
        ),
    ],
)
def test_parameters_of_a_wrong_type_are_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_lists_one_text_and_objects_are_converted() -> None:
    params = SamplingParams(
        stop="the end",  # type: ignore[arg-type]
        stop_token_ids=[1, 2],  # type: ignore[arg-type]
        temperature=1,
        structured_outputs={"regex": "a"},  # type: ignore[arg-type]
    )
    assert params == SamplingParams(
        stop=("the end",),
        stop_token_ids=(1, 2),
        structured_outputs=StructuredOutputsParams(regex="a"),
    )
    assert isinstance(params.temperature, float)


def test_prompts_of_a_wrong_type_are_refused(llm: LLM) -> None:
    for prompts in (5, [5.5], None, [None]):
        with pytest.raises(InvalidRequestError, match="prompt"):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_nothing_is_printed(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT] * 3, GREEDY)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
