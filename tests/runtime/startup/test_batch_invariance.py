"""An engine says at its start when a token's logits may depend on the batch, and only then."""

from __future__ import annotations

import pytest

from ostinato import LLM, SamplingParams
from ostinato.runtime.startup.engine_plan import make_plan
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
    """Wide enough that torch's own products give other bits for other numbers of rows."""
    wide = {**MODEL, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 2000}
    sampling = SamplingParams(temperature=1.5, max_tokens=8, seed=5, ignore_eos=True, logprobs=0)
    prompt = list(range(2, 40))
    with LLM(config=tiny_config(model__config=wide, model__dtype=dtype)) as llm:
        seen: set[tuple[object, ...]] = set()
        for others in (0, 1, 2, 7):
            assert llm.reset_prefix_cache()
            beside = [list(range(3, 10 + index)) for index in range(others)]
            *_, cold = llm.generate([*beside, prompt], sampling, use_progress=False)
            [cached] = llm.generate([prompt], sampling, use_progress=False)
            for output in (cold.outputs[0], cached.outputs[0]):
                assert output.logprobs is not None
                scores = [each.logprob for each in output.logprobs]
                seen.add((*output.token_ids, *scores))
    assert len(seen) == 1
