"""The engine in-process: batches, prefix caching, chunks and captured steps change no token."""

from __future__ import annotations

import random

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.graphs.compile_monitor import LateCompile
from ostinato.models.step_tensors import ForwardBatch
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.types.outputs import FinishReason
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_prompts(count: int = 10, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [
        [numbers.randrange(2, VOCAB_SIZE) for _ in range(numbers.randint(1, 90))]
        for _ in range(count)
    ]


def generate(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams] = GREEDY
) -> list[list[int]]:
    outputs = llm.generate(prompts, sampling, use_progress=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=tiny_config())


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The tokens of each prompt. The prompts run one by one, each with an empty prefix cache."""
    tokens = []
    for prompt in make_prompts():
        assert llm.reset_prefix_cache()
        tokens += generate(llm, [prompt])
    return tokens


def test_batched_equals_alone(llm: LLM, expected: list[list[int]]) -> None:
    assert llm.reset_prefix_cache()
    assert generate(llm, make_prompts()) == expected


def test_cached_equals_cold(llm: LLM, expected: list[list[int]]) -> None:
    generate(llm, make_prompts())
    outputs = llm.generate(make_prompts(), GREEDY, use_progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for output in outputs:
        length = len(output.prompt_token_ids)
        assert output.num_cached_tokens == (length - 1) // 8 * 8


def test_small_chunks_equal_whole_prompts(expected: list[list[int]]) -> None:
    chunked = LLM(config=tiny_config("scheduler.max_num_batched_tokens=8"))
    assert generate(chunked, make_prompts()) == expected


def test_preemption_changes_no_token(llm: LLM) -> None:
    """8 rows share 14 usable blocks of 8 tokens, so sequences are preempted and computed again."""
    prompts = [prompt[:6] for prompt in make_prompts()]
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    memory_gib = 15 * 8 * 2 * 2 * 2 * 16 * 4 / 2**30  # 15 blocks x the bytes of a block
    tight = LLM(config=tiny_config(model__max_model_len=112, cache__memory_gib=memory_gib))
    assert tight.stats().num_blocks == 14
    assert generate(tight, prompts, long) == generate(llm, prompts, long)
    assert tight.stats().num_preemptions > 0
    assert tight.stats().num_free_blocks == 14


@pytest.mark.parametrize("form", ["layer", "model"])
def test_compiled_and_captured_equal_eager(form: str, expected: list[list[int]]) -> None:
    captured = LLM(config=tiny_config("graphs.mode=captured", f"graphs.form={form}"))
    assert generate(captured, make_prompts()) == expected
    stats = captured.stats()
    assert stats.steps_by_kind["captured"] > 0
    assert stats.steps_by_kind["compiled"] > 0
    assert stats.steps_by_kind["eager"] == 0
    num_layers = sum(stats.layers_by_program.values())
    assert num_layers > 0
    assert stats.layers_by_program["captured"] == (num_layers if form == "layer" else 0)
    assert stats.late_compiles == []


def test_unpacked_weights_give_the_same_tokens(expected: list[list[int]]) -> None:
    plain = LLM(config=tiny_config("graphs.pack_weights=false", "graphs.attention=reference"))
    assert generate(plain, make_prompts()) == expected


def test_the_devices_time_is_counted(llm: LLM) -> None:
    before = llm.stats()
    generate(llm, make_prompts(3, seed=9))
    after = llm.stats()
    model = after.model_seconds - before.model_seconds
    assert 0.0 < after.device_seconds - before.device_seconds <= model


@pytest.mark.parametrize(("dtype", "bytes_per_16"), [("fp8_e4m3", 16), ("int8", 20)])
def test_a_cache_of_eight_bits_serves(
    dtype: str, bytes_per_16: int, expected: list[list[int]]
) -> None:
    """It takes at most a third of a float32 cache. Some tokens differ, but rarely the first ones.

    The 16 values of a token and head take 64 bytes in float32, and 16 bytes in 8 bits. int8 adds a
    scale of 4 bytes.
    """
    small = LLM(config=tiny_config(f"cache.dtype={dtype}", "graphs.attention=auto"))
    whole = LLM(config=tiny_config("graphs.attention=reference"))
    assert small.stats().num_blocks > 0.98 * 64 / bytes_per_16 * whole.stats().num_blocks
    tokens = generate(small, make_prompts())
    assert [len(each) for each in tokens] == [12] * 10
    same = sum(one[0] == other[0] for one, other in zip(tokens, expected, strict=True))
    assert same >= 8
    assert generate(small, make_prompts()[3:4]) == tokens[3:4]  # cached and alone


@pytest.mark.parametrize("form", ["layer", "model"])
def test_a_cache_of_eight_bits_in_captured_steps(form: str) -> None:
    eager = LLM(config=tiny_config("cache.dtype=int8"))
    captured = LLM(
        config=tiny_config("cache.dtype=int8", "graphs.mode=captured", f"graphs.form={form}")
    )
    assert generate(captured, make_prompts()) == generate(eager, make_prompts())
    assert captured.stats().steps_by_kind["captured"] > 0


def test_the_cpu_kernel_refuses_eight_bits_by_name() -> None:
    with pytest.raises(StartupError, match=r"cache\.dtype asks for torch\.float8_e4m3fn"):
        LLM(config=tiny_config("cache.dtype=fp8_e4m3", "graphs.attention=cpu"))


def test_a_bucket_list_that_ends_too_early_gives_a_warning(
    caplog: pytest.LogCaptureFixture, expected: list[list[int]]
) -> None:
    short = LLM(config=tiny_config("graphs.mode=captured", "graphs.capture_sizes=[1,2,16]"))
    records = [
        record for record in caplog.records if record.name == "ostinato.runtime.startup.rank"
    ]
    assert [record.getMessage() for record in records] == [
        "graphs.capture_sizes=[1, 2, 16]: 16 left out, because scheduler.max_num_seqs=8 is "
        "less; decode steps of 3 to 8 sequences have no decode bucket; to capture them add 8 to "
        "the list, or leave the list empty"
    ]
    assert generate(short, make_prompts()) == expected
    assert short.stats().steps_by_kind["captured"] > 0
    assert short.stats().late_compiles == []


def test_seeded_sampling_does_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = make_prompts(6, seed=3)
    sampling = [
        SamplingParams(seed=index, temperature=1.5, top_p=0.9, top_k=index * 20, max_tokens=10)
        for index in range(6)
    ]
    together = generate(llm, prompts, sampling)
    alone = [
        generate(llm, [prompt], params)[0] for prompt, params in zip(prompts, sampling, strict=True)
    ]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 6


def test_n_completions_share_the_prompt(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    prompt = list(range(2, 66))
    before = llm.stats()
    sampling = SamplingParams(n=4, temperature=1.8, seed=5, max_tokens=6, ignore_eos=True)
    [output] = llm.generate([prompt], sampling, use_progress=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    # The first computes all 64 tokens; each of the others only the last of its 8 blocks.
    assert llm.stats().num_prompt_tokens - before.num_prompt_tokens == 64 + 3 * 8


def test_stop_tokens_and_lengths(llm: LLM, expected: list[list[int]]) -> None:
    prompt, tokens = make_prompts()[0], expected[0]
    stop = tokens[3]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    [output] = llm.generate([prompt], sampling, use_progress=False)
    completion = output.outputs[0]
    assert completion.token_ids == tokens[: tokens.index(stop) + 1]
    assert completion.finish_reason is FinishReason.stop
    assert completion.stop_reason == stop
    [output] = llm.generate([prompt], GREEDY, use_progress=False)
    assert output.outputs[0].finish_reason is FinishReason.length


def test_logprobs_of_greedy_tokens_rank_first(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    [output] = llm.generate([[5, 6, 7]], sampling, use_progress=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 5
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry.rank == 1
        assert entry.top_ids[0] == token_id
        assert entry.top_logprobs[0] == pytest.approx(entry.logprob)


def test_nothing_runs_when_one_prompt_is_refused(llm: LLM) -> None:
    before = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match="0 tokens"):
        llm.generate([[5], []], GREEDY, use_progress=False)
    assert llm.stats().num_steps == before


def test_a_stream_that_is_closed_aborts(llm: LLM) -> None:
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True, seed=1))
    assert next(stream).num_output_tokens == 1
    stream.close()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.compiles_late
def test_a_late_compile_is_counted_at_its_steps_shape() -> None:
    """A function in a hook of the model is compiled in two steps, and another one between steps."""
    with LLM(config=tiny_config()) as llm:
        compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        model = llm._engine._executor._runner.graphs._model
        assert isinstance(model, torch.nn.Module)

        def compile_for_this_size(module: object, inputs: tuple[ForwardBatch, object]) -> None:
            compiled(inputs[0].token_ids)

        hook = model.register_forward_pre_hook(compile_for_this_size)
        assert llm.stats().late_compiles == []
        generate(llm, [[5, 6, 7]])  # a step of 3 tokens, then steps of 1 token
        hook.remove()
        in_steps = [
            LateCompile("dynamo", "tokens=3,seqs=1", 1),
            LateCompile("dynamo", "tokens=1,seqs=1", 1),
        ]
        assert llm.stats().late_compiles == in_steps
        torch.compile(lambda x: x * 2, backend="eager")(torch.ones(4))
        assert llm.stats().late_compiles == [*in_steps, LateCompile("dynamo", "idle", 1)]


@pytest.mark.compiles_late
def test_an_engine_that_could_not_start_hides_nothing(llm: LLM) -> None:
    """Compilations during a start are not counted as late. Those after a failed start are."""
    with pytest.raises(StartupError, match="memory") as caught:
        LLM(config=tiny_config("cache.memory_gib=0.0000001"))
    assert caught.value.__traceback__ is not None, (
        "the error must have a traceback, which keeps alive what the start had built"
    )
    generate(llm, [[5, 6, 7]])  # all compilations in one pause between steps count once
    before = sum(late.count for late in llm.stats().late_compiles)
    torch.compile(lambda x: x * 5, backend="eager")(torch.ones(4))
    after = llm.stats().late_compiles
    assert sum(late.count for late in after) == before + 1
    assert {late.shape for late in after} == {"idle"}


def test_too_little_memory_is_one_clear_line() -> None:
    with pytest.raises(StartupError, match="memory") as caught:
        LLM(config=tiny_config("cache.memory_gib=0.0000001"))
    assert "\n" not in str(caught.value)
