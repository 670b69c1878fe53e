"""`read_audio_spec`: each key has the effect that it has in transformers, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.whisper.tokenization_whisper import LANGUAGES as ALL_LANGUAGES
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from ostinato.models.audio.audio_fields import read_audio_spec
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.audio.languages import LANGUAGES, language_code
from ostinato.runtime.audio.log_mel import log_mel
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from tests.models.audio.whisper_checkpoints import load_whisper, make_whisper

Json = dict[str, Any]
NOISE = np.random.default_rng(3).normal(0, 0.1, 70_000).astype(np.float32)
FILES = ("config", "generation_config", "preprocessor_config")
# Values for keys that a file can have besides those that `save_pretrained` writes.
FURTHER: Json = {
    "auto_map": {"AutoFeatureExtractor": "code.Extractor"},
    "device": "cpu",
    "do_normalize": True,
    "mel_filters": [[0.0]],
    "n_samples": 160_000,
    "nb_max_frames": 1000,
    "processor_class": "WhisperProcessor",
    "return_tensors": "np",
}
HONOURED = {"hop_length", "n_fft", "chunk_length", "sampling_rate", "feature_size"}
WITHOUT_EFFECT = {*FURTHER, "return_attention_mask"}
REFUSED = {"padding_value", "padding_side", "dither", "feature_extractor_type"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multilingual checkpoint, which tests do not change."""
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def files(whole: Path) -> dict[str, Json]:
    """The contents of its files of JSON."""
    return {name: json.loads((whole / f"{name}.json").read_text()) for name in FILES}


def read(
    files: dict[str, Json], path: Path, token_id: Callable[[str], int | None] | None = None
) -> AudioSpec:
    """The spec of the files' contents, with the tokens of the checkpoint."""
    (path / "preprocessor_config.json").write_text(json.dumps(files["preprocessor_config"]))
    return read_audio_spec(
        path, files["config"], files["generation_config"], token_id=token_id or TOKENS.get
    )


TOKENS: dict[str, int] = {}


@pytest.fixture(autouse=True)
def _tokens(whole: Path) -> None:
    TOKENS.update(TokenizerFiles(whole).added_token_ids())


def mutated(value: Any) -> list[Any]:
    """Other values of the same type, of other types, and null."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value // 2, value * 2, value + 1, -value, str(value), float(value), None]
    if isinstance(value, float):
        return [value + 0.5, -1.0, "0", True, None]
    if isinstance(value, str):
        return ["Other", 3]
    return [None]


def read_or_refuse(files: dict[str, Json], path: Path) -> AudioSpec | str:
    """The spec, or the text of the error."""
    try:
        return read(files, path)
    except ValueError as error:
        return str(error)


def check(files: dict[str, Json], path: Path, key: str) -> str:
    """Compare with transformers; say whether the key was honoured or refused."""
    spec = read_or_refuse(files, path)
    if isinstance(spec, str):
        assert spec.startswith("preprocessor_config.json: "), spec
        assert f"{key}=" in spec, spec
        return "refused"
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    samples = NOISE[: spec.window_s * spec.sampling_rate]
    expected = extractor(
        samples, sampling_rate=extractor.sampling_rate, return_tensors="np"
    ).input_features[0]
    assert expected.shape == (spec.num_bins, spec.num_frames)
    np.testing.assert_allclose(log_mel(samples, spec), expected, rtol=0, atol=1e-4)
    return "honoured"


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")
def test_every_key_is_honoured_or_refused(files: dict[str, Json], tmp_path: Path):
    stated = files["preprocessor_config"]
    assert {*stated, *FURTHER} == HONOURED | WITHOUT_EFFECT | REFUSED, "a new key of transformers"
    outcomes: dict[str, set[str]] = {}
    for key, value in {**FURTHER, **stated}.items():
        for other in [value, *mutated(value)]:
            fields = stated | {key: other}
            model = files["config"] | {"vocab_size": 99_999}
            # The model's sizes follow those of the spectrogram, where they are valid.
            sizes = [fields[name] for name in ("chunk_length", "sampling_rate", "hop_length")]
            if all(type(size) is int and size > 0 for size in sizes):
                model["max_source_positions"] = sizes[0] * sizes[1] // sizes[2] // 2
            if type(fields["feature_size"]) is int and fields["feature_size"] > 0:
                model["num_mel_bins"] = fields["feature_size"]
            changed = {**files, "config": model, "preprocessor_config": fields}
            outcome = check(changed, tmp_path, key)
            if other != value or type(other) is not type(value):
                outcomes.setdefault(key, set()).add(outcome)
            else:
                assert outcome == "honoured", key
    for key, found in outcomes.items():
        if key in WITHOUT_EFFECT - {"auto_map"}:
            assert found == {"honoured"}, key
        elif key in HONOURED:
            assert found == {"honoured", "refused"}, key
    assert outcomes["dither"] == outcomes["padding_value"] == {"refused"}


def test_the_spec_is_that_of_the_checkpoint(whole: Path, files: dict[str, Json], tmp_path: Path):
    model, processor = load_whisper(whole)
    tokenizer, config = processor.tokenizer, model.generation_config
    spec = read(files, tmp_path)
    ids = tokenizer.convert_tokens_to_ids
    assert (spec.num_bins, spec.num_frames, spec.window_s) == (80, 3000, 30)
    assert spec.start_id == config.decoder_start_token_id == ids("<|startoftranscript|>")
    assert spec.end_id == config.eos_token_id == ids("<|endoftext|>")
    assert spec.no_timestamps_id == ids("<|notimestamps|>")
    assert spec.first_timestamp_id == ids("<|0.00|>")
    assert spec.first_timestamp_id + round(30 / spec.timestamp_step_s) == ids("<|30.00|>")
    assert {f"<|{code}|>": token for code, token in spec.languages.items()} == config.lang_to_id
    assert spec.transcribe_id == config.task_to_id["transcribe"]
    assert spec.translate_id == config.task_to_id["translate"]
    assert spec.start_of_previous_id == config.prev_sot_token_id == ids("<|startofprev|>")
    assert spec.no_speech_id == ids("<|nospeech|>") == config.no_timestamps_token_id - 1
    assert spec.max_initial_timestamp == config.max_initial_timestamp_index == 50
    assert list(spec.suppressed) == config.suppress_tokens
    assert list(spec.suppressed_first) == config.begin_suppress_tokens


def test_an_english_model_has_no_languages(files: dict[str, Json], tmp_path: Path):
    """Its tokenizer has the tokens of languages all the same."""
    files["generation_config"]["is_multilingual"] = False
    spec = read(files, tmp_path)
    assert (spec.languages, spec.transcribe_id, spec.translate_id) == ({}, None, None)
    del files["generation_config"]["is_multilingual"]
    assert len(read(files, tmp_path).languages) == 4
    files["config"]["vocab_size"] = 51864
    assert read(files, tmp_path).languages == {}


def test_old_checkpoints_get_their_tokens_from_the_tokenizer(
    files: dict[str, Json], tmp_path: Path
):
    """Those before 2023 have neither generation_config.json nor these keys in config.json."""
    expected = read(files, tmp_path)
    of_model = {"suppress_tokens", "begin_suppress_tokens"}
    files["generation_config"] = {}
    assert of_model <= set(files["config"])
    spec = read(files, tmp_path)
    assert spec.max_initial_timestamp is None
    for field in AudioSpec.__struct_fields__:
        if field != "max_initial_timestamp":
            assert getattr(spec, field) == getattr(expected, field), field

    old = {"<|nocaptions|>": TOKENS["<|nospeech|>"]} | TOKENS
    del old["<|nospeech|>"]
    assert read(files, tmp_path, old.get).no_speech_id == expected.no_speech_id
    del old["<|nocaptions|>"], old["<|startofprev|>"], old["<|translate|>"]
    spec = read(files, tmp_path, old.get)
    assert (spec.no_speech_id, spec.start_of_previous_id, spec.translate_id) == (None,) * 3
    # A file that exists has priority, also over what it does not state.
    files["generation_config"] = {"eos_token_id": [expected.end_id]}
    spec = read(files, tmp_path)
    assert (spec.end_id, spec.suppressed, spec.suppressed_first) == (expected.end_id, (), ())


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("config", "num_mel_bins", 128, "feature_size=80 is not supported; .*num_mel_bins=128"),
        ("config", "num_mel_bins", "80", "num_mel_bins must be an integer of at least 1, got '80'"),
        ("config", "max_source_positions", 750, "max_source_positions=750"),
        ("config", "vocab_size", 1900, "vocab_size=1900 has no room for 1501 timestamps"),
        ("config", "vocab_size", 0, "config.json: vocab_size must be an integer"),
        ("generation_config", "eos_token_id", 5000, "generation_config.json: eos_token_id=5000"),
        ("generation_config", "eos_token_id", [1, 2], r"eos_token_id=\[1, 2\] must be a token"),
        ("generation_config", "eos_token_id", True, "eos_token_id=true"),
        ("generation_config", "no_timestamps_token_id", 430, "<|0.00|> has the id 432"),
        ("generation_config", "suppress_tokens", 7, "suppress_tokens=7 must be a list"),
        ("generation_config", "suppress_tokens", [7, -1], r"suppress_tokens=\[7, -1\] has -1"),
        ("generation_config", "begin_suppress_tokens", ["a"], "begin_suppress_tokens"),
        ("generation_config", "max_initial_timestamp_index", -1, "_timestamp_index=-1 must be"),
        ("generation_config", "max_initial_timestamp_index", 1.5, "_timestamp_index=1.5 must be"),
        ("generation_config", "is_multilingual", "no", 'is_multilingual="no" must be true or'),
        ("generation_config", "lang_to_id", {}, "needs lang_to_id"),
        ("generation_config", "lang_to_id", {"en": 422}, 'lang_to_id has "en"; keys must be'),
        ("generation_config", "lang_to_id", {"<|en|>": 9999}, "lang_to_id.<|en|>=9999"),
        ("generation_config", "lang_to_id", [422], r"lang_to_id=\[422\] must map"),
        ("generation_config", "task_to_id", {"translate": 426}, "task_to_id with transcribe"),
        ("preprocessor_config", "tiles", 4, "tiles=4 is not supported; remove the key if it has"),
        ("preprocessor_config", "feature_extractor_type", None, None),
    ],
)
def test_values_that_are_not_supported(
    file: str, key: str, value: Any, message: str | None, files: dict[str, Json], tmp_path: Path
):
    files[file][key] = value
    if message is None:
        assert read(files, tmp_path).window_s == 30
        return
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        read(files, tmp_path)


def test_a_missing_token_is_named(files: dict[str, Json], tmp_path: Path):
    del files["generation_config"]["no_timestamps_token_id"]
    assert read(files, tmp_path).no_timestamps_id == TOKENS["<|notimestamps|>"]
    with pytest.raises(ValueError, match=r"no_timestamps_token_id is missing"):
        read(files, tmp_path, lambda text: None)


def test_code_of_the_checkpoint_is_refused_unless_the_class_is_known(
    files: dict[str, Json], tmp_path: Path
):
    files["preprocessor_config"]["auto_map"] = {"AutoFeatureExtractor": "code.Extractor"}
    assert read(files, tmp_path).num_bins == 80
    del files["preprocessor_config"]["feature_extractor_type"]
    with pytest.raises(ValueError, match="auto_map"):
        read(files, tmp_path)


def test_the_combined_file_has_priority_as_in_transformers(files: dict[str, Json], tmp_path: Path):
    fields = files["preprocessor_config"] | {"n_fft": 300}
    combined = tmp_path / "processor_config.json"
    combined.write_text(json.dumps({"feature_extractor": fields}))
    assert read(files, tmp_path).fft_size == 300
    assert WhisperFeatureExtractor.from_pretrained(tmp_path).n_fft == 300
    combined.write_text(json.dumps({"processor_class": "WhisperProcessor"}))
    assert read(files, tmp_path).fft_size == 400


def test_a_missing_file_is_named_with_the_remedy(files: dict[str, Json], tmp_path: Path):
    with pytest.raises(ValueError, match=r"no preprocessor_config.json.*takes audio.*AutoFeature"):
        read_audio_spec(tmp_path, files["config"], files["generation_config"], token_id=TOKENS.get)


def test_the_languages_are_those_of_transformers():
    assert LANGUAGES == ALL_LANGUAGES
    for name, code in TO_LANGUAGE_CODE.items():
        assert language_code(name) == language_code(name.title()) == code
        assert language_code(code.upper()) == code
    assert language_code("xx") is language_code("") is None
