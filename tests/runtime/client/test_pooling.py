"""Embeddings are close to those of transformers, also for prompts in chunks or with cached blocks.

The scheduler runs with a simulated model too: pooled requests are cut, preempted and aborted.
"""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.conf.schema import SchedulerConfig
from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.checkpoints.pooling_files import PoolingFiles, read_pooling_files
from ostinato.runtime.client.pooling import make_pooling_request, numbers
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.params import PoolingKind, PoolingParams
from ostinato.runtime.types.step import StepResult
from tests.models.minilm import minilm_directory

DEMO = Path(__file__).parents[3] / "models" / "demo"
SMALL = (
    "graphs.mode=eager",
    "graphs.bundle=false",
    "model.dtype=float32",
    "scheduler.max_num_seqs=8",
    "graphs.cost_table_budget_s=0",
)
TEXTS = [
    "A block table maps positions to blocks.",
    "The cat sat on the mat.",
    "A kitten was sitting on a rug, " + "and it purred, " * 30 + "until the morning.",
    "ok",
]


def cosine(first: list[float], second: list[float]) -> float:
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    return dot / math.sqrt(sum(a * a for a in first) * sum(b * b for b in second))


@pytest.fixture(scope="module")
def encoder():
    config = load_config(["graphs.bundle=false"], values={"model.path": str(minilm_directory())})
    with LLM(config=config) as llm:
        yield llm


@pytest.fixture(scope="module")
def encoder_states():
    """A function from a text to its hidden states [T, D] in transformers."""
    directory = minilm_directory()
    model = transformers.AutoModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def compute(text: str) -> torch.Tensor:
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]

    return compute


def test_the_real_model_as_transformers_has_it(encoder, encoder_states):
    assert (encoder.model.pooling, encoder.model.max_model_len) == (PoolingKind.mean, 256)
    assert encoder.model.determinism == "bitwise"
    assert encoder.stats().layers_by_program == {"captured": 6, "fx": 0, "inductor": 0, "eager": 0}
    for kind, part in (
        (PoolingKind.mean, lambda hidden: hidden.mean(0)),
        (PoolingKind.cls, lambda hidden: hidden[0]),
        (PoolingKind.last, lambda hidden: hidden[-1]),
    ):
        outputs = encoder.embed(TEXTS, encoder.default_pooling(kind=kind))
        for text, output in zip(TEXTS, outputs, strict=True):
            expected = part(encoder_states(text)).tolist()
            assert cosine(output.embedding, expected) >= 0.9999
            assert math.isclose(sum(x * x for x in output.embedding), 1.0, abs_tol=1e-5)
    (raw,) = encoder.embed(TEXTS[1], encoder.default_pooling(normalize=False))
    expected = encoder_states(TEXTS[1]).mean(0)
    torch.testing.assert_close(torch.tensor(raw.embedding), expected, atol=1e-4, rtol=1e-3)


def test_its_neighbours_change_nothing(encoder):
    alone = [encoder.embed(text)[0].embedding for text in TEXTS]
    assert [output.embedding for output in encoder.embed(TEXTS)] == alone


def test_fewer_dimensions_are_the_first_ones_at_length_1(encoder):
    whole, part = (
        encoder.embed(TEXTS[0], encoder.default_pooling(dimensions=count))[0].embedding
        for count in (None, 7)
    )
    length = math.sqrt(sum(x * x for x in whole[:7]))
    assert part == pytest.approx([x / length for x in whole[:7]], abs=1e-6)


def test_a_score_is_a_cosine(encoder):
    kitten, blocks = encoder.score(TEXTS[1], ["A kitten is sitting on a rug.", TEXTS[0]])
    vectors = [encoder.embed(text)[0].embedding for text in (TEXTS[1], TEXTS[0])]
    assert blocks == pytest.approx(cosine(*vectors), abs=1e-6)
    assert kitten > 0.4 > blocks


def test_it_does_not_generate(encoder):
    with pytest.raises(InvalidRequestError, match="does not generate text; use /v1/"):
        encoder.generate("Hello")


def test_the_context_may_be_full_and_not_more(encoder):
    assert len(encoder.embed([[101] * 256])[0].embedding) == 384
    with pytest.raises(InvalidRequestError, match="input has 257 tokens, but model takes 1 to 256"):
        encoder.embed([[101] * 257])


def test_it_has_no_blocks_and_gives_no_tokens(encoder):
    encoder.embed(TEXTS)
    stats = encoder.stats()
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_output_tokens) == (0, 0, 0)
    assert stats.num_prompt_tokens > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scheduler.max_num_batched_tokens=128"], "computes a whole text in one step"),
        (["scheduler.itl_target_ms=10"], "scheduler.itl_target_ms is for models that generate"),
        (["model.max_model_len=600"], "the model is made for 512 tokens"),
    ],
)
def test_an_encoder_that_can_not_start(overrides, message):
    config = load_config(
        ["graphs.bundle=false", "scheduler.max_num_seqs=8", *overrides],
        values={"model.path": str(minilm_directory())},
    )
    with pytest.raises(StartupError, match=message):
        LLM(config=config)


@pytest.fixture(scope="module")
def demo():
    config = load_config(
        [*SMALL, "scheduler.max_num_batched_tokens=64", "cache.memory_gib=0.02"],
        values={"model.path": str(DEMO)},
    )
    with LLM(config=config) as llm:
        yield llm


@pytest.fixture(scope="module")
def demo_states():
    model = transformers.AutoModel.from_pretrained(DEMO, dtype=torch.float32).eval()

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).last_hidden_state[0]

    return compute


def test_the_kind_can_be_a_plain_text():
    assert PoolingParams(kind="mean").needs_all_tokens  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be mean, last or cls, got 'max'"):
        PoolingParams(kind="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(PoolingKind))
def test_a_long_prompt_in_chunks(demo, demo_states, kind):
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 3000) for _ in range(n)] for n in (200, 1, 64, 65, 130)]
    demo.reset_prefix_cache()
    before = demo.stats().num_steps
    outputs = demo.embed(prompts, PoolingParams(kind=kind))
    assert demo.stats().num_steps - before >= 460 // 64
    for prompt, output in zip(prompts, outputs, strict=True):
        hidden = demo_states(prompt)
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[kind]
        assert cosine(output.embedding, expected.tolist()) >= 0.9999


def test_cached_blocks_serve_the_last_token_and_not_the_mean(demo):
    prompt = [5 + 7 * i % 2900 for i in range(100)]
    first = demo.embed([prompt], PoolingParams())[0]
    again = demo.embed([prompt], PoolingParams())[0]
    assert again.num_cached_tokens == 96
    assert cosine(first.embedding, again.embedding) > 0.99999
    whole = demo.embed([prompt], PoolingParams(kind=PoolingKind.mean))[0]
    assert whole.num_cached_tokens == 0


def test_beside_generation(demo):
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = demo.generate("Once upon a time", greedy, use_progress=False)[0].outputs[0].token_ids
    vector = demo.embed("Once upon a time")[0].embedding
    stream = demo.stream("Once upon a time", greedy)
    tokens = list(next(stream).new_token_ids)
    vectors = [one.embedding for one in demo.embed(["Once upon a time"] * 3)]
    for one in vectors:
        assert cosine(one, vector) > 0.99999
    stream.close()
    assert tokens == alone[:1]
    after = demo.generate("Once upon a time", greedy, use_progress=False)[0].outputs[0].token_ids
    assert after == alone


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, PoolingFiles()),
        (
            {
                "modules.json": [
                    {"type": "sentence_transformers.models.Transformer", "path": ""},
                    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
                ],
                "1_Pooling/config.json": {"pooling_mode_lasttoken": True, "include_prompt": True},
            },
            PoolingFiles(mode="last", normalize=False),
        ),
        (
            {
                "modules.json": [{"type": "x.Pooling", "path": "p"}, {"type": "x.Normalize"}],
                "p/config.json": {"pooling_mode": "cls"},
                "sentence_bert_config.json": {"max_seq_length": 99},
            },
            PoolingFiles(mode="cls", max_seq_length=99),
        ),
        (
            {
                "modules.json": [{"type": "x.Pooling", "path": "p"}],
                "p/config.json": {"pooling_mode_max_tokens": True},
            },
            PoolingFiles(
                normalize=False,
                unsupported="the checkpoint's pooling is max_tokens; only cls, mean and last token "
                "are supported",
            ),
        ),
    ],
)
def test_what_a_checkpoint_says_of_embeddings(tmp_path, files, expected):
    write_files(tmp_path, files)
    assert read_pooling_files(tmp_path) == expected


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"modules.json": {}}, "modules.json must hold a JSON array"),
        ({"modules.json": ["x"]}, "modules.json must hold an array of JSON objects, got ['x']"),
        ({"modules.json": [{"type": "x.Transformer"}, None]}, ", None]"),
        (
            {"modules.json": [{"type": "x.Pooling", "path": "p"}], "p/config.json": []},
            "p/config.json must hold a JSON object",
        ),
        (
            {"modules.json": [], "sentence_bert_config.json": {"max_seq_length": "99"}},
            "sentence_bert_config.json: max_seq_length must be null or an integer, got '99'",
        ),
    ],
)
def test_broken_files_of_embeddings_are_refused(tmp_path, files, text):
    write_files(tmp_path, files)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        read_pooling_files(tmp_path)


def write_files(directory, files):
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(msgspec.json.encode(content))


MODEL = ServedModel(
    name="m",
    max_model_len=40,
    vocab_size=50,
    eos_token_ids=(),
    tokenizer="",
    tasks=(ServedTask.generate, ServedTask.embed),
    embedding_size=8,
)


@pytest.mark.parametrize(
    ("token_ids", "params", "param", "message"),
    [
        ([], PoolingParams(), "input", "input has 0 tokens, but m takes 1 to 40; send some text"),
        (
            [1] * 41,
            PoolingParams(),
            "input",
            "input has 41 tokens, but m takes 1 to 40; shorten it",
        ),
        ([1, 50], PoolingParams(), "input", r"token id 50, but the vocabulary of m is \[0, 50\)"),
        ([1], PoolingParams(dimensions=9), "dimensions", "m gives vectors of 1 to 8 numbers"),
        ([1], PoolingParams(dimensions=0), "dimensions", "dimensions=0"),
        ([1], PoolingParams(classify=True), "model", "m does not classify; use /v1/c"),
    ],
)
def test_the_door(token_ids, params, param, message):
    with pytest.raises(InvalidRequestError, match=message) as raised:
        make_pooling_request("r", token_ids, params, MODEL)
    assert raised.value.param == param


class Model:
    """A runner without a model: a row's vector is the sum of the tokens that were computed."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def run(self, output) -> StepResult:
        for one in output.admitted:
            self.sums[one.row], self.lengths[one.row] = 0, len(one.request.prompt_token_ids)
        vectors, tokens = [], []
        for entry in output.scheduled:
            self.sums[entry.row] += sum(entry.token_ids)
            if entry.is_pooled and entry.start + entry.num_new_tokens == self.lengths[entry.row]:
                vectors.append(str(self.sums[entry.row]).encode())
            if entry.num_logits:
                tokens.append(7)
        return StepResult(tokens, pooled=vectors)


def run_to_the_end(scheduler, *, ahead, aborted, whole) -> dict[str, SequenceOutput]:
    """Run steps until the scheduler has no work; returns the last output of each request.

    Args:
        ahead: one step is in flight while the next is planned.
        aborted: numbers of the requests that are aborted after the first step.
        whole: check that each step computes complete prompts.
    """
    model, in_flight = Model(), []
    ended: dict[str, SequenceOutput] = {}
    for round_ in range(2000):
        if round_ == 1:
            outputs = (scheduler.abort(f"{index}") for index in aborted)
            ended |= {one.request_id: one for one in outputs if one is not None}
        output = scheduler.schedule()
        if output is not None:
            in_flight.append((output, model.run(output)))
            if whole:
                done = [(entry.start, entry.num_new_tokens) for entry in output.scheduled]
                assert done == [(0, model.lengths[entry.row]) for entry in output.scheduled]
        if in_flight and (output is None or len(in_flight) > ahead):
            for one in scheduler.update(*in_flight.pop(0)):
                if one.finish_reason is not None:
                    assert one.request_id not in ended
                    ended[one.request_id] = one
        elif output is None:
            return ended
    raise AssertionError("the scheduler still has work after 2000 rounds")


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from(["mean", "last", "generate"]), min_size=12, max_size=12),
    budget=st.integers(4, 50),
    num_blocks=st.integers(10, 24),
    whole=st.booleans(),
    ahead=st.booleans(),
    aborted=st.sets(st.integers(0, 11), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_every_pooled_request_ends_once_with_all_its_tokens(
    lengths, kinds, budget, num_blocks, whole, ahead, aborted
):
    if whole:
        budget, kinds = max(budget, 40), [k if k != "generate" else "mean" for k in kinds]
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
    cache = KVCacheManager(num_blocks + 1, 4, enable_prefix_caching=not whole)
    scheduler = Scheduler(config, cache, max_model_len=40, whole_prompts=whole)
    expected: dict[str, bytes | None] = {}
    for index, (length, kind) in enumerate(zip(lengths, kinds, strict=False)):
        prompt = [1 + (index + 3 * i) % 40 for i in range(length)]
        kind_ = PoolingKind.mean if kind == "generate" else PoolingKind(kind)
        request = make_pooling_request(f"{index}", prompt, PoolingParams(kind=kind_), MODEL)
        if kind == "generate":
            prompt = prompt[:30]
            request = msgspec.structs.replace(
                request,
                pooling=None,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=5),
            )
        # Of these kinds only mean pooling uses no cached tokens. So only its vector is the sum of
        # all tokens in every case.
        expected[f"{index}"] = str(sum(prompt)).encode() if kind == "mean" else None
        scheduler.add(request)
    ended = run_to_the_end(scheduler, ahead=ahead, aborted=aborted, whole=whole)
    assert ended.keys() == expected.keys()
    for request_id, output in ended.items():
        if output.finish_reason is FinishReason.abort:
            continue
        pooled = kinds[int(request_id)] != "generate"
        assert (output.pooled is not None) == pooled
        if expected[request_id] is not None:
            assert output.pooled == expected[request_id]
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_vectors_cross_as_little_endian_float32():
    assert numbers(b"\x00\x00\x80\x3f\x00\x00\x00\xc0") == [1.0, -2.0]
