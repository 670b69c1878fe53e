"""The plan of a model that takes sounds: the spec, memory, rows, identity and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ostinato.commands import run
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.models.decoder import Decoder
from ostinato.models.sharding import Shard, Stage
from ostinato.models.stage_layers import num_bytes
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.plan.identity import compute_identity
from ostinato.runtime.startup.plan.model_source import model_skeleton, open_model
from ostinato.runtime.startup.plan.planning import plan_engine
from ostinato.runtime.startup.served_model import describe_model
from ostinato.runtime.types.engine_info import ServedTask
from tests.models.audio.sound_models import FAMILIES, make_sound_model
from tests.runtime.test_quantize_model import quantise

COMMON = (
    "device.name=cpu", "model.dtype=float32", "cache.memory_gib=0.01", "speculation.method=none",
)  # fmt: skip
NO_SOUNDS = "audio.max_per_request=0"


def plan_of(path: Path, *overrides: str, shard: Shard | None = None) -> EnginePlan:
    values = {"model.path": str(path)}
    config = load_config([*COMMON, *overrides], values=values).engine
    return make_plan(config, 1, shard=shard or Shard())


def tower_bytes(plan: EnginePlan) -> int:
    model = model_skeleton(plan.source)
    assert isinstance(model, Decoder)
    return 0 if model.sound is None else num_bytes(model.sound)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each family's checkpoint, which tests do not change."""
    directory = tmp_path_factory.mktemp("models")
    return {family: make_sound_model(directory / family, family) for family in FAMILIES}


def copy_of(path: Path, target: Path) -> Path:
    shutil.copytree(path, target)
    return target


def test_the_model_is_described_with_its_spec(paths: dict[str, Path]) -> None:
    plan = plan_of(paths["audioflamingo3"])
    model = describe_model(plan, {})
    assert model.sounds is not None
    assert model.sounds == plan.source.sounds
    assert model.sounds.placeholder == "<sound>"
    assert model.media_cache_tokens == 30_000
    assert (model.images, model.audio) == (None, None)
    assert model.tasks == (ServedTask.generate, ServedTask.embed)


def test_rows_for_at_least_two_of_the_longest_sounds(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    assert plan_of(paths["qwen2_audio"]).source.num_media_rows == 16_384
    assert plan_of(paths["audioflamingo3"]).source.num_media_rows == 2 * 20 * 750
    short = make_sound_model(tmp_path, "audioflamingo3", max_seconds=299)
    assert plan_of(short).source.num_media_rows == 16_384
    assert plan_of(short, "audio.cache_tokens=77").source.num_media_rows == 77


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_has_memory_for_the_tower_the_table_and_a_window(
    family: str, paths: dict[str, Path]
) -> None:
    path = paths[family]
    plan, alone = plan_of(path, "audio.cache_tokens=100"), plan_of(path, NO_SOUNDS)
    assert (alone.source.sounds, alone.source.num_media_rows) == (None, 0)
    assert tower_bytes(alone) == 0
    own = tower_bytes(plan) + 101 * 64 * 4
    assert plan.memory.weights_bytes - alone.memory.weights_bytes == own
    assert any(reason.startswith("sounds: ") for reason in plan.memory.reasons)
    assert not any(reason.startswith(("sounds: ", "audio: ")) for reason in alone.memory.reasons)
    # For each of 1500 states: the values of a layer and of the convolutions, and two frames of the
    # spectrogram. For each of 750 embeddings: two means, and three values of the projector.
    states = 1500 * (4 * (9 * 32 + 3 * 48 + 8 * 32 + 8 * 128) + 8 * 128)
    more = plan.memory.activation_bytes - alone.memory.activation_bytes
    assert more == states + 750 * 4 * (2 * 32 + 3 * 64)


def test_the_first_stage_has_the_tower(paths: dict[str, Path]) -> None:
    overrides = ("parallel.pipeline=2", "audio.cache_tokens=100", "graphs.form=layer")
    for number in (0, 1):
        shard = Shard(stage=Stage(number, 2))
        plan = plan_of(paths["qwen2_audio"], *overrides, shard=shard)
        assert plan.source.num_media_rows == 100
        assert (tower_bytes(plan) > 0) == (number == 0)


def test_the_identity_names_what_sounds_depend_on(paths: dict[str, Path], tmp_path: Path) -> None:
    path = paths["audioflamingo3"]
    plain = compute_identity(plan_of(path))
    assert "max_windows=20" in plain["sounds"]
    assert compute_identity(plan_of(path, NO_SOUNDS))["sounds"] == "None"
    other = make_sound_model(tmp_path, "audioflamingo3", activation="relu")
    assert compute_identity(plan_of(other))["model"] != plain["model"]


def test_a_tokenizer_without_the_placeholder_is_refused(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path = copy_of(paths["qwen2_audio"], tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace("<|AUDIO|>", "<|OTHER|>"))
    spec = plan_of(path).source.sounds
    assert spec is not None
    assert spec.placeholder == "<|OTHER|>"
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "audio_token_index": 5}))
    with pytest.raises(StartupError, match=r"no added token has the id 5.*audio.max_per_request=0"):
        plan_of(path)
    assert plan_of(path, NO_SOUNDS).source.sounds is None
    # A tokenizer in another directory gives the texts.
    config.write_text((paths["qwen2_audio"] / "config.json").read_text())
    spec = plan_of(path, f"model.tokenizer={paths['qwen2_audio']}").source.sounds
    assert spec is not None
    assert spec.placeholder == "<|AUDIO|>"


def test_errors_are_those_of_a_start(paths: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(paths["qwen2_audio"], tmp_path / "model")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dither": 0.1}))
    with pytest.raises(StartupError, match=r"preprocessor_config.json: dither=0.1 is not"):
        plan_of(path)
    file.unlink()
    with pytest.raises(StartupError, match=r"no preprocessor_config.json.*takes audio"):
        plan_of(path)


def test_random_weights_without_a_checkpoint_take_none() -> None:
    config = load_config([*COMMON, "model=qwen2-audio-7b", "model.load_format=dummy"]).engine
    source = open_model(config, torch.device("cuda"))
    assert source.config.sound is not None
    assert (source.sounds, source.num_media_rows) == (None, 0)


def test_what_models_with_sounds_do_not_have(paths: dict[str, Path], tmp_path: Path) -> None:
    path = paths["qwen2_audio"]
    with pytest.raises(StartupError, match=r"lora\.max_adapters=1, but .* takes audio"):
        plan_of(path, "lora.max_adapters=1")
    drafts = ("speculation.method=draft", f"speculation.model={path}")
    with pytest.raises(StartupError, match=r"takes audio, and a draft model hears none"):
        plan_of(path, *drafts)
    with pytest.raises(StartupError, match="models that take audio are not quantised"):
        quantise(f"model.path={path}", f"quantize.output={tmp_path / 'new'}")


def test_run_plan_names_the_memory_of_sounds(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", f"model.path={paths['audioflamingo3']}", "plan.free_gib=2", "device.name=cuda"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "architecture  AudioFlamingo3ForConditionalGeneration" in text
    assert "- sounds: " in text


@pytest.mark.parametrize(
    ("preset", "what", "without"),
    [
        ("qwen2-audio-7b", "sounds", NO_SOUNDS),
        ("qwen2.5-vl-3b", "images", "images.max_per_request=0"),
        ("qwen3-0.6b", "", NO_SOUNDS),
    ],
)
def test_a_preset_without_files_says_what_is_not_counted(
    preset: str, what: str, without: str
) -> None:
    def notes(*overrides: str) -> list[str]:
        words = [*COMMON, f"model={preset}", "cache.memory_gib=1", *overrides]
        config = load_config(["model.load_format=dummy", *words]).engine
        source = open_model(config, torch.device("cuda"))
        reasons = plan_engine(config, source, free_bytes=80 << 30).reasons
        return [reason for reason in reasons if "not counted" in reason]

    note = (
        f"{what}: not counted and not taken, because the files of the processor are missing; set "
        "model.path to a directory that has them"
    )
    assert notes() == ([note] if what else [])
    assert notes(without) == []


def test_models_with_their_files_have_no_note(paths: dict[str, Path]) -> None:
    for overrides in ((), (NO_SOUNDS,)):
        reasons = plan_of(paths["qwen2_audio"], *overrides).memory.reasons
        assert not any("not counted" in reason for reason in reasons)


def test_the_setting_of_a_table_that_does_not_fit_is_named(paths: dict[str, Path]) -> None:
    for key in ("audio.cache_tokens", "images.cache_tokens"):
        with pytest.raises(ConfigError, match=rf"{key}.*10000000"):
            load_config([*COMMON, f"{key}=99999999999"])
    words = ("audio.cache_tokens=10000000", "device.memory_gib=1")
    with pytest.raises(StartupError, match=r"lower audio\.cache_tokens, whose table is 2\.38 GiB"):
        plan_of(paths["qwen2_audio"], *words)
