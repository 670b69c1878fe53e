"""The grammar compiler: supported and refused constraints, its cache and its processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ostinato
from ostinato.benchmarks.grammars.grammar_schemas import SCHEMAS
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar import compiler as grammar_compiler
from ostinato.runtime.grammar.compiler import GrammarCompiler
from ostinato.runtime.grammar.json_schemas import JsonForm
from ostinato.runtime.grammar.llguidance_text import grammar_text
from ostinato.runtime.grammar.matcher import build_matcher, load_grammar_tokenizer, problem
from ostinato.runtime.grammar.structural_tags import tags_to_lark
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.structured_outputs import Preamble, StructuredOutputsParams

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
MODEL = ServedModel(
    name="m", max_model_len=99, vocab_size=3072, eos_token_ids=(0, 2), tokenizer=str(DEMO)
)
TOKENIZER = load_grammar_tokenizer(str(DEMO), 3072, (0, 2))
# Schemas that are refused rather than enforced wrongly; docs/structured-output.md says so.
NOT_ENFORCED = {
    "oneOf that overlaps",
    "not",
    "unique items",
    "if then",
    "contains",
    "dependent required",
}


def fits(params: StructuredOutputsParams, text: str, special_tokens: dict[str, int] | None = None):
    matcher = build_matcher(TOKENIZER, grammar_text(params, special_tokens or {}))
    assert problem(matcher) is None, problem(matcher)
    for token_id in TOKENIZER.tokenize_str(text):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if not mask[token_id]:
            return False
        assert matcher.consume_token(token_id)
    return matcher.is_accepting()


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case.name)
def test_schemas(case):
    params = StructuredOutputsParams(json=case.schema)
    if case.name in NOT_ENFORCED:
        assert problem(build_matcher(TOKENIZER, grammar_text(params, {}))) is not None
        return
    assert all(fits(params, text) for text in case.valid)
    assert not any(fits(params, text) for text in case.invalid)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "integer"}},
        {"regex": "[0-9]"},
        {"choice": ("1", "2")},
        {"grammar": 'root ::= "1"'},
        {"grammar": 'start: "1"'},
        {"structural_tag": {"format": {"type": "const_string", "value": "1"}}},
    ],
)
def test_reasoning_before_it(constraint):
    def params(is_open: bool) -> StructuredOutputsParams:
        preamble = Preamble(begin="<think>", end="</think>", is_open=is_open)
        return StructuredOutputsParams(**constraint, preamble=preamble)

    assert fits(params(True), "a < b</think>\n\n1")
    assert not fits(params(True), "1")
    assert fits(params(False), "<think>ab</think>1")
    assert fits(params(False), "1")
    assert not fits(params(False), "ab</think>1")
    assert not fits(params(False), "<think>ab</think>x")


@pytest.mark.parametrize(
    ("tag", "part"),
    [
        ([], "an object"),
        ({"format": {"type": "tag"}}, "begin must be a string"),
        ({"format": {"type": "what"}}, "type must be one of"),
        ({"format": {"type": "or", "elements": []}}, "elements must be a non-empty list"),
        (
            {
                "structures": [{"begin": "<a>", "schema": {}, "end": ""}],
                "triggers": ["<b"],
            },
            "begins with none of the triggers",
        ),
        (
            {
                "structures": [{"begin": "<a>", "schema": {}, "end": ""}, "<b>"],
                "triggers": ["<a"],
            },
            "begin must be a string",
        ),
        (
            {
                "structures": [{"begin": "<a>", "schema": {}, "end": ""}],
                "triggers": ["<a", "<b"],
            },
            "no tag begins with the trigger '<b'",
        ),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 2}},
            "has no end",
        ),
    ],
)
def test_structural_tags_that_are_not_well_formed(tag, part):
    with pytest.raises(ValueError, match=part):
        tags_to_lark(tag, {}, JsonForm())


def pids_of(compiler: GrammarCompiler) -> list[int]:
    """The process ids of the running compiler processes."""
    return [one.pid for one in compiler._processes if one.pid is not None]


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL)
    yield compiler
    compiler.close()
    assert pids_of(compiler) == []


def test_answers_are_remembered(compiler):
    params = StructuredOutputsParams(regex="ab+")
    assert pids_of(compiler) == []  # no process runs before the first constraint
    first = compiler.compile(params)
    (pid,) = pids_of(compiler)
    os.kill(pid, signal.SIGKILL)
    assert compiler.compile(StructuredOutputsParams(regex="ab+")) == first
    assert (compiler.num_hits, compiler.num_misses) == (1, 1)
    # Refusals are remembered, too.
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="look-around"):
            compiler.compile(StructuredOutputsParams(regex="(?=a)"))
    assert (compiler.num_hits, compiler.num_misses) == (2, 2)


def test_the_least_recent_is_forgotten(compiler, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(StructuredOutputsParams(regex=regex))
    assert (compiler.num_hits, compiler.num_misses) == (2, 4)


HOSTILE = {
    "more expressions than fit": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "deep parentheses": {"regex": "(" * 5000 + ")" * 5000},
    "deep JSON text": {"json": "[" * 100_000},
    "deep schema": {"json": '{"items":' * 400 + "{}" + "}" * 400},
    "deep grammar": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "deep tag": {
        "structural_tag": '{"type":"structural_tag","format":'
        + '{"type":"sequence","elements":[' * 900
        + '{"type":"any_text"}'
        + "]}" * 900
        + "}"
    },
    "a schema of itself": {"json": {"$ref": "#"}},
    "a far schema": {"json": {"$ref": "http://127.0.0.1:9/x"}},
    "a file as schema": {"json": {"$ref": "file:///etc/passwd"}},
    "no end in sight": {"grammar": 'start: a\na: "x" a'},
    "a rule that is not there": {"grammar": "start: nothing"},
    "binary": {"grammar": "\x00\x01"},
    "GBNF of nothing": {"grammar": "root ::= " + "(" * 2000},
    "many alternatives": {"regex": "|".join(f"{index:x}.*{index:x}" for index in range(3000))},
    "exponential states": {"regex": "(.*a){300}.{300}b"},
    "wide repetition": {"json": {"type": "string", "pattern": "^(([a-z]{1,90}){1,90}){1,90}$"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_end_soon(compiler, name):
    """Each constraint is refused, or compiled within the limits; the next constraint is served."""
    refusal, grammar = None, ""
    try:
        grammar = compiler.compile(StructuredOutputsParams(**HOSTILE[name]))
    except InvalidRequestError as error:
        refusal = error
    if refusal is None:
        assert problem(build_matcher(TOKENIZER, grammar)) is None
    else:
        assert refusal.param == "structured_outputs"
        assert len(str(refusal)) < 1000
    assert compiler.compile(StructuredOutputsParams(choice=("next",)))


def test_too_large_to_look_at(compiler):
    with pytest.raises(InvalidRequestError, match="bytes") as caught:
        compiler.compile(StructuredOutputsParams(regex="a" * (5 << 20)))
    assert caught.value.code == "constraint_too_complex"
    assert pids_of(compiler) == []


def test_a_slow_constraint_does_not_delay_others(compiler):
    """A compiler process that does not answer delays only the request that it works for."""
    for process in compiler._processes:  # another process may take long to start
        process._limits = process._limits._replace(wall_s=60.0)

    async def run() -> None:
        await compiler.compile_async(StructuredOutputsParams(regex="warm"))
        (pid,) = pids_of(compiler)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # until all its threads have stopped
        held = asyncio.create_task(compiler.compile_async(StructuredOutputsParams(regex="held")))
        await asyncio.sleep(0.05)
        assert await compiler.compile_async(StructuredOutputsParams(regex="free"))
        assert not held.done()
        os.kill(pid, signal.SIGKILL)
        assert "held" in await held  # by another process

    asyncio.run(run())


def test_a_model_without_a_tokenizer():
    model = ServedModel(name="m", max_model_len=99, vocab_size=9, eos_token_ids=(), tokenizer="")
    compiler = GrammarCompiler(model)
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json") as caught:
        compiler.compile(StructuredOutputsParams(regex="a"))
    assert caught.value.code == "no_tokenizer"
    compiler.close()
