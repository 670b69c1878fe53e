"""The random checkpoints of other tests: they load in transformers, and outputs depend on audio."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.audio.whisper_checkpoints import NUM_TIMESTAMPS, load_whisper, make_whisper


@pytest.mark.parametrize(("num_bins", "multilingual"), [(80, True), (128, False)])
def test_outputs_depend_on_the_audio(num_bins: int, multilingual: bool, tmp_path: Path):
    path = make_whisper(tmp_path / "whisper", num_bins=num_bins, multilingual=multilingual)
    model, processor = load_whisper(path)
    time = np.arange(80_000) / 16_000
    sounds = [0.3 * np.sin(2 * np.pi * hertz * time).astype(np.float32) for hertz in (220, 2000)]
    features = processor(sounds, sampling_rate=16_000, return_tensors="pt").input_features
    assert features.shape == (2, num_bins, 3000)
    start = torch.full((2, 1), model.config.decoder_start_token_id)
    with torch.no_grad():
        logits = model(features, decoder_input_ids=start).logits[:, -1]
    assert (logits[0] - logits[1]).abs().max() > 0.1

    ids = processor.tokenizer.get_vocab()
    assert len(processor.tokenizer) == model.config.vocab_size == len(ids)
    assert ids["<|30.00|>"] - ids["<|0.00|>"] + 1 == NUM_TIMESTAMPS
    assert ids["<|0.00|>"] == ids["<|notimestamps|>"] + 1
    text = "The quick brown fox, 狐."
    tokens = processor.tokenizer(text).input_ids
    assert tokens[:2] == [ids["<|startoftranscript|>"], ids["<|notimestamps|>"]]
    assert processor.tokenizer.decode(tokens, skip_special_tokens=True) == text
