"""The performance gate: it passes on unchanged code and fails on a planted slowdown."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ostinato.benchmarks.gate import __main__ as gate
from ostinato.benchmarks.gate.check import Check, measure, read_ratios, run_check, write_ratios
from ostinato.benchmarks.gate.engine_checks import NAMES
from ostinato.benchmarks.gate.host_checks import host_checks, python_loop
from ostinato.conf.errors import ConfigError
from ostinato.runtime.machine_info import cpu_name
from ostinato.runtime.scheduling.scheduler import Scheduler


def burn(count: int) -> None:
    for number in range(count):
        hash(number)


def loops(ours: int, tolerance: float = 0.25) -> Check:
    """Compares a loop of `ours` rounds with a loop of 2000 rounds."""
    return Check(
        name="loops",
        what="a loop / a loop",
        ours=lambda: burn(ours),
        reference=lambda: burn(2000),
        clock=time.process_time,
        tolerance=tolerance,
        pairs=9,
    )


def test_a_ratio_is_that_of_the_work():
    ratio, _ = measure(loops(6000))
    assert ratio == pytest.approx(3.0, rel=0.25)


def test_only_what_is_slower_than_allowed_is_a_regression():
    same, slower = run_check(loops(2000), 1.0), run_check(loops(4000), 1.0)
    assert not same.is_regression
    assert slower.is_regression
    assert slower.tries == 3  # only a check that is too slow three times is a regression
    assert slower.change == pytest.approx(1.0, abs=0.5)
    assert not run_check(loops(4000), None).is_regression


def test_a_planted_slowdown_of_the_scheduler_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = str(tmp_path / "ratios.json")
    only = ["--only", "scheduler step", "--file", file]
    assert gate.main([*only, "--store"]) == 0
    assert gate.main(only) == 0
    assert "1 checks passed" in capsys.readouterr().out
    plain = Scheduler.schedule

    def slow(self: Scheduler):
        python_loop()
        return plain(self)

    monkeypatch.setattr(Scheduler, "schedule", slow)
    assert gate.main(only) == 1
    assert "gate: scheduler step is " in capsys.readouterr().out


def test_a_machine_without_ratios_is_told_how_to_store_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "ratios.json"
    file.write_text(json.dumps({"another machine": {"step outputs": 1.0}}))
    assert gate.main(["--only", "outputs", "--file", str(file)]) == 0
    text = capsys.readouterr().out
    assert "nothing stored for" in text
    assert "--store" in text


def test_storing_keeps_other_machines_and_checks(tmp_path: Path):
    file = tmp_path / "ratios.json"
    write_ratios(file, "a", {"one": 1.0, "two": 2.0})
    write_ratios(file, "b", {"one": 9.0})
    write_ratios(file, "a", {"two": 3.0})
    assert read_ratios(file, "a") == {"one": 1.0, "two": 3.0}
    assert read_ratios(file, "b") == {"one": 9.0}
    assert read_ratios(file, "c") == {}


@pytest.mark.parametrize("text", ["{", "[]", f'{{"{cpu_name()}": 3}}'])
def test_a_broken_file_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "ratios.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"ratios\.json holds no ratios"):
        read_ratios(file, cpu_name())
    assert gate.main(["--only", "outputs", "--file", str(file)]) == 2
    assert "store them again" in capsys.readouterr().err


def test_no_such_check(capsys: pytest.CaptureFixture[str]):
    assert gate.main(["--only", "nothing"]) == 2
    assert "no check has 'nothing' in its name" in capsys.readouterr().err


def test_stored_ratios_are_those_of_checks():
    names = {check.name for check in host_checks()} | set(NAMES)
    file = Path(gate.__file__).parent / "ratios.json"
    for machine, entries in json.loads(file.read_text()).items():
        assert set(entries) == names, machine
