"""Sounds in prompts on a CUDA device: engines against transformers on the same features."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.audio.sound_models import FAMILIES
from tests.runtime.sound_engines import load_model, sound, sound_llm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["captured", "compiled", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, mode: str, tmp_path: Path) -> None:
    model = load_model(tmp_path, family)
    with sound_llm(
        model,
        "device.name=cuda",
        f"graphs.mode={mode}",
        "cache.block_size=16",
        "scheduler.max_num_batched_tokens=32",
    ) as llm:
        long = sound(3, 100 if family == "qwen2_audio" else 230)
        prompts = [
            model.prompt([3, 4, 5], sound(1, 50), [6]),
            model.prompt([20, 21], sound(2, 35), [24], long, [25]),
            model.prompt([26], sound(1, 50), [27]),
            model.prompt([30, 31, 32]),
        ]
        model.check_run(llm, prompts)
        assert llm._engine.stats().num_inputs_encoded == 2 + -(-len(long) // 16_000)
        assert not llm._engine.stats().late_compiles
