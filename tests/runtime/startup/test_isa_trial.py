"""The trial that times instruction sets at a start, and chooses one of them.

Tested are the choice, the starts that make no trial, and the reuse of a stored result.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.conf.root import RunConfig
from ostinato.conf.schema import InstructionSetName
from ostinato.ops.native.instruction_sets import runnable_levels
from ostinato.runtime.startup import isa_trial
from ostinato.runtime.startup.isa_trial import describe_times, fastest, stored_trial, try_levels
from ostinato.runtime.startup.plan.model_source import open_model
from ostinato.runtime.types.engine_info import IsaTrial
from tests.runtime.tiny import tiny_config

_ROOT = Path(__file__).parents[3]
_LEVELS = ("avx512bf16", "avx512", "avx2")
# Prints the instruction set of an engine. With four arguments, the second level is the faster one;
# with three, measuring the times fails.
_START = """
import sys
from ostinato.ops.native.library import loaded_isa
from ostinato.runtime.startup import isa_trial
from ostinato.runtime.startup.build_engine import build_engine
from tests.runtime.tiny import tiny_config

folder, *levels = sys.argv[1:4]
isa_trial._vector_levels = lambda: levels
isa_trial.time_levels = None
if len(sys.argv) > 4:
    for level in levels:
        isa_trial.build.build("core", level)
    isa_trial.time_levels = lambda tried, model: {levels[0]: {"64": 9.0}, levels[1]: {"64": 1.0}}
config = tiny_config("graphs.bundle=true", "model.dtype=bfloat16", graphs__bundle_dir=folder)
engine = build_engine(config.engine)
print(loaded_isa(), engine.model.isa, engine.model.isa_microseconds[levels[1]])
engine.close()
"""
_TIMES = st.fixed_dictionaries(
    {
        level: st.fixed_dictionaries({rows: st.floats(1.0, 1e4) for rows in ("1", "64")})
        for level in _LEVELS
    }
)


@pytest.fixture
def two_levels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two levels of this machine, as if this process had loaded none.

    The test is skipped if the machine runs only one level.
    """
    levels = runnable_levels()[:2]
    if len(levels) < 2:
        pytest.skip("this machine runs portable kernels only")
    monkeypatch.setattr(isa_trial, "_vector_levels", lambda: levels)
    monkeypatch.setattr(isa_trial, "loaded_isa", lambda: None)
    return levels


def _config(folder: Path, *overrides: str) -> RunConfig:
    return tiny_config(
        "graphs.bundle=true", "model.dtype=bfloat16", *overrides, graphs__bundle_dir=str(folder)
    )


def _try(config: RunConfig, *, anew: bool = False) -> IsaTrial | None:
    return try_levels(config.engine, open_model(config.engine), anew=anew)


@given(_TIMES)
def test_no_level_is_clearly_faster_than_the_taken_one(
    times: dict[str, dict[str, float]],
) -> None:
    def slowdown(level: str) -> float:
        parts = [times[level][n] / min(each[n] for each in times.values()) for n in ("1", "64")]
        return sum(parts) / len(parts)

    taken = fastest(times)
    assert all(slowdown(taken) * 0.85 <= slowdown(level) * 1.0001 for level in _LEVELS)


def test_equal_times_leave_the_best_level_by_name() -> None:
    assert fastest({level: {"1": 5.0, "64": 9.0} for level in _LEVELS}) == "avx512bf16"
    slow = {"avx512bf16": {"1": 5.0, "64": 20.0}, "avx512": {"1": 5.0, "64": 10.0}}
    assert fastest(slow) == "avx512"


def test_times_are_measured_once_and_repeated(
    two_levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path)
    monkeypatch.setattr(isa_trial.build, "intact_libraries", lambda name, level: [level])
    first = _try(config)
    assert first is not None
    assert first.isa == fastest(first.microseconds)
    assert list(first.microseconds) == two_levels
    assert all(
        list(times) == ["1", "4", "16", "64", "512"] for times in first.microseconds.values()
    )
    assert describe_times(first.isa, first.microseconds).startswith(
        f"{first.isa} (timed, 64 rows: "
    )

    other = {two_levels[0]: {"64": 9.0}, two_levels[1]: {"64": 1.0}}
    monkeypatch.setattr(isa_trial, "time_levels", lambda levels, model: other)
    assert _try(config) == first
    assert stored_trial(config.engine, open_model(config.engine)) == first
    assert _try(config, anew=True) == IsaTrial(two_levels[1], other)
    assert _try(config) == IsaTrial(two_levels[1], other)
    # The configuration of a restarted engine names the level. The stored times are still found.
    device = replace(config.device, isa=InstructionSetName(two_levels[1]))
    assert _try(replace(config, device=device)) == IsaTrial(two_levels[1], other)


def test_levels_that_are_not_compiled_take_no_part(
    two_levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiled in two_levels[:1], two_levels[1:], []:
        monkeypatch.setattr(
            isa_trial.build, "intact_libraries", lambda name, level, c=compiled: c and level in c
        )
        assert _try(_config(tmp_path), anew=True) == IsaTrial(two_levels[0], {})


def test_a_stored_level_that_does_not_run_any_more_is_decided_anew(
    two_levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa_trial.build, "intact_libraries", lambda name, level: [])
    config = _config(tmp_path)
    monkeypatch.setattr(isa_trial, "_decide", lambda model: IsaTrial("amx_of_another_machine", {}))
    assert _try(config) is not None
    monkeypatch.undo()
    monkeypatch.setattr(isa_trial, "_vector_levels", lambda: two_levels)
    monkeypatch.setattr(isa_trial, "loaded_isa", lambda: None)
    monkeypatch.setattr(isa_trial.build, "intact_libraries", lambda name, level: [])
    assert _try(config) == IsaTrial(two_levels[0], {})


@pytest.mark.parametrize(
    "override",
    [
        "graphs.bundle=false",
        "graphs.cost_table_budget_s=0",
        "model.dtype=float32",
        "device.isa=avx2",
    ],
)
@pytest.mark.usefixtures("two_levels")
def test_nothing_is_tried_where_it_would_not_matter_or_not_be_kept(
    override: str, tmp_path: Path
) -> None:
    assert _try(_config(tmp_path, override)) is None


def test_a_process_keeps_the_level_that_it_uses(
    two_levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa_trial, "loaded_isa", lambda: two_levels[1])
    assert _try(_config(tmp_path)) == IsaTrial(two_levels[1], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_engines_run_on_the_faster_level_and_later_processes_too(
    two_levels: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _START, str(tmp_path), *two_levels]
    for measures in (["measures"], []):
        done = subprocess.run(
            [*command, *measures], cwd=_ROOT, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [two_levels[1], two_levels[1], "{'64':", "1.0}"]
