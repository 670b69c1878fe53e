"""What models with recurrent layers do not support is refused by name at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.conf.arguments.engine_arguments import argument_settings
from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.command_schema import QuantizeSection
from ostinato.conf.sections.speculation_schema import SpeculationMethod
from ostinato.models.sharding import shard_of_rank
from ostinato.runtime.errors import StartupError
from ostinato.runtime.quantize_model import quantize_model
from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.startup.plan.model_source import open_model
from tests.runtime.hybrid import hybrid_config, lfm2
from tests.runtime.speculation.eagle_reference import write_head
from tests.runtime.tiny import VOCAB_SIZE, tiny_config


def config_of(*words: str) -> EngineConfig:
    return hybrid_config("device.name=cpu", *words).engine


def directory_of(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(lfm2()))
    return directory


@pytest.mark.parametrize("method", ["eagle3", "auto"])
def test_a_head(tmp_path: Path, method: str) -> None:
    write_head(
        tmp_path,
        lfm2(),
        draft_vocab_size=VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=[0, 1],
    )
    words = (f"speculation.method={method}", f"speculation.model={tmp_path}")
    with pytest.raises(StartupError, match=r"cannot be the head: Lfm2ForCausalLM has recurrent"):
        make_plan(config_of(*words), 1)


def test_a_next_token_layer() -> None:
    with pytest.raises(StartupError, match=r"speculation\.method=mtp: .*Lfm2ForCausalLM"):
        make_plan(config_of("speculation.method=mtp"), 1)


@pytest.mark.parametrize("words", [(), ("speculation.method=auto",), ("speculation.method=none",)])
def test_drafts_by_default_are_those_of_other_models(words: tuple[str, ...]) -> None:
    budget = "graphs.cost_table_budget_s=1"  # drafts need measured costs
    plan = make_plan(config_of(*words, budget), 1)
    other = make_plan(tiny_config("device.name=cpu", *words, budget).engine, 1)
    expected = "none" if "speculation.method=none" in words else "auto"
    assert plan.config.speculation.method is SpeculationMethod(expected)
    assert other.config.speculation.method is SpeculationMethod(expected)
    assert (plan.source.limits.rows_per_seq == 1) == (expected == "none")


def test_it_cannot_be_a_draft_model(tmp_path: Path) -> None:
    path = directory_of(tmp_path / "draft")
    words = ("speculation.method=draft", f"speculation.model={path}", "device.name=cpu")
    with pytest.raises(StartupError, match=r"cannot be the draft model: Lfm2.*recurrent layers"):
        make_plan(tiny_config(*words).engine, 1)


@pytest.mark.parametrize("words", ["cache.disk_dir=/nowhere", "cache.host_gib=1"])
def test_copies_of_blocks(words: str) -> None:
    with pytest.raises(StartupError) as error:
        make_plan(config_of(words), 1)
    assert str(error.value) == (
        f"{words} copies KV blocks, and Lfm2ForCausalLM has recurrent layers, whose states are "
        "not copied; leave it out"
    )


def test_adapters() -> None:
    with pytest.raises(StartupError, match=r"lora\.max_adapters=2, but .* has recurrent layers"):
        open_model(config_of("lora.max_adapters=2"))
    with pytest.raises(StartupError, match=r"lora\.adapters=\{one: some/dir\}, but .* recurrent"):
        open_model(config_of("lora.adapters={one: some/dir}"))


def test_quantising_a_checkpoint(tmp_path: Path) -> None:
    config = config_of("model.load_format=dummy")
    section = QuantizeSection(output=str(tmp_path / "new"))
    with pytest.raises(StartupError, match=r"recurrent layers are not quantised.*model\.quantiz"):
        quantize_model(config, section, lambda done, total: None)


def test_compiling_for_a_gpu_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ostinato.commands import run

    words = ["compile.gpu=h200", "model.load_format=dummy", f"graphs.bundle_dir={tmp_path}/bundles"]
    assert run(["compile", f"model.path={directory_of(tmp_path / 'model')}", *words]) != 0
    error = " ".join(capsys.readouterr().err.split())
    assert "compile.gpu compiles models whose layers all have attention" in error
    assert "compile on a machine with the GPU" in error


def test_a_number_of_ranks_that_divides_no_channels() -> None:
    # 64 channels, 4 heads of queries and 2 of keys
    with pytest.raises(StartupError, match=r"parallel\.tensor=3: .*"):
        make_plan(config_of("parallel.tensor=3"), 1, shard=shard_of_rank(0, 3, 1))
    plan = make_plan(config_of("parallel.tensor=2"), 1, shard=shard_of_rank(0, 2, 1))
    assert plan.memory.bytes_per_state == 3 * 2 * 32 * 4


def test_slots_of_a_model_without_recurrent_layers() -> None:
    with pytest.raises(StartupError, match=r"cache\.state_slots=9 is for models with recurrent"):
        make_plan(tiny_config("cache.state_slots=9").engine, 1)
    with pytest.raises(ConfigError, match=r"cache\.state_slots"):
        tiny_config("cache.state_slots=1")


@pytest.mark.parametrize(
    ("argument", "accepted", "refused", "reason"),
    [
        ("mamba_ssm_cache_dtype", ("auto", "float32"), "float16", "are float32; leave it out"),
        ("mamba_cache_dtype", ("auto",), "float32", "have the dtype of the model; leave it out"),
        ("mamba_cache_mode", ("align",), "all", "where prompts branch; leave it out"),
        ("mamba_block_size", (), "128", "multiples of cache.block_size; leave it out"),
    ],
)
def test_arguments_of_vllm(
    argument: str, accepted: tuple[str, ...], refused: str, reason: str
) -> None:
    for value in accepted:
        assert argument_settings({argument: value}) == {}
    with pytest.raises(ConfigError, match=f"{argument}={refused}: .*{reason}"):
        argument_settings({argument: refused})
