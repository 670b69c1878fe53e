"""Quantised engines: same tokens in every batch, sizes as planned, refusals before loading."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.startup.plan.model_source import open_model
from ostinato.runtime.startup.plan.planning import plan_engine
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_prompts(count: int = 8) -> list[list[int]]:
    numbers = random.Random(5)
    return [
        [numbers.randrange(2, VOCAB_SIZE) for _ in range(numbers.randint(1, 90))]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ("quantization=int8", "float32"),
        ("quantization=int8", "bfloat16"),
        ("quantization=int4", "float32"),
        ("quantization=int4", "bfloat16"),
        ("quantization_head=int8", "bfloat16"),
    ],
)
def test_batched_equals_alone(tmp_path: Path, asked: str, dtype: str) -> None:
    config = tiny_config(
        f"model.{asked}",
        f"model.dtype={dtype}",
        "graphs.mode=captured",
        "graphs.bundle=true",
        graphs__bundle_dir=str(tmp_path),
    )
    prompts = make_prompts()

    def tokens_of(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(asked, GREEDY, use_progress=False)
        return [output.outputs[0].token_ids for output in outputs]

    llm = LLM(config=config)
    alone = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        alone += tokens_of(llm, [prompt])
    assert llm.reset_prefix_cache()
    assert tokens_of(llm, prompts) == alone
    # A second start takes its programs from the first one's bundle.
    assert tokens_of(LLM(config=config), prompts) == alone


@pytest.mark.parametrize(
    "asked", ["quantization=int8", "quantization=int4", "quantization_head=int8"]
)
def test_the_plan_knows_the_quantised_sizes(asked: str) -> None:
    plain = tiny_config()
    config = tiny_config(f"model.{asked}", "model.quantization_group_size=32")
    planned = plan_engine(config, open_model(config)).weights_bytes
    assert planned < plan_engine(plain, open_model(plain)).weights_bytes
    sizes: list[int] = []
    original = torch.nn.Module.eval  # the last call in the building of a model

    def remember(model: torch.nn.Module) -> torch.nn.Module:
        models.append(model)
        return original(model)

    models: list[torch.nn.Module] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "eval", remember)
        build_engine(config)
    for model in models:
        tensors = [*model.parameters(), *model.buffers()]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            sizes.append(sum(tensor.nbytes for tensor in tensors))
    assert sizes
    assert set(sizes) == {planned}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dtype=float16", "kernels take activations in float32 or bfloat16, not float16"),
        ("graphs.pack_weights=false", "graphs.pack_weights=false keeps weights as they are"),
    ],
)
@pytest.mark.parametrize("asked", ["model.quantization=int8", "model.quantization_head=int8"])
def test_what_has_no_kernel_is_refused(asked: str, override: str, message: str) -> None:
    config = tiny_config(asked, override)
    with pytest.raises(StartupError, match=f"{asked}, but .*{message}"):
        open_model(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cuda_has_kernels_for_every_dtype(dtype: str) -> None:
    config = tiny_config("model.quantization=int4", f"model.dtype={dtype}")
    source = open_model(config, torch.device("cuda"))
    assert source.weights.quantization == "int4 in groups of 32; head int8 in groups of 128"
    config = tiny_config("model.quantization_head=int8", f"model.dtype={dtype}")
    source = open_model(config, torch.device("cuda"))
    assert source.weights.quantization == "as loaded; head int8 in groups of 128"
    assert source.weights.uses_cpu_kernels  # they pack the head


def test_another_device_is_refused_by_name() -> None:
    config = tiny_config("model.quantization=int4")
    with pytest.raises(StartupError, match=r"model\.quantization=int4, but only kernels of CPUs"):
        open_model(config, torch.device("mps"))


def test_a_quantised_head_is_refused_before_loading() -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}
    config = tiny_config(
        "model.quantization_head=int8", model__config={**MODEL, "quantization_config": stated}
    )
    with pytest.raises(StartupError, match=r"output head is quantised already .*leave model\."):
        plan_engine(config, open_model(config))


def test_a_large_head_of_floats_is_named(caplog: pytest.LogCaptureFixture) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    quantised = {"model__config": {**MODEL, "quantization_config": stated}}
    hints: list[list[str]] = []
    for config in (
        tiny_config(**quantised),
        tiny_config("model.quantization_head=int8", **quantised),
        tiny_config(),
    ):
        caplog.clear()
        with caplog.at_level("INFO", logger="ostinato"):
            build_engine(config)
        hints.append([text for text in caplog.messages if "output head" in text])
    # 2 layers of 12,288 + 3 x 6,144 weights with 4 bits and a bfloat16 scale for each group of 32,
    # beside 300 x 64 floats of 4 bytes, padded to panels of 32 rows.
    assert hints[0] == [
        "the output head has floats, 70% of the weights that a decode step reads: "
        "model.quantization_head=int8 rounds it to 8 bits"
    ]
    assert hints[1:] == [[], []]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.quantization_group_size=64", "model.quantization_group_size must be left out"),
        ("model.quantization_symmetric=false", "model.quantization_symmetric must be left out"),
    ],
)
def test_settings_of_quantisation_need_it(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(override)


def test_a_group_size_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(ValueError, match="null or one of 32, 64, 128, 256, got 48"):
        tiny_config("model.quantization=int8", "model.quantization_group_size=48")
