"""Constrained answers of a whole engine with random weights.

An answer is valid unless its length limit, a stop string or an error ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ostinato
from ostinato import LLM, SamplingParams, StructuredOutputsParams
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.llguidance_text import grammar_text
from ostinato.runtime.grammar.matcher import build_matcher, load_grammar_tokenizer
from ostinato.runtime.text.encoded_prompts import EncodedPrompt
from ostinato.runtime.types.outputs import CompletionOutput, FinishReason
from ostinato.runtime.types.structured_outputs import ToolCallFormat, constrain_tool_calls
from tests.runtime.tiny import MODEL, tiny_config

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
VOCAB_SIZE, EOS = 3077, 2  # five ids more than the tokenizer has
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -50, "maximum": 50},
        "label": {"type": "string", "maxLength": 6},
    },
    "required": ["x", "label"],
    "additionalProperties": False,
}


def start(*overrides: str, **values: object) -> LLM:
    model = {**MODEL, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
    return LLM(
        config=tiny_config(
            *overrides, **{"model__config": model, "model__tokenizer": str(DEMO), **values}
        )
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with start("scheduler.overlap=false") as engine:
        yield engine


@pytest.fixture(scope="module")
def overlapped() -> Iterator[LLM]:
    with start("scheduler.overlap=true", "graphs.mode=captured") as engine:
        yield engine


def check_nothing_left(llm: LLM) -> None:
    while llm._engine.has_work:  # an overlapped step may come after the last answer's end
        llm._engine.step()
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def answer(llm: LLM, constraint: dict[str, Any], **fields: object) -> CompletionOutput:
    return answers(llm, constraint, **fields)[0]


def answers(llm: LLM, constraint: dict[str, Any], **fields: Any) -> list[CompletionOutput]:
    sampling = SamplingParams(
        structured_outputs=StructuredOutputsParams(**constraint),
        **{"max_tokens": 120, "seed": 1, **fields},
    )
    (output,) = llm.generate([[5, 6, 7]], sampling, use_progress=False)
    return output.outputs


def test_the_vocabulary_is_loaded_before_the_first_grammar():
    """Loading the library holds the interpreter's lock, which would delay other requests."""
    with start() as engine:
        executor: Any = engine._engine._executor
        assert executor._grammars.is_loaded
        assert "grammar vocabulary" in engine.model.startup_seconds
        assert answer(engine, {"choice": ["yes"]}).text == "yes"


class TestKinds:
    def test_a_schema_with_several_completions(self, llm):
        for one in answers(llm, {"json": POINT}, n=4, temperature=1.5):
            assert one.finish_reason is FinishReason.stop
            jsonschema.validate(json.loads(one.text), POINT)

    def test_a_schema_as_text(self, llm):
        jsonschema.validate(json.loads(answer(llm, {"json": json.dumps(POINT)}).text), POINT)

    def test_regex(self, llm):
        one = answer(llm, {"regex": r"(ab|cd){3}[0-9]"})
        assert re.fullmatch(r"(ab|cd){3}[0-9]", one.text)
        assert one.finish_reason is FinishReason.stop

    def test_choice_with_characters_that_grammars_use(self, llm):
        words = ('a"b\\', "ж €😀", "/x/|y", "a")
        for seed in range(6):
            assert answer(llm, {"choice": words}, seed=seed).text in words

    def test_grammar_in_both_forms(self, llm):
        for grammar in ('root ::= "x" [0-9]{2} "y"', 'start: "x" /[0-9]{2}/ "y"'):
            assert re.fullmatch(r"x\d\dy", answer(llm, {"grammar": grammar}).text)

    def test_json_object(self, llm):
        one = answer(llm, {"json_object": True}, max_tokens=150)
        assert one.text.lstrip().startswith("{")

    def test_no_white_space(self, llm):
        text = answer(llm, {"json": POINT, "disable_any_whitespace": True}).text
        assert re.fullmatch(r'\{"x":-?\d+,"label":".*"\}', text, re.DOTALL)

    def test_no_additional_properties(self, llm):
        schema = {key: POINT[key] for key in ("type", "properties", "required")}
        one = answer(llm, {"json": schema, "disable_additional_properties": True})
        assert set(json.loads(one.text)) == {"x", "label"}

    def test_what_can_not_be_enforced(self, llm):
        schema = {"type": "integer", "not": {"const": 3}, "minimum": 0, "maximum": 9}
        with pytest.raises(InvalidRequestError, match='the schema has "not"'):
            answer(llm, {"json": schema})
        assert 0 <= int(answer(llm, {"json": schema, "strict": False}).text) <= 9


class TestTools:
    FORM = ToolCallFormat(
        begin='<tool_call>{"name": "', middle='", "arguments": ', end="}</tool_call>",
        trigger="<tool_call>",
    )  # fmt: skip
    TOOLS = (("point", POINT), ("ping", {"type": "object", "additionalProperties": False}))

    def constraint(self, **how: Any) -> dict[str, Any]:
        params = constrain_tool_calls(self.TOOLS, self.FORM, **how)
        return {"structural_tag": params.structural_tag}

    @pytest.mark.parametrize("only_calls", [False, True])
    def test_one_call(self, llm, only_calls):
        how = {"at_least_one": True, "parallel": False, "only_calls": only_calls}
        for seed in range(4):
            text = answer(llm, self.constraint(**how), seed=seed).text
            match = re.fullmatch(r"<tool_call>(\{.*\})</tool_call>", text, re.DOTALL)
            assert match, text
            call = json.loads(match[1])
            jsonschema.validate(call["arguments"], dict(self.TOOLS)[call["name"]])

    def test_several_calls(self, llm):
        one = answer(llm, self.constraint(at_least_one=True, only_calls=True), max_tokens=200)
        calls = re.findall(r"<tool_call>(\{.*?\})</tool_call>", one.text, re.DOTALL)
        assert calls
        assert all(json.loads(call)["name"] in dict(self.TOOLS) for call in calls)

    def test_free_text_before_a_call(self):
        """Checks the grammar alone, because a random model does not write a trigger."""
        assert self.fits("hello ", at_least_one=False)
        assert self.fits('a <tool_call>{"name": "ping", "arguments": {}}</tool_call> b')
        assert not self.fits('a <tool_call>{"name": "pong", "arguments": {}}</tool_call>')
        assert not self.fits('a <tool_call>{"name": "ping", "arguments": {"x": 1}}</tool_call>')
        assert not self.fits("hello ", at_least_one=True)
        two = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>' * 2
        assert self.fits(two, at_least_one=True)
        assert not self.fits(two, at_least_one=True, parallel=False)

    def test_special_tokens(self):
        form = ToolCallFormat(begin="<|im_start|>", middle=" ", end="", trigger="<|im_start|>")
        params = constrain_tool_calls([("f", True)], form, at_least_one=False)
        tokenizer = load_grammar_tokenizer(str(DEMO), VOCAB_SIZE, (EOS,))
        matcher = build_matcher(tokenizer, grammar_text(params, {"<|im_start|>": 1}))
        assert matcher.consume_tokens([*tokenizer.tokenize_str("hi "), 1])
        assert matcher.consume_tokens(tokenizer.tokenize_str("f {}"))
        assert not matcher.consume_tokens([1, *tokenizer.tokenize_str("g")])

    def fits(self, text: str, **how: Any) -> bool:
        params = constrain_tool_calls(self.TOOLS, self.FORM, **({"at_least_one": False} | how))
        tokenizer = load_grammar_tokenizer(str(DEMO), VOCAB_SIZE, (EOS,))
        matcher = build_matcher(tokenizer, grammar_text(params, {}))
        return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


class TestWithOtherParameters:
    def test_length(self, llm):
        one = answer(llm, {"json": POINT}, max_tokens=2)
        assert (one.finish_reason, len(one.token_ids)) == (FinishReason.length, 2)

    def test_complete_with_the_last_token_is_no_cut(self, llm):
        one = answer(llm, {"choice": ["yes"]})
        again = answer(llm, {"choice": ["yes"]}, max_tokens=len(one.token_ids))
        assert (again.text, again.finish_reason) == ("yes", FinishReason.stop)

    def test_ignore_eos_goes_on_as_long_as_the_grammar(self, llm):
        one = answer(llm, {"regex": "[a-z]+"}, ignore_eos=True, max_tokens=12, temperature=2.0)
        assert (one.finish_reason, len(one.token_ids)) == (FinishReason.length, 12)
        assert re.fullmatch("[a-z]+", one.text)
        assert answer(llm, {"regex": "[a-z]{3}"}, ignore_eos=True).finish_reason == "stop"

    def test_min_tokens(self, llm):
        one = answer(llm, {"regex": "a*"}, min_tokens=9, max_tokens=20, logit_bias={EOS: 100.0})
        assert len(one.token_ids) >= 9
        assert set(one.text) == {"a"}
        # A complete answer ends even before min_tokens.
        short = answer(llm, {"choice": ["no"]}, min_tokens=50)
        assert (short.text, short.finish_reason) == ("no", FinishReason.stop)

    def test_stop_token_that_the_grammar_needs_before_min_tokens(self, llm):
        (brace,) = llm.tokenizer.encode("}")
        one = answer(
            llm,
            {"regex": r"\{\}\}\}\}"},
            min_tokens=60,
            stop_token_ids=(brace, *llm.tokenizer.encode("}}")),
        )
        assert one.text.startswith("{}")

    def test_logit_bias_and_bad_words(self, llm):
        (one,) = llm.tokenizer.encode("b")
        assert answer(llm, {"choice": ["a", "b"]}, logit_bias={one: 100.0}).text == "b"
        assert answer(llm, {"choice": ["a", "b"]}, bad_words=("b",), seed=3).text == "a"
        assert answer(llm, {"choice": ["b"]}, bad_words=("b",)).text == "b"

    def test_allowed_token_ids(self, llm):
        allowed = [llm.tokenizer.encode(letter)[0] for letter in "abc"]
        one = answer(llm, {"regex": "[b-z]{4}"}, allowed_token_ids=tuple(allowed))
        assert re.fullmatch("[bc]{4}", one.text)
        none = answer(llm, {"regex": "[x-z]{4}"}, allowed_token_ids=tuple(allowed))
        assert none.finish_reason is FinishReason.error
        assert llm.stats().num_free_blocks == llm.stats().num_blocks

    def test_stop_strings_end_it(self, llm):
        one = answer(llm, {"regex": "aaaa;bbbb"}, stop=(";",))
        assert (one.text, one.finish_reason, one.stop_reason) == ("aaaa", FinishReason.stop, ";")

    def test_logprobs_are_the_models_own(self, llm):
        one = answer(llm, {"choice": ["xyz"]}, logprobs=2)
        assert one.logprobs
        assert all(entry.logprob < -2 for entry in one.logprobs)  # no token is likely

    def test_best_of(self, llm):
        (one,) = answers(llm, {"json": POINT}, best_of=3)
        jsonschema.validate(json.loads(one.text), POINT)

    def test_beam_search_is_refused(self):
        with pytest.raises(ValueError, match="structured_outputs must be null with use_beam"):
            SamplingParams(
                use_beam_search=True, structured_outputs=StructuredOutputsParams(regex="a")
            )

    @pytest.mark.parametrize(
        ("fields", "part"),
        [
            ({}, "none of them"),
            ({"regex": "a", "json_object": True}, "regex and json_object"),
            ({"choice": ()}, "not empty"),
            ({"choice": ("a", "")}, "not empty"),
            ({"regex": "a", "disable_any_whitespace": True}, "false with regex"),
            ({"regex": "a", "whitespace_pattern": " "}, "null with regex"),
        ],
    )
    def test_contradictions(self, fields, part):
        with pytest.raises(ValueError, match=part):
            StructuredOutputsParams(**fields)


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=90,
        structured_outputs=StructuredOutputsParams(json=POINT),
    ),
    SamplingParams(
        temperature=0.0,
        max_tokens=30,
        structured_outputs=StructuredOutputsParams(regex="[a-f]{20}"),
    ),
    SamplingParams(
        temperature=2.0,
        seed=3,
        max_tokens=40,
        n=2,
        logprobs=1,
        repetition_penalty=1.2,
        structured_outputs=StructuredOutputsParams(regex="([a-z]+ ){2,9}"),
    ),
    SamplingParams(temperature=1.0, seed=9, max_tokens=40, n=2, min_tokens=3),
]


def flat(llm: LLM, count: int = 7) -> list[object]:
    prompts = [[3 + index, 9, 40 + index] * (5 + index % 4) for index in range(count)]
    sampling = [MIXED[index % len(MIXED)] for index in range(count)]
    outputs = llm.generate(prompts, sampling, use_progress=False)
    return [
        [(one.token_ids, one.finish_reason, one.logprobs) for one in output.outputs]
        for output in outputs
    ]


class TestSteps:
    def test_overlapped_equals_synchronous(self, llm, overlapped):
        assert flat(overlapped) == flat(llm)
        assert overlapped.stats().late_compiles == []
        check_nothing_left(overlapped)

    def test_preemption(self, llm):
        expected = flat(llm)
        memory_gib = 15 * 8 * 2 * 2 * 2 * 16 * 4 / 2**30  # 15 blocks x the bytes of a block
        with start(
            "scheduler.overlap=true", model__max_model_len=112, cache__memory_gib=memory_gib
        ) as tight:
            assert flat(tight) == expected
            assert tight.stats().num_preemptions > 0
            check_nothing_left(tight)

    def test_a_closed_stream_leaves_nothing(self, overlapped):
        sampling = SamplingParams(structured_outputs=StructuredOutputsParams(json=POINT))
        stream = overlapped.stream([3, 4], sampling)
        next(stream)
        stream.close()
        # The next request is aborted before its grammar is built.
        new = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[q-z]{9}"))
        request = overlapped._generator.make_requests(EncodedPrompt(token_ids=[3, 4]), new)[0]
        overlapped._engine.add_request(request)
        assert overlapped._engine.abort(request.request_id).finish_reason is FinishReason.abort
        check_nothing_left(overlapped)

    def test_time_is_measured(self, overlapped):
        before = overlapped.stats()
        answer(overlapped, {"regex": "[0-9]{7}x"})
        after = overlapped.stats()
        assert after.grammar_seconds > before.grammar_seconds
        assert after.grammar_build_seconds > before.grammar_build_seconds


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-99, 99).flatmap(
        lambda low: st.integers(0, 60).map(
            lambda room: {"type": "integer", "minimum": low, "maximum": low + room}
        )
    ),
    st.integers(0, 4).map(lambda size: {"type": "string", "maxLength": size}),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    st.lists(
        st.one_of(st.text(max_size=5), st.integers(-9, 9), st.none(), st.booleans()),
        min_size=1,
        max_size=4,
    ).map(lambda values: {"enum": values}),
)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=4)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda properties: st.lists(st.sampled_from([*properties] or [""]), unique=True).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                "additionalProperties": False,
            }
        )
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda two: {"type": "array", "items": two[0], "maxItems": two[1]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.1, 0.9]),
        "top_k": st.sampled_from([1, 5, 700]),
        "min_p": st.sampled_from([0.2]),
        "seed": st.integers(0, 9),
        "n": st.integers(1, 3),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "frequency_penalty": st.sampled_from([-2.0, 2.0]),
        "min_tokens": st.integers(0, 30),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 3),
        "bad_words": st.just(('"', "1")),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, 100.0]), max_size=3
        ),
        "best_of": st.just(3),
    },
)


def _property(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    given_them = given(schema=SCHEMAS, fields=SETTINGS, streams=st.booleans(), data=st.data())
    run = settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return lambda test: run(given_them(test))


@_property(max_examples=20)
def test_every_finished_answer_is_valid(llm, overlapped, schema, fields, streams, data):
    check_answers(llm, overlapped, schema, fields, streams, data)


@pytest.mark.slow
@_property(max_examples=300)
def test_many_finished_answers_are_valid(llm, overlapped, schema, fields, streams, data):
    check_answers(llm, overlapped, schema, fields, streams, data)


def check_answers(llm, overlapped, schema, fields, streams, data):
    engine = data.draw(st.sampled_from([llm, overlapped]))
    sampling = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=schema), **{"max_tokens": 40, **fields}
    )
    texts: dict[int, str] = {}
    endings: dict[int, FinishReason | None] = {}
    if streams:
        for output in engine.stream([7, 8, 9], sampling):
            texts[output.index] = texts.get(output.index, "") + output.text_delta
            endings[output.index] = output.finish_reason
    else:
        (output,) = engine.generate([[7, 8, 9]], sampling, use_progress=False)
        texts = {one.index: one.text for one in output.outputs}
        endings = {one.index: one.finish_reason for one in output.outputs}
    assert len(texts) == sampling.n
    for index, ending in endings.items():
        assert ending in (FinishReason.stop, FinishReason.length)
        if ending is FinishReason.stop:
            jsonschema.validate(json.loads(texts[index]), schema)
    check_nothing_left(engine)
