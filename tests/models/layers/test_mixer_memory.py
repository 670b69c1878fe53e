"""Recurrent mixers take as much memory between their projections as the memory plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.models.decoder import DecoderBlock
from ostinato.models.layers.mixers.recurrent_mixers import RecurrentMixer
from ostinato.models.sharding import WHOLE
from ostinato.models.step_tensors import StepInputs
from ostinato.ops.native import library as native
from tests.live_bytes import LiveBytes
from tests.models.driver import Driver, Sequence
from tests.models.parity import PROMPT, load
from tests.models.random_checkpoints import VARIANTS, reference_model, save


@pytest.mark.parametrize("name", ["bamba", "lfm2", "qwen3-next"])
def test_the_plan_counts_all_of_it(tmp_path: Path, name: str) -> None:
    native.load("recurrent")
    model, config = load(save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path), "cpu")
    driver = Driver(model, config)
    batch = driver.batch([(Sequence(PROMPT), 20)])
    blocks = [layer for layer in model.layers if isinstance(layer, DecoderBlock)]
    index, mixer = next(
        (index, block.token_mixer)
        for index, block in enumerate(blocks)
        if isinstance(block.token_mixer, RecurrentMixer)
    )
    x = torch.randn(20, 64)
    with torch.no_grad(), LiveBytes() as live:
        mixer.mix(x, StepInputs({}, batch), *driver.cache[index])
    assert config.recurrent is not None
    counted = 20 * config.recurrent.step_bytes(4, WHOLE, is_cpu=True)
    assert counted == live.peak
