"""Keys of config.json of models that take sounds: each has an effect or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from docs.list_models import REFUSED as LISTED
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.registry import model_class
from tests.models.audio.sound_models import ARCHITECTURES, FAMILIES, make_sound_model
from tests.models.config_json.test_every_key import NEUTRAL, mutations

Json = dict[str, Any]
# Keys without effect: other modules read the first two, and training the rest.
EXTRA = {
    *("audio_token_id", "audio_token_index"),
    *("activation_dropout", "encoder_layerdrop"),
    *("max_window_layers", "sliding_window", "use_sliding_window"),
}
# The general keys of transformers in its nested configurations.
GENERAL = {
    f"{part}_config.{key}"
    for part in ("text", "audio")
    for key in ("architectures", "dtype", "is_encoder_decoder")
}
# The names of the encoder's sizes in the other family, with the same meaning.
NAMES = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The config.json of a checkpoint, which tests do not change."""
    path = make_sound_model(tmp_path_factory.mktemp("model"), request.param)
    stated = json.loads((path / "config.json").read_text())
    kind = getattr(transformers, stated["architectures"][0]).config_class
    return {**kind.from_pretrained(path).to_dict(), "architectures": stated["architectures"]}


def read(config: Json) -> ModelConfig:
    return model_class(config["architectures"][0]).read_config(config)


def test_no_key_is_ignored(config: Json) -> None:
    expected = read(config)
    ignored = set[str]()
    for key, changed in mutations(config):
        try:
            if read(changed) == expected:
                ignored.add(key)
        except ValueError:
            continue
    neutral = NEUTRAL | EXTRA | GENERAL
    left = {key for key in ignored if not neutral.intersection((key, *key.split(".")))}
    assert left == set()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_key_has_the_default_of_transformers(architecture: str) -> None:
    """Of a configuration with the defaults in its parts, each key may be left out."""
    defaults = getattr(transformers, architecture).config_class().to_dict()
    config = {**defaults, "architectures": [architecture]}
    expected = read(config)
    assert expected.sound is not None
    assert expected.sound.encoder.num_positions == 1500
    for part in ("text_config", "audio_config"):
        for key in config[part]:
            fewer = {each: value for each, value in config[part].items() if each != key}
            assert read({**config, part: fewer}) == expected, key
        assert read({**config, part: None}) == expected
        assert read({key: config[key] for key in config.keys() - {part}}) == expected


def test_the_names_of_the_other_family_mean_the_same(config: Json) -> None:
    audio = config["audio_config"]
    pairs = {**NAMES, **{theirs: ours for ours, theirs in NAMES.items()}}
    renamed = {pairs.get(key, key): value for key, value in audio.items()}
    assert renamed.keys() != audio.keys()
    assert read({**config, "audio_config": renamed}) == read(config)
    # Files of older versions of transformers have both.
    assert read({**config, "audio_config": {**renamed, **audio}}) == read(config)
    both = {**audio, "d_model": 32, "hidden_size": 64}
    with pytest.raises(ValueError, match=r"d_model=32 and .*hidden_size=64 must be the same"):
        read({**config, "audio_config": both})


def test_the_published_file_of_qwen2_audio() -> None:
    config = read(
        {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 128,
                "encoder_layers": 32,
                "encoder_attention_heads": 20,
                "encoder_ffn_dim": 5120,
                "encoder_layerdrop": 0.0,
                "d_model": 1280,
                "dropout": 0.0,
                "attention_dropout": 0.0,
                "activation_function": "gelu",
                "activation_dropout": 0.0,
                "scale_embedding": False,
                "init_std": 0.02,
                "max_source_positions": 1500,
            },
            "audio_token_index": 151646,
            "ignore_index": -100,
            "model_type": "qwen2_audio",
            "text_config": {
                "bos_token_id": 151643,
                "eos_token_id": 151645,
                "intermediate_size": 11008,
                "max_position_embeddings": 8192,
                "model_type": "qwen2",
                "rms_norm_eps": 1e-05,
                "rope_theta": 10000,
                "sliding_window": 32768,
                "torch_dtype": "bfloat16",
                "use_mrope": False,
                "vocab_size": 156032,
            },
            "torch_dtype": "bfloat16",
            "vocab_size": 156032,
        }
    )
    assert (config.hidden_size, config.num_layers, config.num_kv_heads) == (4096, 32, 32)
    assert (config.vocab_size, config.max_model_len) == (156_032, 8192)
    assert not any(config.sliding_windows)
    assert config.sound is not None
    assert config.sound.encoder.head_dim == 64
    assert not config.sound.has_hidden_layer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type=llama is not supported"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"audio_config": 3}, "audio_config must be an object, got 3"),
        ({"audio_config": {"model_type": "whisper"}}, "audio_config.model_type=whisper is not"),
        ({"audio_config": {"scale_embedding": True}}, "audio_config.scale_embedding=True is not"),
        ({"audio_config": {"num_mel_bins": 0}}, "audio_config.num_mel_bins must be an integer"),
        ({"audio_config": {"max_source_positions": 75}}, "max_source_positions=75 must be even"),
        ({"audio_config": {"activation_function": "tanh"}}, "activation_function='tanh'"),
        (
            {"audio_config": {"encoder_attention_heads": 3, "num_attention_heads": 3}},
            "hidden size 32 must be a multiple of the number of heads, which is 3",
        ),
    ],
)
def test_unsupported_values_are_refused_by_name(config: Json, changes: Json, words: str) -> None:
    changed = dict(config)
    for key, value in changes.items():
        changed[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=words) as error:
        read(changed)
    assert "\n" not in str(error.value)


def test_the_projector_of_audio_flamingo(tmp_path: Path) -> None:
    path = make_sound_model(tmp_path, "audioflamingo3")
    config = json.loads((path / "config.json").read_text())
    sound = read({**config, "projector_bias": False, "projector_hidden_act": "relu"}).sound
    assert sound is not None
    assert (sound.projector_bias, sound.projector_activation) == (False, "relu")
    with pytest.raises(ValueError, match="projector_hidden_act='tanh' is not supported"):
        read({**config, "projector_hidden_act": "tanh"})


def test_what_the_page_lists_is_refused_by_its_key(config: Json) -> None:
    listed = LISTED[config["architectures"][0]]
    assert listed
    for key, value, _, _ in listed:
        outer, _, inner = key.rpartition(".")
        with pytest.raises(ValueError, match=f"{inner}={value} is not supported"):
            read({**config, outer: {**config[outer], inner: value}})
