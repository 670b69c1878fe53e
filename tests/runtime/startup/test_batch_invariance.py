"""An engine warns at its start if a token's logits may depend on the batch, and only then."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.engine_plan import check_determinism, make_plan
from tests.runtime.tiny import MODEL, tiny_config

LINE = "a seed may give other tokens in another batch: "
UNPACKED = "torch multiplies unpacked weights; set graphs.pack_weights=true"
REFERENCE = "attention runs on reference; set graphs.attention=cpu"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], None),
        (["model.dtype=bfloat16"], None),
        (["model.quantization=int4"], None),
        (["model.quantization=int8", "model.quantization_head=none"], None),
        (["model.quantization_head=int4"], None),
        (
            ["model.dtype=float16"],
            "torch multiplies float16 weights; set model.dtype=bfloat16 or float32",
        ),
        (["graphs.pack_weights=false"], UNPACKED),
        (["graphs.attention=reference"], REFERENCE),
        (["graphs.pack_weights=false", "graphs.attention=reference"], f"{UNPACKED}; {REFERENCE}"),
    ],
)
def test_the_plan_knows_why(overrides: list[str], reason: str | None) -> None:
    plan = make_plan(tiny_config(*overrides).engine, threads=1)
    assert plan.why_batch_dependent == reason
    assert plan.determinism == ("bitwise" if reason is None else "none")
    wanted = tiny_config(*overrides, "runtime.determinism=bitwise").engine
    if reason is None:
        make_plan(wanted, threads=1)
        return
    with pytest.raises(StartupError) as refused:
        make_plan(wanted, threads=1)
    assert str(refused.value) == (
        "runtime.determinism=bitwise, but the bits of an answer would depend on its batch: "
        f"{reason}; or leave runtime.determinism at auto"
    )


def test_a_gpu_promises_no_bits() -> None:
    plan = make_plan(tiny_config().engine, threads=1)
    on_gpu = replace(plan, source=replace(plan.source, device=torch.device("cuda")))
    assert on_gpu.determinism == "none"
    wanted = replace(on_gpu, config=tiny_config("runtime.determinism=bitwise").engine)
    with pytest.raises(
        StartupError, match=r"on cuda choose .*; set device.name=cpu; or leave runtime.determinism"
    ):
        check_determinism(wanted)


def test_the_fingerprint_names_what_bits_depend_on() -> None:
    fingerprints: list[str] = []
    for overrides in (
        [],
        ["device.threads=1", "scheduler.max_num_seqs=4", "cache.block_size=16"],
        ["model.seed=1"],
        ["model.dtype=bfloat16"],
        ["graphs.pack_weights=false"],
    ):
        with LLM(config=tiny_config(*overrides)) as llm:
            fingerprints.append(llm.model.system_fingerprint)
            assert llm.model.system_fingerprint.startswith(f"fp-{llm.model.determinism}-")
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 4


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [([], []), (["graphs.pack_weights=false"], [LINE + UNPACKED])],
)
def test_one_warning_and_only_where_it_is_so(
    overrides: list[str], lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    LLM(config=tiny_config(*overrides)).close()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each for each in warnings if each.startswith(LINE)] == lines


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_seed_gives_the_same_tokens_and_bits_in_batches_of_every_size(dtype: str) -> None:
    """The model is wide enough that torch's own products and sums of logits give other bits for
    other numbers of rows, and of threads.
    """
    wide = {**MODEL, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 70_000}
    sampling = SamplingParams(
        temperature=1.5, max_tokens=6, seed=5, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    prompt = list(range(2, 40))
    plain = msgspec.structs.replace(sampling, prompt_logprobs=None)  # may use cached blocks
    before = torch.get_num_threads()
    seen: set[str] = set()
    seen_prompts: set[str] = set()
    try:
        with LLM(config=tiny_config(model__config=wide, model__dtype=dtype)) as llm:
            for others, threads in ((0, 1), (1, 2), (2, 1), (7, 2)):
                torch.set_num_threads(threads)
                assert llm.reset_prefix_cache()
                beside = [list(range(3, 10 + index)) for index in range(others)]
                *_, cold = llm.generate([*beside, prompt], sampling, use_progress=False)
                [cached] = llm.generate([prompt], plain, use_progress=False)
                assert cached.num_cached_tokens == 32
                seen |= {str(each.outputs[0].logprobs) for each in (cold, cached)}
                seen_prompts.add(str(cold.prompt_logprobs))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == len(seen_prompts) == 1
