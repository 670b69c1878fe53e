"""The command line: its messages, exit codes, help, completion and prompts.

A few tests start processes.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from ostinato.api.cli.main import _BENCH_PACKAGES
from ostinato.commands import COMMANDS, run
from ostinato.conf.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parents[3]


def invoke(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ostinato", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serv"], "run: there is no command 'serv'; did you mean run serve?"),
        (
            ["xyzzy"],
            "run: there is no command 'xyzzy'; commands: serve, generate, chat, batch, bench, simulate, tune, compile, plan, rank, quantize",
        ),
        (
            ["serve", "server.prt=1"],
            "run: server.prt=1: there is no key 'server.prt'; did you mean server.port?",
        ),
        (["serve", "server.port=70000"], "run: server.port must be in [0, 65535], got 70000"),
        (
            ["plan", "hello"],
            "run: 'hello' is not an override; write key=value, and quote a value with special characters: "
            "\"key='a,b'\"",
        ),
        (
            ["plan", "--cfg", "all"],
            "run: argument -c/--cfg: invalid choice: 'all' (choose from 'job'); see run plan --help",
        ),
        (
            ["plan", "--nonsense"],
            "run: unrecognized arguments: --nonsense; see run plan --help",
        ),
        (["plan", "--", "x"], "run: run plan takes no words after --, got -- x"),
        (
            ["generate"],
            'run: run generate takes one prompt, got 0: run generate "Once upon a time" [key=value ...]; '
            "give - to read the prompt from standard input",
        ),
        (
            ["generate", "one", "two"],
            'run: run generate takes one prompt, got 2: run generate "Once upon a time" [key=value ...]; '
            "give - to read the prompt from standard input",
        ),
        (
            ["generate", "hello", "generate.max_tokns=3"],
            "run: generate.max_tokns=3: there is no key 'generate.max_tokns'; did you mean "
            "generate.max_tokens?",
        ),
        (
            ["-sc", "install=tcsh"],
            "run: shell completion is for bash, fish, zsh, got 'tcsh'",
        ),
        (
            ["-sc", "remove=bash"],
            "run: shell completion can install, uninstall or query, got 'remove'",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == line + "\n"
    assert captured.out == ""


def test_a_real_process_exits_with_code_2():
    done = invoke("serve", "cache.block_size=17")
    assert done.returncode == 2
    assert done.stderr == "run: cache.block_size must be one of 8, 16, 32, 64, 128, got 17\n"
    assert done.stdout == ""


def test_a_model_that_is_not_there_is_one_line_and_code_1():
    done = invoke("plan", "model.path=/no/such/dir")
    assert done.returncode == 1
    assert done.stderr == "run: model.path='/no/such/dir': no such directory\n"


def test_overview_lists_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(["--help"]) == 0
        text = capsys.readouterr().out
        for name, command in COMMANDS.items():
            summary = r"\s+".join(map(re.escape, command.summary.split()))
            assert re.search(rf"^  {name} +{summary}$", text, re.MULTILINE)
        assert max(map(len, text.splitlines())) <= columns


def test_no_command_shows_the_overview_and_code_2(capsys: pytest.CaptureFixture[str]):
    assert run([]) == 2
    assert "usage: run <command>" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_keys_defaults_and_ranges(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    assert run([name, "--help"]) == 0
    text = capsys.readouterr().out
    for example in COMMANDS[name].examples:
        assert f"  {example}" in text.splitlines()
    assert max(map(len, text.splitlines())) <= 100
    if not COMMANDS[name].sections:
        return
    if name == "quantize":  # the command starts no engine
        assert "quantize.group_size=128 " in text
    else:
        assert "cache.block_size=16 " in text
        assert "(one of 8, 16, 32, 64, 128)" in text
        assert "speculation.max_tokens=7 " in text
        assert "runtime.determinism=auto " in text
    assert "qwen3-0.6b" in text


def test_help_of_serve_has_every_section_of_an_engine():
    assert {field.name for field in fields(EngineConfig)} <= {*COMMANDS["serve"].sections}


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_help_are_legal(name: str, capsys: pytest.CaptureFixture[str]):
    for example in COMMANDS[name].examples:
        words = shlex.split(example.partition(" < ")[0])
        assert words[:2] == ["run", name]
        assert run([*words[1:], "--cfg", "job"]) == 0
        # Standard error names flags of vLLM with their overrides, and nothing else.
        said = capsys.readouterr().err.splitlines()
        assert [line for line in said if not line.startswith(f"run {name}: --")] == []
        assert bool(said) == any(word.startswith("--max-") for word in words)


def test_cfg_job_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]):
    assert run(["serve", "--cfg", "job", "model=gpt2", "server.port=9000"]) == 0
    text = capsys.readouterr().out
    assert "  path: openai-community/gpt2\n" in text
    assert "  port: 9000\n" in text


def test_cfg_job_refuses_what_the_command_would_refuse(capsys: pytest.CaptureFixture[str]):
    assert run(["serve", "--cfg", "job", "server.port=-1"]) == 2
    assert "server.port must be in [0, 65535], got -1" in capsys.readouterr().err


def test_a_flag_stands_for_an_override(capsys: pytest.CaptureFixture[str]):
    assert run(["simulate", "--validate", "load.rates=[1]", "--cfg", "job"]) == 0
    assert "  validate: true\n" in capsys.readouterr().out
    assert run(["serve", "--validate"]) == 2


def test_config_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: /my/model\n")
    assert run(["serve", f"--config-dir={tmp_path}", "model=mine", "--cfg=job"]) == 0
    assert "path: /my/model\n" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]):
    from ostinato import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ostinato {__version__}\n"


@pytest.mark.parametrize(
    ("line", "separator", "expected"),
    [
        (
            "run ",
            " ",
            [
                "serve",
                "generate",
                "chat",
                "batch",
                "bench",
                "simulate",
                "tune",
                "compile",
                "plan",
                "rank",
                "quantize",
            ],
        ),
        ("run s", " ", ["serve", "simulate"]),
        ("run serve server.po", " ", ["server.port="]),
        (
            "run serve graphs.mode=",
            " ",
            ["graphs.mode=eager", "graphs.mode=compiled", "graphs.mode=captured"],
        ),
        ("run plan model=qwen3-0", " ", ["model=qwen3-0.6b"]),
        ("run plan cache.block_size=8 model=llama-8", "\n", ["model=llama-8b"]),
    ],
)
def test_shell_completion(
    line: str,
    separator: str,
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert run(["-sc", f"query={'bash' if separator == ' ' else 'fish'}"]) == 0
    assert capsys.readouterr().out.rstrip("\n").split(separator) == expected


def test_completion_offers_no_setting_that_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COMP_LINE", "run serve ")
    assert run(["-sc", "query=bash"]) == 0
    words = capsys.readouterr().out.split()
    assert {"model=", "cache.", "server."} <= set(words)
    assert not [word for word in words if word.startswith("hydra")]


def test_installed_completion_works_in_bash():
    script = (
        'export PATH="$1:$PATH"; eval "$(run -sc install=bash)"; '
        'COMP_LINE="run plan model=gpt2"; COMP_POINT=${#COMP_LINE}; COMP_CWORD=2; '
        'hydra_bash_completion; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", str(Path(sys.executable).parent)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "model=gpt2\n", done.stderr


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        (["What is E=mc2?"], "What is E=mc2?"),
        (["x = 1"], "x = 1"),
        (["model=gpt2", "hello"], "hello"),
        (["hello", "generate.max_tokens=3"], "hello"),
        (["--", "model=gpt2", "is", "text"], "model=gpt2 is text"),
        (["-"], "-"),
    ],
)
def test_the_prompt_is_found_among_overrides(
    words: list[str], prompt: str, monkeypatch: pytest.MonkeyPatch
):
    received: list[str] = []

    def generate(config: object, text: str) -> int:
        received.append(text)
        return 0

    monkeypatch.setattr("ostinato.api.cli.generate_command.generate", generate)
    assert run(["generate", *words]) == 0
    assert received == [prompt]


def test_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(config: object, text: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ostinato.api.cli.generate_command.generate", interrupted)
    assert run(["generate", "hello"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_is_quiet():
    script = f"{sys.executable} -m ostinato plan --help | head -n 1"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "usage: run plan [key=value ...]\n"
    assert done.stderr == ""


def test_a_missing_package_of_an_extra_is_named_with_the_extra():
    code = (
        "import sys; sys.modules['optuna'] = None; from ostinato.commands import run; "
        "sys.exit(run(['tune', 'slo.ttft_ms=300']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "run: run tune needs the package optuna, which is not installed: "
        'pip install "ostinato[bench]", in a checkout pip install -e ".[bench]"\n'
    )


def test_the_packages_of_the_extra_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [re.split(r"[<>=]", each)[0] for each in project["optional-dependencies"]["bench"]]
    assert sorted(_BENCH_PACKAGES) == sorted(extra)
