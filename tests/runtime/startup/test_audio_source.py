"""`read_audio` reads the spec of a model with cross attention from its checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import LoadFormat, ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.registry import read_model_config
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.audio_source import read_audio
from tests.models.audio.whisper_checkpoints import make_whisper


def test_a_model_with_cross_attention_takes_audio(tmp_path: Path):
    path = make_whisper(tmp_path / "whisper", num_bins=128)
    config = EngineConfig(model=ModelSection(path=str(path)))
    checkpoint = open_checkpoint(config.model)
    spec = read_audio(config, checkpoint, read_model_config(checkpoint))
    assert spec is not None
    assert (spec.num_bins, list(spec.languages)) == (128, ["de", "en", "fr", "ja"])
    text_model = dataclasses.replace(read_model_config(checkpoint), audio=None)
    assert read_audio(config, checkpoint, text_model) is None
    # A tokenizer in another folder gives the tokens.
    (path / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (path / "generation_config.json").unlink()
    checkpoint = open_checkpoint(config.model)
    with pytest.raises(StartupError, match="no_timestamps_token_id is missing"):
        read_audio(config, checkpoint, read_model_config(checkpoint))
    config = EngineConfig(model=ModelSection(path=str(path), tokenizer=str(tmp_path)))
    found = read_audio(config, checkpoint, read_model_config(checkpoint))
    assert found is not None
    assert found.languages == spec.languages


def test_errors_are_those_of_a_start(tmp_path: Path):
    path = make_whisper(tmp_path / "whisper")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dither": 0.1}))
    config = EngineConfig(model=ModelSection(path=str(path)))
    checkpoint = open_checkpoint(config.model)
    with pytest.raises(StartupError, match=r"preprocessor_config.json: dither=0.1 is not"):
        read_audio(config, checkpoint, read_model_config(checkpoint))


def test_random_weights_without_a_checkpoint_take_none(tmp_path: Path):
    stated = json.loads((make_whisper(tmp_path / "whisper") / "config.json").read_text())
    config = EngineConfig(model=ModelSection(load_format=LoadFormat.dummy, config=stated))
    checkpoint = open_checkpoint(config.model)
    assert checkpoint.path is None
    assert read_audio(config, checkpoint, read_model_config(checkpoint)) is None
