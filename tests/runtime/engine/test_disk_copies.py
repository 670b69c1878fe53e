"""Copies of KV blocks on disk change no token and no bit of a log-probability.

The same requests are computed, found on the device, and loaded from disk by a later engine.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.benchmarks.workload.random_adapter import write_random_adapter
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.models import demo
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.types.outputs import GenerationOutput
from ostinato.runtime.types.request import Request
from tests.models.minilm import minilm_directory
from tests.runtime.disk_tiers import disk, facts, num_cached, opened, tiny_disk, wait_for_disk
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
KINDS = [
    GREEDY,
    SamplingParams(temperature=0.0, max_tokens=1, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=9, ignore_eos=True, logprobs=1),
]
SCORED = SamplingParams(
    temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1
)


def prompt(seed: int, length: int = 60) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(2, VOCAB_SIZE) for _ in range(length)]


def mixed(llm: LLM, loras: list[LoRARequest] | None = None) -> list[GenerationOutput]:
    """Every kind of request for prompts that share beginnings.

    Scored prompts follow in a batch of their own, because they are computed in whole. Other
    requests would use their blocks instead of loaded ones.
    """
    first = prompt(1)
    prompts = [first, first[:40] + prompt(2, 30), prompt(3, 17), prompt(4, 100), first]
    outputs: list[GenerationOutput] = []
    for kinds in (KINDS, [SCORED]):
        many = [one for one in prompts for _ in kinds]
        adapters = None
        if loras is not None:
            adapters = [[None, *loras][index % (len(loras) + 1)] for index in range(len(many))]
        outputs += llm.generate(
            many, kinds * len(prompts), use_progress=False, lora_request=adapters
        )
    return outputs


DRAFTS = ("speculation=auto", "speculation.adaptive=false")
CASES = {
    "float32": (),
    "bfloat16": ("model.dtype=bfloat16", "cache.block_size=16", "cache.store=all"),
    "int8": ("cache.dtype=int8",),
    "drafts": DRAFTS,
    "reused": ("cache.store=reused", "scheduler.max_num_batched_tokens=512"),
    "overlap": ("scheduler.overlap=true",),
    "adapters": ("lora.max_adapters=2",),
}


@pytest.mark.parametrize("case", CASES)
def test_a_later_engine_loads_the_bits_that_were_computed(case: str, tmp_path: Path) -> None:
    settings, loras = CASES[case], None
    if case == "adapters":
        loras = [
            LoRARequest(name, 1, str(write_random_adapter(tmp_path / name, MODEL, seed=ord(name))))
            for name in "ab"
        ]
    plain_settings = [one for one in settings if not one.startswith("cache.store")]
    with LLM(config=tiny_config("device.name=cpu", *plain_settings)) as llm:
        expected = facts(mixed(llm, loras))
    with opened(tiny_disk(tmp_path / "tier", *settings)) as llm:
        assert facts(mixed(llm, loras)) == expected
        assert facts(mixed(llm, loras)) == expected
        assert llm.stats().num_tier_loads == 0
    with opened(tiny_disk(tmp_path / "tier", *settings)) as llm:
        outputs = mixed(llm, loras)
        assert facts(outputs) == expected
        assert llm.stats().num_tier_loads > 0
        assert disk(llm).num_failed_blocks == 0
        if case != "reused":
            plain = num_cached(outputs)[: -len(outputs) // 4]
            assert min(plain) >= 16
        assert llm.stats().num_prompt_tokens < 200 + sum(
            len(one.prompt_token_ids) for one in outputs if one.prompt_logprobs is not None
        )


@pytest.mark.parametrize("disk_blocks", [5, 1000])
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_sequences_are_loaded(disk_blocks: int, overlap: bool, tmp_path: Path) -> None:
    """8 rows share 14 blocks. Prompts are shorter than a block, so only outputs are copied."""
    prompts = [prompt(seed, 6) for seed in range(10)]
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    with LLM(config=tiny_config("device.name=cpu")) as llm:
        expected = facts(llm.generate(prompts, long, use_progress=False))
    block_gib = 8 * 2 * 2 * 2 * 16 * 4 / 2**30
    tight = tiny_disk(
        tmp_path,
        f"scheduler.overlap={str(overlap).lower()}",
        model__max_model_len=112,
        cache__memory_gib=15 * block_gib,
        cache__disk_gib=disk_blocks * block_gib,
    )
    with opened(tight) as llm:
        assert (llm.stats().num_blocks, disk(llm).num_places) == (14, disk_blocks)
        assert facts(llm.generate(prompts, long, use_progress=False)) == expected
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_tier_loads > 0
        assert disk(llm).num_loaded_blocks > 0
        assert llm.stats().num_free_blocks == 14


def test_the_last_step_is_stored_and_a_reset_forgets_it(tmp_path: Path) -> None:
    """A step is in flight when its blocks could be copied, and no other step follows."""
    settings = tiny_disk(tmp_path, "scheduler.overlap=true")
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    with opened(settings) as llm:
        llm.generate(prompt(1), one_token, use_progress=False)
        assert llm._engine.has_copies
        assert llm.reset_prefix_cache()
        assert not llm._engine.has_copies
        assert num_cached(llm.generate(prompt(2), one_token, use_progress=False)) == [0]
    with opened(settings) as llm:
        found = llm.generate([prompt(1), prompt(2)], one_token, use_progress=False)
        assert num_cached(found) == [0, 56]
        assert llm.reset_prefix_cache()
        assert num_cached(llm.generate(prompt(2), one_token, use_progress=False)) == [0]
        while llm._engine.has_copies:
            llm._engine.step()
        assert llm.reset_prefix_cache()
    with opened(settings) as llm:
        assert disk(llm).num_used_places == 0
        assert num_cached(llm.generate(prompt(2), one_token, use_progress=False)) == [0]


def test_a_reset_during_the_opening_is_refused(tmp_path: Path) -> None:
    with opened(tiny_disk(tmp_path)) as llm:
        llm.generate(prompt(1), GREEDY, use_progress=False)
    with FileLock(tmp_path / "LOCK", mode=0o600):  # another engine chooses its folder
        llm = LLM(config=tiny_disk(tmp_path))
        assert num_cached(llm.generate(prompt(2), GREEDY, use_progress=False)) == [0]
        assert disk(llm).num_places == 0
        with pytest.raises(InvalidRequestError, match="is being prepared"):
            llm.reset_prefix_cache()
    wait_for_disk(llm)
    assert llm.reset_prefix_cache()
    assert num_cached(llm.generate(prompt(1), GREEDY, use_progress=False)) == [0]
    llm.close()


def salted(llm: LLM, salt: str) -> int:
    """Run a prompt with a salt; returns the tokens that were cached."""
    request = Request(
        request_id=salt,
        prompt_token_ids=prompt(1),
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
        cache_salt=salt,
    )
    llm._engine.add_request(request)
    found: list[int] = []
    while llm._engine.has_work:
        found += [output.num_cached_tokens for output in llm._engine.step()]
    return max(found)


@pytest.mark.parametrize("stores_salted", [False, True])
def test_blocks_with_a_salt_are_stored_on_request(stores_salted: bool, tmp_path: Path) -> None:
    settings = tiny_disk(tmp_path, "cache.store=all", cache__store_salted=stores_salted)
    with opened(settings) as llm:
        assert [salted(llm, salt) for salt in ("a", "a", "")] == [0, 56, 0]
    with opened(settings) as llm:
        assert disk(llm).num_used_places == (14 if stores_salted else 7)
        found = [salted(llm, salt) for salt in ("a", "b", "")]
        assert found == [56 if stores_salted else 0, 0, 56]


def test_a_load_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence is computed. When the disk answers again, the blocks become free."""
    with opened(tiny_disk(tmp_path)) as llm:
        expected = facts(llm.generate(prompt(1), GREEDY, use_progress=False))
    answers, read = threading.Event(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: answers.wait(240) and read(*arguments))
    answers.set()  # the index of the blocks is read at the start
    with opened(tiny_disk(tmp_path)) as llm:
        answers.clear()
        outputs = [*llm.generate(prompt(1), GREEDY, use_progress=False)]
        assert (facts(outputs), num_cached(outputs)) == (expected, [0])
        assert llm.stats().num_tier_loads == 0
        assert not llm.reset_prefix_cache()  # the load holds blocks
        answers.set()
        while llm._engine.has_work:
            llm._engine.step()
        assert llm.stats().num_tier_loads == 1
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
        assert facts(llm.generate(prompt(1), GREEDY, use_progress=False)) == expected


# Requests that may use only a part of the blocks on disk.
PARTIAL = [
    SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=4, use_beam_search=True, best_of=3, n=2),
]


def test_scored_and_parallel_requests_load_what_they_may(tmp_path: Path) -> None:
    with LLM(config=tiny_config("device.name=cpu")) as llm:
        cold = [llm.generate([prompt(1)], one, use_progress=False) for one in PARTIAL]
    with opened(tiny_disk(tmp_path)) as llm:
        llm.generate([prompt(1)], PARTIAL[0], use_progress=False)
    with opened(tiny_disk(tmp_path)) as llm:
        warm = [llm.generate([prompt(1)], one, use_progress=False) for one in PARTIAL]
        assert [facts(one) for one in warm] == [facts(one) for one in cold]
        assert disk(llm).num_loaded_blocks == 7


def test_a_directory_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a directory")
    with caplog.at_level(logging.WARNING), LLM(config=tiny_disk(taken)) as llm:
        one = SamplingParams(temperature=0.0, max_tokens=1)
        assert num_cached(llm.generate([prompt(1)], one, use_progress=False)) == [0]
        assert not llm.stats().tiers
    assert [one for one in caplog.messages if "no copies on disk" in one and str(taken) in one]


DEMO = Path(demo.__file__).parent
TEXT = "Once upon a time there was a scheduler with blocks, and it had a cache."


def cached_tokens(root: Path, model: Path, *overrides: str) -> int:
    """Start an engine with copies on disk; returns the tokens of `TEXT` that it did not compute."""
    settings = (
        "device.name=cpu",
        "graphs.mode=eager",
        "graphs.cost_table_budget_s=0",
        "model.max_model_len=128",
        "cache.memory_gib=0.01",
        "cache.disk_gib=0.05",
        f"cache.disk_dir={root}",
    )
    with opened(load_config([*settings, f"model.path={model}", *overrides])) as llm:
        [output] = llm.generate(TEXT, GREEDY, use_progress=False)
        return output.num_cached_tokens


def test_blocks_of_another_model_or_format_are_not_found(tmp_path: Path) -> None:
    """What else a setting changes does not count, and the old blocks are found again."""
    model, root = tmp_path / "model", tmp_path / "tier"
    model.mkdir()
    for file in DEMO.iterdir():
        if file.is_file():
            shutil.copy2(file, model)
    assert cached_tokens(root, model) == 0
    for changed in (
        "model.dtype=float32",
        "cache.block_size=32",
        "cache.dtype=int8",
        "model.quantization=int8",
        "model.config={rms_norm_eps: 0.001}",
    ):
        assert cached_tokens(root, model, changed) == 0, changed
    num_cached = cached_tokens(root, model, "model.max_model_len=96", "scheduler.max_num_seqs=3")
    assert num_cached >= 16
    weights = model / "model.safetensors"
    before, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1000] ^= 0x20
    weights.write_bytes(data)
    assert cached_tokens(root, model) == 0
    assert cached_tokens(root, model) == num_cached
    data[-1000] ^= 0x20
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert cached_tokens(root, model) == num_cached


@pytest.mark.parametrize(
    ("error", "overrides", "message"),
    [
        (StartupError, ("cache.host_gib=1",), "host_gib=1 is for GPUs: .*cache.disk_dir"),
        (
            StartupError,
            ("cache.disk_dir=/x", "cache.disk_gib=0.000001"),
            "disk_gib=1e-06 has no room for one KV block",
        ),
        (ConfigError, ("cache.disk_gib=9",), "left out, or used with cache.disk_dir, got '9.0'"),
        (ConfigError, ("cache.store=all",), "used with cache.disk_dir or cache.host_gib"),
        (
            ConfigError,
            ("cache.disk_dir=/x", "cache.enable_prefix_caching=false"),
            "cache.disk_dir must be left out, because cache.enable_prefix_caching=false",
        ),
        (
            ConfigError,
            ("cache.host_gib=1", "cache.enable_prefix_caching=false"),
            "cache.host_gib must be left out, because cache.enable_prefix_caching=false",
        ),
    ],
)
def test_what_is_refused_is_named(
    error: type[Exception], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(config=tiny_config("device.name=cpu", *overrides))


def test_a_model_without_keys_and_values_has_no_copies() -> None:
    with pytest.raises(StartupError, match=r"cache\.disk_dir=/x is for models that keep keys"):
        LLM(str(minilm_directory()), overrides=("device.name=cpu", "cache.disk_dir=/x"))
