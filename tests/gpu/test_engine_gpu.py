"""The whole engine on a CUDA device: the CPU's tokens, no late compile, no leak, clear refusals."""

from __future__ import annotations

import random

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.build_engine import build_engine
from tests.gpu.tiny_llama import MODEL, VOCAB_SIZE, cuda_config
from tests.runtime.tiny import tiny_config

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_prompts(count: int, seed: int = 0, longest: int = 200) -> list[list[int]]:
    numbers = random.Random(seed)
    return [
        [numbers.randrange(2, VOCAB_SIZE) for _ in range(numbers.randint(1, longest))]
        for _ in range(count)
    ]


def generate(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams] = GREEDY
) -> list[list[int]]:
    outputs = llm.generate(prompts, sampling, use_progress=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def cpu() -> LLM:
    """An engine on the CPU: float32, eager, attention by the reference backend."""
    return LLM(
        config=tiny_config(
            "device.name=cpu",
            "graphs.attention=reference",
            "graphs.pack_weights=false",
            "cache.block_size=16",
            model__config=MODEL,
        )
    )


@pytest.mark.parametrize("form", ["layer", "model"])
def test_greedy_tokens_are_those_of_the_cpu(cpu: LLM, form: str) -> None:
    gpu = LLM(config=cuda_config(f"graphs.form={form}"))
    prompts = make_prompts(24)
    assert generate(gpu, prompts) == generate(cpu, prompts)
    assert gpu.stats().steps_by_kind["captured"] > 0


def test_every_way_to_sample_gives_the_tokens_of_the_cpu(cpu: LLM) -> None:
    gpu = LLM(config=cuda_config())
    common = {"max_tokens": 16, "ignore_eos": True}
    sampling = [
        SamplingParams(temperature=1.3, seed=1, **common),
        SamplingParams(temperature=0.9, seed=2, top_k=5, **common),
        SamplingParams(temperature=1.0, seed=3, top_p=0.7, min_p=0.01, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, **common),
        SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5, **common),
        SamplingParams(temperature=0.0, logit_bias={7: 2.0, 9: -3.0}, **common),
        SamplingParams(
            temperature=0.0, max_tokens=16, min_tokens=8, stop_token_ids=tuple(range(0, 300, 2))
        ),
        SamplingParams(temperature=0.8, seed=4, logprobs=3, frequency_penalty=0.3, **common),
    ]
    prompts = make_prompts(len(sampling), seed=1)
    assert generate(gpu, prompts, sampling) == generate(cpu, prompts, sampling)


def test_logprobs_are_those_of_the_cpu(cpu: LLM) -> None:
    gpu = LLM(config=cuda_config())
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=4, ignore_eos=True)
    prompts = make_prompts(5, seed=2)
    for one, other in zip(
        gpu.generate(prompts, sampling, use_progress=False),
        cpu.generate(prompts, sampling, use_progress=False),
        strict=True,
    ):
        got, expected = one.outputs[0].logprobs, other.outputs[0].logprobs
        assert got is not None
        assert expected is not None
        for entry, truth in zip(got, expected, strict=True):
            assert (entry.rank, entry.top_ids) == (truth.rank, truth.top_ids)
            assert entry.logprob == pytest.approx(truth.logprob, abs=1e-4)
            assert entry.top_logprobs == pytest.approx(truth.top_logprobs, abs=1e-4)


def test_preemption_changes_no_token(cpu: LLM) -> None:
    """Resumed sequences are computed again; their penalties count the tokens generated before."""
    block_bytes = 2 * 2 * 2 * 16 * 64 * 4  # layers, K and V, heads, tokens, head size, float32
    tight = LLM(
        config=cuda_config(
            "model.max_model_len=112", f"cache.memory_gib={13 * block_bytes / 2**30}"
        )
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, presence_penalty=0.5)
    prompts = make_prompts(10, seed=3, longest=40)
    assert generate(tight, prompts, sampling) == generate(cpu, prompts, sampling)
    assert tight.stats().num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nothing_compiles_late_and_nothing_leaks(dtype: str) -> None:
    llm = LLM(config=cuda_config(f"model.dtype={dtype}"))
    allocated = []
    numbers = random.Random(4)
    while llm.stats().num_steps < 1000:
        prompts = make_prompts(20, seed=numbers.randrange(1 << 30))
        sampling = [
            SamplingParams(
                temperature=numbers.choice([0.0, 1.0]),
                top_k=numbers.choice([0, 20]),
                seed=index,
                max_tokens=numbers.randint(1, 50),
                ignore_eos=True,
            )
            for index in range(len(prompts))
        ]
        tokens = generate(llm, prompts, sampling)
        assert [len(each) for each in tokens] == [params.max_tokens for params in sampling]
        allocated.append(torch.cuda.memory_allocated())
    stats = llm.stats()
    assert stats.late_compiles == []
    assert stats.steps_by_kind["captured"] > 0
    assert stats.steps_by_kind["compiled"] > 0  # steps of 65 to 96 tokens have no bucket
    assert stats.steps_by_kind["eager"] == 0
    assert stats.num_free_blocks == stats.num_blocks
    # The first rounds may load kernels with workspaces that stay.
    assert allocated[3:] == [allocated[3]] * len(allocated[3:])
    assert len(allocated) > 5


@pytest.mark.whole_device
def test_too_little_memory_for_the_capture_leaves_buckets_out(
    cpu: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    total = torch.cuda.mem_get_info()[1]

    def take_the_rest(phase: str, seconds: float | None) -> None:
        if phase == "warm-up" and seconds is not None:  # the capture is next
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)

    try:
        llm = LLM(config=cuda_config(), report=take_the_rest)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    messages = [record.getMessage() for record in caplog.records]
    [warning] = [message for message in messages if message.startswith("out of memory")]
    assert "during capture, buckets left out: " in warning
    assert "\n" not in warning
    prompts = make_prompts(10)
    assert generate(llm, prompts) == generate(cpu, prompts)
    assert llm.stats().late_compiles == []


@pytest.mark.whole_device
def test_a_plan_leaves_room_for_what_is_not_planned(caplog: pytest.LogCaptureFixture) -> None:
    """The KV cache fills the memory up to `memory_fraction`; the rest stays free."""
    free, total = torch.cuda.mem_get_info()
    config = load_config(
        [*(f"cache.{word}" for word in ("memory_gib=null", "block_size=16")),
         "device.name=cuda", "device.memory_fraction=0.5", "model.load_format=dummy",
         "model.dtype=bfloat16", "scheduler.max_num_batched_tokens=96"],
        values={"model.config": MODEL},
    )  # fmt: skip
    with caplog.at_level("INFO", "ostinato.runtime.startup.rank"):
        llm = LLM(config=config)
    assert generate(llm, make_prompts(4)) != []
    left = torch.cuda.mem_get_info()[0]
    assert left >= free - 0.5 * free - 0.01 * total
    assert left <= free - 0.4 * free, "less than 40% of the free memory is used"
    messages = [record.getMessage() for record in caplog.records]
    [line] = [message for message in messages if "captured graphs took" in message]
    assert "less than the largest" not in line


def test_a_cache_of_eight_bits(cpu: LLM) -> None:
    """In the cache a token takes half the bytes. Nearly all first tokens stay the same."""
    whole = LLM(config=cuda_config("model.dtype=bfloat16"))
    small = LLM(config=cuda_config("model.dtype=bfloat16", "cache.dtype=fp8_e4m3"))
    assert small.stats().num_blocks >= 2 * whole.stats().num_blocks
    prompts = make_prompts(24)
    tokens, expected = generate(small, prompts), generate(whole, prompts)
    same = sum(one[0] == other[0] for one, other in zip(tokens, expected, strict=True))
    assert same >= 20
    assert small.stats().late_compiles == []
    assert small.stats().steps_by_kind["captured"] > 0


def test_device_times_are_within_the_steps() -> None:
    llm = LLM(config=cuda_config())
    before = llm.stats()
    generate(llm, make_prompts(8))
    torch.cuda.synchronize()
    after = llm.stats()
    device = after.device_seconds - before.device_seconds
    assert 0.0 < device <= after.step_seconds - before.step_seconds


@pytest.mark.whole_device
def test_too_large_a_cache_is_refused_by_the_plan() -> None:
    free_gib = torch.cuda.mem_get_info()[0] / 2**30
    with pytest.raises(StartupError, match=r"cache\.memory_gib") as caught:
        build_engine(cuda_config(f"cache.memory_gib={free_gib:.3f}"))
    assert "\n" not in str(caught.value)


def test_the_reference_can_not_be_captured() -> None:
    with pytest.raises(StartupError, match=r"graphs\.mode=compiled"):
        build_engine(cuda_config("graphs.attention=reference"))


def test_steps_beyond_32_bit_indices_are_refused() -> None:
    wide = {**MODEL, "intermediate_size": 14336}  # the widest tensor has 28672 columns
    overrides = ["device.name=cuda", "graphs.mode=compiled", "model.dtype=bfloat16"]
    with pytest.raises(StartupError, match="at most 74898 tokens a step"):
        build_engine(
            tiny_config(*overrides, "scheduler.max_num_batched_tokens=75000", model__config=wide)
        )
