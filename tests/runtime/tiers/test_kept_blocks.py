"""Engines that load KV blocks of earlier engines: the same tokens and the same bits."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import LLM, SamplingParams
from ostinato.models.checkpoints.checkpoint import resolve_path
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.types.outputs import GenerationOutput
from ostinato.runtime.types.request import Request
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

FIXED = ("speculation.method=none", "graphs.cost_table_budget_s=0")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
BLOCK = 8  # tokens


def make_prompts(count: int = 4, length: int = 61) -> list[list[int]]:
    numbers = random.Random(5)
    shared = [numbers.randrange(2, VOCAB_SIZE) for _ in range(20)]
    return [
        shared + [numbers.randrange(2, VOCAB_SIZE) for _ in range(length - 20)]
        for _ in range(count)
    ]


def start(folder: Path | None, *overrides: str) -> LLM:
    """An engine without step costs: it loads blocks even if computing them is faster."""
    own = () if folder is None else (f"cache.disk_dir={folder}",)
    return LLM(config=tiny_config(*FIXED, *own, *overrides))


def answers(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams = GREEDY
) -> list[GenerationOutput]:
    return llm.generate(prompts, sampling, use_progress=False)


def bits(outputs: list[GenerationOutput]) -> list[object]:
    """Tokens and log-probabilities of all completions."""
    return [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]


def cached(outputs: list[GenerationOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cache.dtype=int8", "graphs.attention=cpu"),
        ("model.dtype=bfloat16", "graphs.attention=cpu", "graphs.pack_weights=true"),
        ("speculation.method=ngram", "scheduler.overlap=true"),
    ],
    ids=" ".join,
)
def test_a_later_engine_gives_the_same_bits(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    prompts = make_prompts()
    cold = bits(answers(start(None, *overrides), prompts))
    first = start(tmp_path, *overrides)
    outputs = answers(first, prompts)
    assert bits(outputs) == cold
    assert bits(answers(first, prompts)) == cold  # from the device
    first.close()
    second = start(tmp_path, *overrides)
    outputs = answers(second, prompts)
    assert bits(outputs) == cold
    # The last token of each prompt is computed. Of 61 tokens, 7 blocks are full.
    assert cached(outputs) == [len(prompt) // BLOCK * BLOCK for prompt in prompts]
    stats = second.stats()
    assert stats.tiers["disk"].num_loaded_blocks == 2 + 4 * 5  # 2 shared blocks, 5 others each
    assert stats.num_tier_loads > 0
    second.close()


def test_scored_and_parallel_requests_load_what_they_may(tmp_path: Path) -> None:
    prompts = make_prompts(1)
    both = [
        SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=4, use_beam_search=True, best_of=3, n=2),
    ]
    cold = [answers(start(None), prompts, one) for one in both]
    first = start(tmp_path)
    answers(first, prompts)
    first.close()
    second = start(tmp_path)
    warm = [answers(second, prompts, one) for one in both]
    assert [bits(one) for one in warm] == [bits(one) for one in cold]
    assert warm[1][0].prompt_logprobs == cold[1][0].prompt_logprobs
    assert second.stats().tiers["disk"].num_loaded_blocks == len(prompts[0]) // BLOCK
    second.close()


def test_a_preempted_sequence_loads_its_blocks(tmp_path: Path) -> None:
    """Sequences that together need more blocks than there are lose theirs and get them back."""
    prompts = make_prompts(6, length=100)
    sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=0)
    plain = start(None)
    expected = bits(answers(plain, prompts, sampling))
    assert plain.stats().num_preemptions == 0
    # 2 layers, 2 heads, 16 numbers of 4 bytes, keys and values: 4,096 bytes a block; 64 blocks.
    small = start(tmp_path, "cache.memory_gib=0.00025")
    assert bits(answers(small, prompts, sampling)) == expected
    stats = small.stats()
    assert stats.num_preemptions > 0
    assert stats.tiers["disk"].num_loaded_blocks > 0
    small.close()


def test_salted_blocks_are_stored_only_if_asked(tmp_path: Path) -> None:
    [prompt] = make_prompts(1)
    for setting, expected in (("false", 0), ("true", 56)):
        found: list[int] = []
        for number in range(2):
            config = tiny_config(
                *FIXED, f"cache.disk_dir={tmp_path}", f"cache.store_salted={setting}"
            )
            engine = build_engine(config.engine)
            engine.add_request(
                Request(
                    request_id=str(number),
                    prompt_token_ids=prompt,
                    sampling=GREEDY,
                    cache_salt="tenant",
                )
            )
            while engine.has_work:
                found += [one.num_cached_tokens for one in engine.step() if one.new_token_ids][:1]
            engine.close()
        assert max(found) == expected


def test_reset_prefix_cache_forgets_the_disk(tmp_path: Path) -> None:
    prompts = make_prompts()
    first = start(tmp_path)
    answers(first, prompts)
    assert first.reset_prefix_cache()
    assert cached(answers(first, prompts[:1])) == [0]
    assert first.reset_prefix_cache()
    first.close()
    second = start(tmp_path)
    # The first prompt was computed after the first reset, and forgotten at the second.
    assert cached(answers(second, prompts[:1])) == [0]
    second.close()


@pytest.mark.parametrize(
    "other",
    ["model.seed=8", "model.dtype=bfloat16", "cache.block_size=16", "cache.dtype=int8"],
)
def test_blocks_of_another_model_or_setting_are_not_found(tmp_path: Path, other: str) -> None:
    prompts = make_prompts(1)
    for overrides, expected in (((), 0), ((other,), 0), ((), 56)):
        llm = start(tmp_path, "graphs.attention=cpu", *overrides)
        assert cached(answers(llm, prompts)) == [expected]
        llm.close()


def test_one_changed_weight_changes_the_directory(tmp_path: Path) -> None:
    source, model = resolve_path("", "", weights=True, key="model.path"), tmp_path / "model"
    model.mkdir()
    for file in source.iterdir():
        if file.is_file():
            (model / file.name).write_bytes(file.read_bytes())
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    found: list[int] = []
    for change in (0.0, 1.0, -1.0):
        name = min(tensors)
        changed = tensors[name].clone()
        changed.view(-1)[0] += change
        tensors[name] = changed
        save_file(tensors, weights, metadata={"format": "pt"})
        overrides = ("graphs.mode=eager", "cache.memory_gib=0.01", "speculation.method=none")
        for _ in range(2):
            llm = LLM(
                str(model),
                overrides=[*overrides, f"cache.disk_dir={tmp_path}/kv", "model.max_model_len=128"],
            )
            # The digest of a new file is computed on a thread.
            while not llm.stats().tiers["disk"].num_places:
                llm._engine.step()
            found += cached(answers(llm, [list(range(60, 120))]))
            llm.close()
    assert torch.equal(tensors[min(tensors)], load_file(weights)[min(tensors)])
    assert found[:4] == [0, 48, 0, 48]


def test_a_directory_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a directory")
    with caplog.at_level(logging.WARNING):
        llm = start(taken)
    assert cached(answers(llm, make_prompts(1))) == [0]
    assert [one for one in caplog.messages if "no copies on disk" in one and str(taken) in one]
    assert not llm.stats().tiers
    llm.close()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("cache.host_gib=1", "device.name=cpu"), "raise cache.memory_gib"),
        (("cache.enable_prefix_caching=false", "cache.disk_dir=/tmp/x"), "cache.disk_dir must be"),
    ],
)
def test_settings_that_contradict_each_other(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises((StartupError, ValueError, InvalidRequestError), match=reason):
        start(None, *overrides)
