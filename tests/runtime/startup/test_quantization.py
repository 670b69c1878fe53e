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
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_prompts(count: int = 8) -> list[list[int]]:
    numbers = random.Random(5)
    return [
        [numbers.randrange(2, VOCAB_SIZE) for _ in range(numbers.randint(1, 90))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batched_equals_alone(tmp_path: Path, kind: str, dtype: str) -> None:
    config = tiny_config(
        f"model.quantization={kind}",
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


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_plan_knows_the_quantised_sizes(kind: str) -> None:
    plain = tiny_config()
    config = tiny_config(f"model.quantization={kind}", "model.quantization_group_size=32")
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
    ("overrides", "message"),
    [
        (["model.dtype=float16"], "kernels take activations in float32 or bfloat16, not float16"),
        (["graphs.pack_weights=false"], "graphs.pack_weights=false keeps weights as they are"),
    ],
)
def test_what_has_no_kernel_is_refused(overrides: list[str], message: str) -> None:
    config = tiny_config("model.quantization=int8", *overrides)
    with pytest.raises(StartupError, match=message):
        open_model(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cuda_has_kernels_for_every_dtype(dtype: str) -> None:
    config = tiny_config("model.quantization=int4", f"model.dtype={dtype}")
    source = open_model(config, torch.device("cuda"))
    assert source.weights.quantization == "int4 in groups of 32; head int8 in groups of 128"


def test_another_device_is_refused_by_name() -> None:
    config = tiny_config("model.quantization=int4")
    with pytest.raises(StartupError, match=r"model\.quantization=int4, but only kernels of CPUs"):
        open_model(config, torch.device("mps"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.quantization_group_size=64", "model.quantization_group_size must be left out"),
        ("model.quantization_symmetric=false", "model.quantization_symmetric must be left out"),
        ("model.quantization_head=int4", "model.quantization_head must be left out"),
    ],
)
def test_settings_of_quantisation_need_it(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(override)


def test_a_group_size_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(ValueError, match="null or one of 32, 64, 128, 256, got 48"):
        tiny_config("model.quantization=int8", "model.quantization_group_size=48")
