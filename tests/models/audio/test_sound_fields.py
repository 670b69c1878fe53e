"""`read_sound_spec`: each key has the effect that it has in transformers, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from ostinato.models.audio.sound_fields import read_sound_spec
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.registry import model_class
from ostinato.runtime.audio.log_mel import log_mel
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from tests.models.audio.sound_models import (
    FAMILIES,
    PLACEHOLDERS,
    load_sound_model,
    make_sound_model,
    random_sound,
)
from tests.models.audio.test_audio_fields import FURTHER, HONOURED, WITHOUT_EFFECT, mutated

Json = dict[str, Any]
COMBINED = "processor_config.json"
PLAIN = "preprocessor_config.json"


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint that say how the model takes sounds."""

    family: str
    config: Json
    processor: Json  # processor_config.json without `feature_extractor`
    extractor: Json
    tokens: dict[str, int]  # added tokens

    def read(self, path: Path, tokens: dict[str, int] | None = None, **changes: Json) -> SoundSpec:
        """The spec of changed files, which are written to a directory."""
        parts = {"config": self.config, "processor": self.processor, "extractor": self.extractor}
        config, processor, extractor = {**parts, **changes}.values()
        (path / COMBINED).write_text(json.dumps({**processor, "feature_extractor": extractor}))
        sound = model_class(config["architectures"][0]).read_config(config).sound
        assert sound is not None
        found = self.tokens if tokens is None else tokens
        texts = {token: text for text, token in found.items()}
        return read_sound_spec(
            path, config, sound, token_text=lambda token: texts.get(token, ""), token_id=found.get
        )

    def read_or_refuse(self, path: Path, **changes: Json) -> SoundSpec | str:
        """The spec, or the text of the error."""
        try:
            return self.read(path, **changes)
        except ValueError as error:
            return str(error)


@pytest.fixture(scope="module", params=FAMILIES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a checkpoint, which tests do not change."""
    path = make_sound_model(tmp_path_factory.mktemp("model"), request.param, max_seconds=100)
    _, processor = load_sound_model(path)
    processor.save_pretrained(path)
    combined = json.loads((path / COMBINED).read_text())
    extractor = combined.pop("feature_extractor")
    config = json.loads((path / "config.json").read_text())
    return Files(request.param, config, combined, extractor, TokenizerFiles(path).added_token_ids())


def test_the_spec_is_that_of_the_checkpoint(files: Files, tmp_path: Path) -> None:
    spec = files.read(tmp_path)
    assert (spec.num_bins, spec.num_frames, spec.window_s) == (128, 3000, 30)
    assert spec.max_window_tokens == 750
    assert spec.placeholder == PLACEHOLDERS[files.family]
    assert spec.placeholder_id == files.tokens[spec.placeholder]
    if files.family == "qwen2_audio":
        assert spec.marked_placeholder == "<|audio_bos|><|AUDIO|><|audio_eos|>\n"
        assert (spec.max_windows, spec.max_seconds) == (1, 30)
    else:
        assert spec.marked_placeholder == "<sound>"
        assert (spec.max_windows, spec.max_seconds, spec.max_tokens) == (3, 90, 2250)


def test_the_published_layout_of_files(files: Files, tmp_path: Path) -> None:
    """Without processor_config.json, the processor has its defaults."""
    expected = files.read(tmp_path)
    (tmp_path / COMBINED).unlink()
    (tmp_path / PLAIN).write_text(json.dumps(files.extractor))
    sound = model_class(files.config["architectures"][0]).read_config(files.config).sound
    assert sound is not None
    texts = {token: text for text, token in files.tokens.items()}
    found = read_sound_spec(
        tmp_path, files.config, sound, token_text=texts.__getitem__, token_id=files.tokens.get
    )
    for field in SoundSpec.__struct_fields__:
        if field != "max_windows":
            assert getattr(found, field) == getattr(expected, field), field
    assert found.max_windows == (1 if files.family == "qwen2_audio" else 20)


def outcome(files: Files, path: Path, key: str, extractor: Json, config: Json) -> str:
    """Compare spectrograms with transformers; say whether the key was honoured or refused."""
    spec = files.read_or_refuse(path, config=config, extractor=extractor)
    if isinstance(spec, str):
        assert f"{key}=" in spec
        return "refused"
    theirs = WhisperFeatureExtractor(**{**extractor, "feature_extractor_type": None})
    samples = random_sound(5, 70_000)[: spec.window_s * spec.sampling_rate]
    expected = theirs(samples, sampling_rate=theirs.sampling_rate, return_tensors="np")
    found = log_mel(samples, spec)
    assert found.shape == (spec.num_bins, spec.num_frames)
    np.testing.assert_allclose(found, expected.input_features[0], rtol=0, atol=1e-4)
    return "honoured"


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")
def test_every_key_of_the_extractor_is_honoured_or_refused(files: Files, tmp_path: Path) -> None:
    found: dict[str, set[str]] = {}
    for key, value in {**FURTHER, **files.extractor}.items():
        if key == "auto_map":
            continue
        for other in mutated(value):
            fields = files.extractor | {key: other}
            sizes = [fields[name] for name in ("chunk_length", "sampling_rate", "hop_length")]
            encoder = dict(files.config["audio_config"])
            # The encoder's sizes follow those of the spectrogram, where they are valid.
            if all(type(size) is int and size > 0 for size in sizes):
                encoder["max_source_positions"] = sizes[0] * sizes[1] // sizes[2] // 4 * 2
            if type(fields["feature_size"]) is int and fields["feature_size"] > 0:
                encoder["num_mel_bins"] = fields["feature_size"]
            config = files.config | {"audio_config": encoder}
            found.setdefault(key, set()).add(outcome(files, tmp_path, key, fields, config))
    for key, outcomes in found.items():
        if key in WITHOUT_EFFECT:
            assert outcomes == {"honoured"}, key
        elif key in HONOURED:
            assert outcomes == {"honoured", "refused"}, key
        else:
            assert "refused" in outcomes, key


def test_every_key_of_the_processor_has_an_effect_or_is_refused(
    files: Files, tmp_path: Path
) -> None:
    expected = files.read(tmp_path)
    ignored = set[str]()
    for key, value in files.processor.items():
        found = [
            files.read_or_refuse(tmp_path, processor=files.processor | {key: other})
            for other in mutated(value)
        ]
        errors = [each for each in found if isinstance(each, str)]
        assert all(each.startswith(f"{COMBINED}: {key}=") for each in errors)
        if all(each == expected for each in found):
            ignored.add(key)
    # The prompt of a method for transcription, which is not served.
    assert ignored == {"default_transcription_prompt"} & files.processor.keys()


def test_the_placeholder_of_config_json(files: Files, tmp_path: Path) -> None:
    key = "audio_token_index" if files.family == "qwen2_audio" else "audio_token_id"
    tokens = {**files.tokens, "<other>": 7}
    processor = {name: value for name, value in files.processor.items() if name != "audio_token"}
    spec = files.read(tmp_path, tokens, config=files.config | {key: 7}, processor=processor)
    assert (spec.placeholder_id, spec.placeholder) == (7, "<other>")
    with pytest.raises(ValueError, match=f"audio_token=.*it must be the text of .*{key}=7"):
        files.read(tmp_path, tokens, config=files.config | {key: 7})
    with pytest.raises(ValueError, match=f'{key}="7" must be an integer'):
        files.read(tmp_path, config=files.config | {key: "7"})
    default = 151646 if files.family == "qwen2_audio" else 151669
    tokens = {**files.tokens, spec.placeholder: default}
    fewer = {name: value for name, value in files.config.items() if name != key}
    spec = files.read(tmp_path, tokens, config=fewer, processor=processor)
    assert spec.placeholder_id == default


def only(family: str) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("files", [family], indirect=True)


@only("qwen2_audio")
def test_both_keys_of_the_placeholder_mean_the_same(files: Files, tmp_path: Path) -> None:
    token = files.config["audio_token_index"]
    both = files.config | {"audio_token_id": token}
    assert files.read(tmp_path, config=both) == files.read(tmp_path)
    alone = {key: value for key, value in both.items() if key != "audio_token_index"}
    assert files.read(tmp_path, config=alone) == files.read(tmp_path)
    with pytest.raises(ValueError, match=rf"audio_token_index={token} and audio_token_id=7 must"):
        files.read(tmp_path, config=files.config | {"audio_token_id": 7})


@only("qwen2_audio")
def test_the_tokens_before_and_after_a_sound(files: Files, tmp_path: Path) -> None:
    stated = files.processor | {"audio_bos_token": "<|im_start|>"}
    spec = files.read(tmp_path, processor=stated)
    assert spec.marked_placeholder == "<|im_start|><|AUDIO|><|audio_eos|>\n"
    with pytest.raises(ValueError, match='audio_eos_token="no" is not supported; it must be an'):
        files.read(tmp_path, processor=files.processor | {"audio_eos_token": "no"})
    # A tokenizer that lacks them, and a processor that does not name them.
    fewer = {text: token for text, token in files.tokens.items() if "audio_" not in text}
    unnamed = {key: each for key, each in files.processor.items() if "os_token" not in key}
    assert files.read(tmp_path, fewer, processor=unnamed).marked_placeholder == "<|AUDIO|>\n"


@only("audioflamingo3")
def test_the_longest_sound_has_whole_windows(files: Files, tmp_path: Path) -> None:
    for seconds, windows in ((30, 1), (59, 1), (60, 2), (1200, 40)):
        changed = files.processor | {"max_audio_len": seconds}
        assert files.read(tmp_path, processor=changed).max_windows == windows
    with pytest.raises(ValueError, match=r"max_audio_len=29 is not supported; .* at least 30"):
        files.read(tmp_path, processor=files.processor | {"max_audio_len": 29})


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("config", {"model_type": "voxtral"}, "sounds for model_type='voxtral' are not supported"),
        ("extractor", {"feature_size": 80}, r"feature_size=80 .*audio_config.num_mel_bins=128"),
        ("extractor", {"chunk_length": 10}, r"audio_config.max_source_positions=1500"),
        ("processor", {"tiles": 4}, "tiles=4 is not supported; remove the key if it has no effect"),
        ("processor", {"processor_class": "MusicFlamingoProcessor"}, "processor_class=.*supported"),
        (
            "processor",
            {"processor_class": None, "auto_map": {"AutoProcessor": "code.Processor"}},
            "code of the checkpoint is not run; set processor_class=",
        ),
    ],
)
def test_values_that_are_not_supported(
    files: Files, part: str, changes: Json, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        files.read(tmp_path, **{part: {**getattr(files, part), **changes}})
    assert "\n" not in str(error.value)
