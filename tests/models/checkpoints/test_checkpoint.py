"""Finding a checkpoint: directories, the bundled demo, inline configuration, and errors of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.conf.schema import LoadFormat, ModelSection
from ostinato.models.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    resolve_path,
)
from ostinato.models.registry import read_model_config
from tests.confinement import without_privileges


def write(directory: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)
    return directory


def refusal(section: ModelSection) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(section)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_settings_are_laid_over_the_config(tmp_path: Path) -> None:
    files = {
        "config.json": {"vocab_size": 5, "hidden_size": 8, "rope_parameters": {"a": 1, "b": 2}},
        "generation_config.json": {"eos_token_id": [1, 2]},
    }
    write(tmp_path, files)
    changes = {"hidden_size": 16, "rope_parameters": {"b": 3}}
    checkpoint = open_checkpoint(ModelSection(path=str(tmp_path), config=changes))
    assert checkpoint == Checkpoint(
        path=tmp_path,
        hf_config={"vocab_size": 5, "hidden_size": 16, "rope_parameters": {"a": 1, "b": 3}},
        generation_config={"eos_token_id": [1, 2]},
    )


def test_dummy_with_inline_config_reads_nothing() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 7}
    checkpoint = open_checkpoint(ModelSection(load_format=LoadFormat.dummy, config=config))
    assert checkpoint == Checkpoint(path=None, hf_config=config, generation_config={})
    with pytest.raises(CheckpointError, match=r"model\.path is empty"):
        checkpoint.weight_files()


def test_no_such_directory() -> None:
    assert refusal(ModelSection(path="/no/such/place")) == (
        "model.path='/no/such/place': no such directory"
    )


def test_messages_name_the_setting() -> None:
    with pytest.raises(CheckpointError, match=r"^model\.tokenizer='/no/such': no such directory$"):
        resolve_path("/no/such", key="model.tokenizer")


def test_empty_path_is_the_bundled_demo() -> None:
    assert resolve_path("").parts[-2:] == ("models", "demo")


def test_path_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("x")
    assert "is not a GGUF file" in refusal(ModelSection(path=str(file)))


def test_no_config(tmp_path: Path) -> None:
    assert refusal(ModelSection(path=str(tmp_path))) == (
        f"no config.json and no GGUF file in {tmp_path}: model.path must be a model's directory "
        "or a GGUF file"
    )


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1'])
def test_invalid_config(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"config.json": text})
    assert str(tmp_path / "config.json") in refusal(ModelSection(path=str(tmp_path)))


def test_unreachable_hub(tmp_path: Path) -> None:
    """If the hub refuses connections, the error is one clear line."""
    code = (
        "from ostinato.conf.schema import ModelSection\n"
        "from ostinato.models.checkpoints.checkpoint import CheckpointError, open_checkpoint\n"
        "try:\n"
        "    open_checkpoint(ModelSection(path='someone/some-model', revision='v2'))\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert len(result.stdout.splitlines()) == 1
    assert result.stdout.startswith(
        "model.path='someone/some-model': no such directory, and the hub did not give it"
        " at revision 'v2': ConnectError: "
    )
    assert result.stdout.endswith(
        "; check the connection to the hub, or give the path of a local directory\n"
    )


def test_weight_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint(path=tmp_path, hf_config={}, generation_config={})
    with pytest.raises(CheckpointError, match=r"no weights in .*load_format=dummy"):
        checkpoint.weight_files()
    write(tmp_path, {"pytorch_model.bin": ""})
    assert checkpoint.weight_files() == [tmp_path / "pytorch_model.bin"]
    write(tmp_path, {"model.safetensors": ""})
    assert checkpoint.weight_files() == [tmp_path / "model.safetensors"]
    weight_map = {"b": "two.safetensors", "a": "one.safetensors", "c": "two.safetensors"}
    write(tmp_path, {"model.safetensors.index.json": {"weight_map": weight_map}})
    write(tmp_path, {"one.safetensors": ""})
    with pytest.raises(
        CheckpointError, match=r"names the shard two\.safetensors, which is missing"
    ):
        checkpoint.weight_files()
    write(tmp_path, {"two.safetensors": ""})
    assert [file.name for file in checkpoint.weight_files()] == [
        "one.safetensors",
        "two.safetensors",
    ]
    write(tmp_path, {"model.safetensors.index.json": {"weight_map": {}}})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        checkpoint.weight_files()


def test_unknown_architecture_is_named_before_its_other_keys(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": {"architectures": ["MambaForCausalLM"], "d_model": 4}})
    checkpoint = open_checkpoint(ModelSection(path=str(tmp_path)))
    with pytest.raises(
        ValueError, match=r"'MambaForCausalLM' is not supported: .* has no model_type='None'"
    ):
        read_model_config(checkpoint)


def test_files_without_permission_are_named(tmp_path: Path) -> None:
    """The process runs as a user that permissions restrict; root may read every file."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    code = (
        "import os, sys\n"
        "from ostinato.conf.schema import ModelSection\n"
        "from ostinato.models.checkpoints.checkpoint import CheckpointError, open_checkpoint\n"
        "for name in ('config.json', 'generation_config.json', 'model.safetensors', '.'):\n"
        "    file = os.path.normpath(os.path.join(sys.argv[1], name))\n"
        "    os.chmod(file, 0)\n"
        "    try:\n"
        "        open_checkpoint(ModelSection(path=sys.argv[1])).weight_files()\n"
        "    except CheckpointError as error:\n"
        "        print(error)\n"
        "    os.chmod(file, 0o700)\n"
    )
    command = [*without_privileges(), sys.executable, "-c", code, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    reason = (
        f"cannot be read: Permission denied for user id {os.geteuid()}; change the permissions, or "
        "run as the owner of the files"
    )
    assert done.stdout.splitlines() == [
        f"{directory}/config.json {reason}",
        f"{directory}/generation_config.json {reason}",
        f"{directory}/model.safetensors {reason}",
        f"model.path='{directory}' {reason}",
    ]
