"""Overrides become a frozen configuration, or one clear line of error."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from ostinato.conf.compose import compose_yaml, group_options, load_config
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.schema import DType, GraphMode, LoadFormat

CONF = Path(__file__).resolve().parents[2] / "conf"


def test_no_overrides_give_the_schemas_defaults():
    assert load_config() == RunConfig()


def test_overrides_change_what_they_name():
    config = load_config(
        [
            "model.path=/some/dir",
            "model.dtype=bfloat16",
            "cache.block_size=32",
            "device.threads=3",
            "graphs.mode=eager",
            "graphs.capture_sizes=[1,2,4]",
            "generate.stop=['a b','c']",
        ]
    )
    assert config.model.path == "/some/dir"
    assert config.model.dtype is DType.bfloat16
    assert config.cache.block_size == 32
    assert config.device.threads == 3
    assert config.graphs.mode is GraphMode.eager
    assert config.graphs.capture_sizes == [1, 2, 4]
    assert config.generate.stop == ["a b", "c"]


def test_options_are_the_files_of_the_tree():
    files = {
        group.name: sorted(file.stem for file in group.glob("*.yaml"))
        for group in CONF.iterdir()
        if group.is_dir() and list(group.glob("*.yaml"))
    }
    assert group_options() == files


# test_model_options.py composes the models.
OPTIONS = [file for file in sorted(CONF.glob("*/*.yaml")) if file.parent.name != "model"]


@pytest.mark.parametrize("file", OPTIONS, ids=lambda file: file.stem)
def test_every_option_composes(file: Path):
    config = load_config([f"{file.parent.name}={file.stem}"])
    assert isinstance(config, RunConfig)


def test_model_option_brings_its_config():
    section = load_config(["model=qwen3-0.6b", "model.load_format=dummy"]).model
    assert section.path == "Qwen/Qwen3-0.6B"
    assert section.load_format is LoadFormat.dummy
    assert section.config["architectures"] == ["Qwen3ForCausalLM"]
    assert section.config["rope_theta"] == 1_000_000.0


def test_model_config_takes_new_keys_without_ceremony():
    section = load_config(
        ["model=gpt2", "model.config.n_layer=2", "model.config.rope_parameters.rope_theta=5.0"]
    ).model
    assert section.config["n_layer"] == 2
    assert section.config["rope_parameters"] == {"rope_theta": 5.0}
    assert section.config["n_head"] == 12


def test_mappings_take_new_keys_one_by_one_and_all_at_once():
    lora = load_config(["lora.adapters.sql=/a", "lora.adapters.chat=org/b"]).lora
    assert lora.adapters == {"sql": "/a", "chat": "org/b"}
    config = load_config(["lora.adapters={org/v1.5:/a-b/c_d, sql: 'e f'}", "load.headers={A: b}"])
    assert config.lora.adapters == {"org/v1.5": "/a-b/c_d", "sql": "e f"}
    assert config.load.headers == {"A": "b"}
    for value in ("{sql:[1]}", "{sql:null}", "{sql:{a:b}}", "5"):
        with pytest.raises(ConfigError, match=r"lora\.adapters must be a mapping such as"):
            load_config([f"lora.adapters={value}"])


def test_home_is_expanded():
    assert load_config(["model.path=~/models/x"]).model.path == str(Path.home() / "models/x")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cache.blocksize=32",
            "cache.blocksize=32: there is no key 'cache.blocksize'; did you mean cache.block_size?",
        ),
        ("modle=demo", "modle=demo: there is no key 'modle'; did you mean model?"),
        ("port=1", "port=1: there is no key 'port'; did you mean server.port?"),
        ("+zzz=1", "+zzz=1: there is no key 'zzz'; run <command> --help lists the keys"),
        ("cache.block_size=17", "cache.block_size must be one of 8, 16, 32, 64, 128, got 17"),
        ("cache.block_size=big", "cache.block_size must be one of 8, 16, 32, 64, 128, got 'big'"),
        ("cache.block_size=null", "cache.block_size must be one of 8, 16, 32, 64, 128, got None"),
        ("server.port=1.5", "server.port must be an integer in [0, 65535], got 1.5"),
        ("device.threads=x", "device.threads must be null or an integer in [1, 1024], got 'x'"),
        ("graphs.mode=fast", "graphs.mode must be one of eager, compiled, captured, got 'fast'"),
        (
            "cache.enable_prefix_caching=3.5",
            "cache.enable_prefix_caching must be true or false, got 3.5",
        ),
        ("scheduler={a: 1}", "there is no key 'scheduler.a'; did you mean scheduler.overlap?"),
        (
            "scheduler=3",
            "scheduler is a section and must be a mapping or have its keys set one by one "
            "(scheduler.max_num_seqs=...), got 3",
        ),
        (
            "cache.block_size=8,16",
            "cache.block_size=8,16: one value only; quote it to have commas in text, or write a list "
            "as [a,b]",
        ),
        (
            "cache.block_size",
            "'cache.block_size' is not an override; write key=value, and quote a value with special "
            "characters: \"key='a,b'\"",
        ),
        (
            "~cache.block_size",
            "~cache.block_size: cache.block_size cannot be deleted; set it to its default instead",
        ),
        (
            "hydra.verbose=true",
            "hydra.verbose=true: packages and Hydra's own settings are not used here",
        ),
        ("model@x=demo", "model@x=demo: packages and Hydra's own settings are not used here"),
        ("model.path=${nowhere}", "model.path: Interpolation key 'nowhere' not found"),
    ],
)
def test_a_bad_override_is_one_line(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert str(caught.value) == message


def test_unknown_option_lists_the_known_ones_and_the_other_way():
    with pytest.raises(ConfigError) as caught:
        load_config(["model=lama-45m"])
    text = str(caught.value)
    options = ", ".join(group_options()["model"])
    assert text.startswith(f"model=lama-45m: model must be one of {options} ")
    assert "(did you mean llama-45m?)" in text
    assert text.endswith("; another model is given by its path: model.path=lama-45m")


def test_values_need_no_quoting():
    config = load_config(
        ["cache.block_size=8"],
        values={
            "model": "gpt2",
            "model.path": "/a,b=c ${d}".replace("${d}", "'d'"),
            "cache": {"block_size": 64, "memory_gib": 1},
            "model.config": {"n_layer": 1},
        },
    )
    assert config.model.path == "/a,b=c 'd'"
    assert config.model.config["n_layer"] == 1
    assert config.model.config["n_embd"] == 768
    assert config.cache.block_size == 64
    assert config.cache.memory_gib == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"cache.blocksize": 1},
            "there is no key 'cache.blocksize'; did you mean cache.block_size?",
        ),
        ({"cache": {"block_size": 9}}, "cache.block_size must be one of 8, 16, 32, 64, 128, got 9"),
        (
            {"model.dtype": "int4"},
            "model.dtype must be one of auto, float32, bfloat16, float16, got 'int4'",
        ),
    ],
)
def test_bad_values_are_refused_the_same_way(values: dict[str, object], message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(values=values)
    assert str(caught.value) == message


def test_options_from_another_directory(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: /my/model\nmax_model_len: 99\n")
    (tmp_path / "model" / "broken.yaml").write_text("pth: /my/model\n")
    config = load_config(["model=mine"], config_dir=str(tmp_path))
    assert (config.model.path, config.model.max_model_len) == ("/my/model", 99)
    with pytest.raises(ConfigError, match="'pth'"):
        load_config(["model=broken"], config_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="--config-dir must be a directory"):
        load_config(config_dir=str(tmp_path / "absent"))


def test_yaml_is_complete_and_resolved():
    text = compose_yaml(["server.port=9000", "model.name=${server.host}"])
    assert "port: 9000\n" in text
    assert "name: 127.0.0.1\n" in text
    assert "mode: captured\n" in text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=qwen3-0.6b", "cache.block_size=8", "++model.config.hidden_size=64"],
        ["cache.block_size=8", "speculation=ngram", "model=gpt2", "model.dtype=bfloat16"],
        ["++model.config.a={b: 1}", "+model.config.c=[2,3]", "~model.config.a"],
        ["model=qwen3-0.6b", "~model.config.rope_theta", "model.name=${server.host}"],
        ["bench=serve", "workload=fixed", "tuned=demo-long-prompts", "server={port:9000}"],
        ["cache.block_size=32", "cache.block_size=64", "generate.stop=['a,b',c]"],
    ],
    ids=" ".join,
)
def test_the_tree_is_the_one_that_hydra_composes(overrides: list[str]):
    """`load_config` composes options once and lays other overrides over a copy."""
    first = compose_yaml(overrides)
    compose_yaml([*overrides, "model.config.z=1", "device.threads=7", "generate.stop=[q]"])
    assert compose_yaml(overrides) == first
    with initialize_config_module("ostinato.conf", version_base="1.3"):
        assert OmegaConf.to_yaml(compose("config", overrides), resolve=True) == first


def test_a_program_with_its_own_hydra_keeps_it():
    with initialize_config_module("ostinato.conf", version_base="1.3"):
        mine = GlobalHydra.instance().hydra
        load_config(["cache.block_size=8"])
        assert GlobalHydra.instance().hydra is mine
        assert compose("config").cache.block_size == 16
    assert not GlobalHydra.instance().is_initialized()
