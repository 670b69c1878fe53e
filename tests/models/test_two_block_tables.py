"""Logits are the same, bit for bit, whether layers with a window have blocks of their own or not.

The driver fills freed blocks with NaN and gives them to other sequences.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import LayerProgram
from ostinato.models.base import CausalLM
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import KVCache
from ostinato.models.kv_groups import WHOLE_CACHE, kv_groups
from ostinato.models.step_tensors import ForwardBatch
from tests.models.driver import Driver, Forward, Sequence
from tests.models.parity import PROMPT, load
from tests.models.random_checkpoints import VARIANTS, Variant, reference_model, save
from tests.models.test_stages import PACKED, Pipeline

CPU = torch.device("cpu")
MAX_LEN = 256
SWITCHED = Variant(
    "qwen2",
    {
        **VARIANTS["mistral"].settings,
        "num_hidden_layers": 7,
        "use_sliding_window": True,
        "max_window_layers": 5,  # five layers without and two with a window
    },
)
MODELS = {
    **{
        name: VARIANTS[name]
        for name in ("cohere2", "gemma2", "gemma3", "gpt-oss", "llama4", "mistral", "olmo3")
    },
    "qwen2": SWITCHED,
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint of each model."""
    root = tmp_path_factory.mktemp("windows")
    return {
        name: save(reference_model(variant), variant.as_one_file(), root / name)
        for name, variant in MODELS.items()
    }


def logits_of_steps(driver: Driver) -> Tensor:
    """Logits of chunks and decodes of sequences that come and go, three in a step at most."""
    long, short, late = Sequence(PROMPT * 3), Sequence(PROMPT[:30]), Sequence(PROMPT[5:])
    logits = [driver.prefill(long, [40, 1, 33, 55])]
    for _ in range(3):
        long.token_ids.append(int(logits[-1][-1].argmax()))
        logits += driver.step([(long, 1), (short, 9)])
    logits += driver.step([(short, 3), (late, 38)])
    logits.append(torch.stack([logit for _ in range(12) for logit in decode(driver, long, late)]))
    assert all(bool(part.isfinite().all()) for part in logits)
    return torch.cat(logits)


def decode(driver: Driver, *sequences: Sequence) -> list[Tensor]:
    for sequence in sequences:
        sequence.token_ids.append(len(sequence.token_ids) % 190)
    return [logits[-1] for logits in driver.step([(sequence, 1) for sequence in sequences])]


def both(
    model: CausalLM,
    config: ModelConfig,
    *,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The logits with one block table, whose blocks are all kept, and with the model's groups."""
    groups = kv_groups(config.sliding_windows, MAX_LEN)
    assert groups != WHOLE_CACHE
    drivers = [
        Driver(model, config, forward=forward, dtype=dtype, max_len=MAX_LEN, groups=one)
        for one in (WHOLE_CACHE, groups)
    ]
    expected, logits = map(logits_of_steps, drivers)
    assert len(drivers[1].free_blocks) > len(drivers[0].free_blocks) or len(groups) == 2
    return expected, logits


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_have_the_same_bits(directories: dict[str, Path], name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, config = load(directories[name], "cpu", dtype, pack=True)
        expected, logits = both(model, config)
        assert torch.equal(logits, expected)


@torch.inference_mode()
def test_a_cache_of_eight_bits(directories: dict[str, Path]) -> None:
    model, config = load(directories["qwen2"], "cpu", torch.bfloat16, pack=True)
    expected, logits = both(model, config, dtype=torch.int8)
    assert torch.equal(logits, expected)


# Inductor compiles a whole model in a minute.
FORMS = [GraphForm.layer, pytest.param(GraphForm.model, marks=pytest.mark.slow)]


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_compiled_and_captured_programs(directories: dict[str, Path], form: GraphForm) -> None:
    model, config = load(directories["gemma2"], "cpu", pack=True)
    groups = kv_groups(config.sliding_windows, MAX_LEN)
    driver = Driver(model, config, max_len=MAX_LEN, groups=groups)
    example = driver.batch([(Sequence(PROMPT), 16), (Sequence(PROMPT), 3)])
    program = compile_model(model, form, example, driver.cache)(model)
    expected = logits_of_steps(Driver(model, config, max_len=MAX_LEN))
    driver.forward = program
    assert torch.equal(logits_of_steps(driver), expected)
    if form is GraphForm.layer:
        with program.recording():
            driver.step([(Sequence(PROMPT), 2)])
        assert program.layers_by_program == {LayerProgram.captured: config.num_layers}
        assert torch.equal(logits_of_steps(driver), expected)


@torch.inference_mode()
def test_each_stage_of_a_pipeline_has_its_own_slots(directories: dict[str, Path]) -> None:
    pipeline = Pipeline(directories["qwen2"], 3, PACKED, backend="cpu", most_tokens=60)
    config = pipeline.config
    groups = kv_groups(config.sliding_windows, MAX_LEN)
    caches = [
        config.kv_cache_spec(Driver.block_size, torch.float32, shard=shard, groups=groups).allocate(
            128, CPU
        )
        for shard in pipeline.shards
    ]
    assert [len(cache) for cache in caches] == [2, 3, 2]

    def forward(batch: ForwardBatch, cache: KVCache) -> Tensor:
        hidden = torch.empty(0)
        for stage, own in zip(pipeline.stages, caches, strict=True):
            hidden = stage(batch, own)
        return hidden

    last = pipeline.stages[-1]
    driver = Driver(last, config, forward=forward, max_len=MAX_LEN, groups=groups)
    expected = logits_of_steps(Driver(pipeline.whole, config, max_len=MAX_LEN))
    assert torch.equal(logits_of_steps(driver), expected)
    pipeline.close()
