"""The flags of `vllm serve` on the command line of `run serve`."""

from pathlib import Path

import pytest

from ostinato.api.cli.engine_flags import read_flags
from ostinato.commands import run
from ostinato.conf.arguments.engine_arguments import ARGUMENTS
from ostinato.conf.errors import ConfigError

OWN = {"--cfg": 1, "--help": 0}


def test_flags_are_settings_and_the_rest_stays_in_order():
    flags = read_flags(
        [
            *("some/model", "--max-model-len", "4096", "--dtype=bfloat16", "cache.block_size=32"),
            *("--cfg", "job", "--enforce-eager", "--no-enable-prefix-caching", "--port", "9000"),
            *("--api-key", "k1", "k2", "--max_num_seqs", "8", "-tp", "2", "-pp", "3"),
            "--help",
        ],
        OWN,
    )
    assert flags.settings == {
        "model.max_model_len": "4096",
        "model.dtype": "bfloat16",
        "graphs.mode": "eager",
        "cache.enable_prefix_caching": False,
        "server.port": "9000",
        "server.api_keys": ["k1", "k2"],
        "scheduler.max_num_seqs": "8",
        "parallel.tensor": "2",
        "parallel.pipeline": "3",
    }
    assert flags.rest == ["some/model", "cache.block_size=32", "--cfg", "job", "--help"]
    line = flags.explain()
    assert "--max-model-len 4096 is model.max_model_len=4096" in line
    assert "--no-enable-prefix-caching is cache.enable_prefix_caching=false" in line
    assert "--api-key ... is server.api_keys=..." in line
    assert "k1" not in line


def test_adapters_are_pairs_like_overrides():
    """A word NAME=PATH after --lora-modules is an adapter, unless it is an override."""
    words = [
        "m",
        "--enable-lora",
        "--lora-modules",
        "sql=/a/b",
        "chat=c=d",
        '{"name":"x","path":"y"}',
    ]
    words += ["model=gpt2", "--max-loras", "2", "--lora-dtype=half", "--dtype", "float16"]
    flags = read_flags(words, OWN)
    assert flags.settings == {
        "lora.adapters": {"sql": "/a/b", "chat": "c=d", "x": "y"},
        "lora.max_adapters": 3,
        "model.dtype": "float16",
    }
    assert flags.rest == ["m", "model=gpt2"]
    assert "--enable-lora --max-loras 2 is lora.max_adapters=3" in flags.explain()
    rest = read_flags(["--lora-modules", "a=/b", "lora.max_rank=8", "c=d"], OWN).rest
    assert rest == ["lora.max_rank=8", "c=d"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modellen", "3"], "--max-modellen: there is no such argument; did you mean --max-"),
        (["--itl-target", "3"], "did you mean scheduler.itl_target_ms=...?"),
        (["--port"], "--port needs a value"),
        (["--api-key", "--port", "1"], "--api-key needs a value"),
        (["--enforce-eager=1"], "--enforce-eager=1: this flag takes no value"),
        (
            ["--enable-expert-parallel"],
            "experts are divided by tensor_parallel_size like all other",
        ),
        (["--enable-lora-bias"], "enable_lora_bias=True: adapters with biases are not served"),
        (["--lora-target-modules", "q_proj", "k_proj"], "all modules that an adapter names are"),
        (["--lora-dtype", "float16"], "adapters have the model's type; leave it out, or set dtype"),
        (["--lora-modules"], "--lora-modules needs a value"),
        (["--lora-modules", "lora.max_rank=8"], "--lora-modules needs a value"),
        (["--lora-modules", "sql"], "an adapter is written name=path or"),
        (["--no-enable-lora", "--lora-modules", "a=/b"], "but enable_lora is false"),
        (
            ["--max-loras", "2", "--enable-lora", "lora.max_adapters=4"],
            "--max-loras 2 --enable-lora and lora.max_adapters=4 set the same key",
        ),
        (
            ["--kv-offloading-size", "4", "cache.host_gib=2"],
            "--kv-offloading-size 4 and cache.host_gib=2 set the same key",
        ),
        (
            ["--kv-offloading-backend", "lmcache"],
            "kv_offloading_backend=lmcache: this engine copies",
        ),
        (["--kv-transfer-config.kv_connector", "X"], "it must be a JSON object"),
        (["-O3"], "compilation_config=3: set graphs.mode"),
        (["--no-dtype"], "--no-dtype: there is no such argument"),
        (["--port", "1", "server.port=2"], "--port 1 and server.port=2 set the same key"),
    ],
)
def test_flags_that_are_refused(words: list[str], message: str):
    with pytest.raises(ConfigError) as error:
        read_flags(words, OWN)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_can_be_written_as_a_flag(name: str):
    argument = ARGUMENTS[name]
    flag = f"--{name.replace('_', '-')}"
    for value in argument.default:
        if argument.is_flag:
            negative = f"--no-{name.replace('_', '-')}"
            assert read_flags([flag if value else negative], OWN).settings == {}
        elif value != "":
            assert read_flags([f"{flag}={value}"], OWN).settings == {}


def test_the_command_takes_a_model_and_flags(capsys: pytest.CaptureFixture[str]):
    words = ["some/dir", "--gpu-memory-utilization", "0.8", "--served-model-name", "x"]
    assert run(["serve", *words, "--cfg", "job"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "run serve: --gpu-memory-utilization 0.8 is device.memory_fraction=0.8, "
        "--served-model-name x is model.name=x\n"
    )
    assert "  path: some/dir\n  name: x\n" in captured.out
    assert "  memory_fraction: 0.8\n" in captured.out


def test_a_model_may_be_one_of_our_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert run(["serve", "gpt2", "--cfg", "job"]) == 0
    assert "  path: openai-community/gpt2\n" in capsys.readouterr().out
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(["serve", "gpt2", "--cfg", "job"]) == 0
    assert "  path: gpt2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["a", "b"], "run: run serve serves one model, got a and b"),
        (["a", "model=gpt2"], "run: run serve serves one model, got a and model=gpt2"),
        (["a", "--model", "b"], "run: run serve serves one model, got a and --model"),
        (["--block-size", "17"], "run: cache.block_size must be one of 8, 16, 32, 64, 128, got 17"),
    ],
)
def test_a_wrong_line_ends_with_code_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    assert run(["serve", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == line
