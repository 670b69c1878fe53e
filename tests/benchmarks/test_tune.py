"""`run tune`: goals, search space, search and output files. One slow test has a real server."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.tune.forecast import Forecast
from ostinato.benchmarks.tune.goals import Goals, ServingMetrics
from ostinato.benchmarks.tune.infeasible import highest_load, impossible_goals, why_missed
from ostinato.benchmarks.tune.output import (
    Verified,
    option_text,
    plot_front,
    serve_command,
    write_option,
)
from ostinato.benchmarks.tune.search import Search, open_storage, study_name
from ostinato.benchmarks.tune.space import Space, Variant, apply_values, is_alike
from ostinato.commands import run
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.bench_schema import SloSection
from ostinato.conf.sections.tuning_schema import TuneObjective
from tests.runtime.cost_tables import make_table

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = Variant(2, 16)


def make_metrics(**changes: float) -> ServingMetrics:
    values = {"ttft_ms": 100.0, "itl_ms": 10.0, "tpot_ms": 9.0, "e2e_ms": 500.0, "throughput": 50.0}
    return ServingMetrics(**(values | changes))


def make_goals(objective: TuneObjective = TuneObjective.throughput, **limits: float) -> Goals:
    return Goals.of(SloSection(**limits), 95.0, objective)


def test_the_worst_ratio_is_the_violation():
    goals = make_goals(ttft_ms=200.0, itl_ms=8.0)
    assert goals.ratios(make_metrics()) == {"ttft": 0.5, "itl": 1.25}
    assert goals.violation(make_metrics()) == pytest.approx(0.25)
    assert goals.violation(make_metrics(itl_ms=8.0)) == pytest.approx(0.0)
    assert math.isinf(goals.violation(make_metrics(completed_share=0.9)))
    assert goals.describe() == "TTFT p95 <= 200 ms, ITL p95 <= 8 ms"


def test_meeting_the_goals_comes_first_then_the_objective():
    goals = make_goals(itl_ms=10.0)
    meets, faster, misses = (
        make_metrics(),
        make_metrics(throughput=60.0),
        make_metrics(itl_ms=11.0, throughput=900.0),
    )
    assert sorted([misses, meets, faster], key=goals.rank) == [faster, meets, misses]
    latency = make_goals(TuneObjective.latency, itl_ms=20.0)
    shorter = make_metrics(itl_ms=5.0, throughput=1.0)
    assert sorted([faster, shorter], key=latency.rank) == [shorter, faster]


def test_values_become_a_configuration():
    config = load_config(["model=llama-45m"])
    values = {"scheduler.max_num_seqs": 8, "cache.block_size": 32}
    changed = apply_values(config, values)
    assert (changed.scheduler.max_num_seqs, changed.cache.block_size) == (8, 32)
    assert changed.model == config.model
    with pytest.raises(ConfigError, match=r"cache\.block_size must be one of"):
        apply_values(config, {"cache.block_size": 17})


def test_configurations_that_only_chance_tells_apart_are_alike():
    values = {"scheduler.max_num_seqs": 8, "scheduler.itl_target_ms": 14.0}
    assert is_alike(values, values | {"scheduler.itl_target_ms": 13.5})
    assert not is_alike(values, values | {"scheduler.itl_target_ms": 10.0})
    assert not is_alike(values, values | {"scheduler.itl_target_ms": None})
    assert not is_alike(values, values | {"scheduler.max_num_seqs": 4})
    assert is_alike({"device.threads": 1}, {"device.threads": 1})


def make_space(*overrides: str, goals: Goals | None = None) -> tuple[Space, RunConfig]:
    config = load_config(["model.max_model_len=512", "cache.memory_gib=0.05", *overrides])
    space = Space.of(
        config,
        goals or make_goals(),
        variants=(DEFAULT, Variant(1, 16)),
        floor_ms=2.0,
        cache_gib=1.0,
    )
    return space, config


def test_the_space_has_what_keys_name():
    space, _ = make_space("tune.keys=[scheduler.max_num_seqs,cache.memory_gib]")
    assert list(space.choices) == ["scheduler.max_num_seqs", "cache.memory_gib"]
    assert space.choices["cache.memory_gib"] == (0.25, 0.5, 1.0)
    assert space.targets_ms is None
    assert not space.is_legal(
        {"scheduler.max_num_seqs": 64, "scheduler.max_num_batched_tokens": 32}
    )
    assert space.is_legal({"device.threads": 1})
    assert not space.is_legal({"device.threads": 1, "cache.block_size": 64})  # no costs


def test_drafts_are_searched_if_they_are_named():
    keys = "tune.keys=[speculation.method,speculation.max_tokens]"
    space, config = make_space(keys, "simulate.acceptance=0.95", "speculation=none")
    assert space.choices == {
        "speculation.method": ("none", "auto"),
        "speculation.max_tokens": (1, 3, 7),
    }
    model = ("speculation.method=draft", "speculation.model=/small", "speculation.max_tokens=4")
    with_model, _ = make_space(keys, *model)
    assert with_model.choices["speculation.method"] == ("draft",)
    assert with_model.choices["speculation.max_tokens"] == (1, 3, 4, 7)
    forecast = make_forecast(config, mixed_requests()[:4])
    values = [{"speculation.method": one, "speculation.max_tokens": 3} for one in ("none", "auto")]
    plain, drafted = (forecast.predict(apply_values(config, one)) for one in values)
    assert plain is not None
    assert drafted is not None
    assert drafted.throughput > 1.2 * plain.throughput


def make_forecast(config, requests: list[JobRequest]) -> Forecast:
    job = LoadJob(url="", model="", requests=requests)
    costs = {DEFAULT: make_table(), Variant(1, 16): make_table(step_ms=4.0, token_ms=0.2)}
    return Forecast(job, costs, DEFAULT, 95.0)


def mixed_requests() -> list[JobRequest]:
    """Streams, and long prompts that arrive among them."""
    streams = [
        JobRequest(prompt=[key + 1] * 10, max_tokens=100, at_s=0.01 * key) for key in range(4)
    ]
    prompts = [
        JobRequest(prompt=list(range(400 * key, 400 * key + 400)), max_tokens=2, at_s=0.08 * key)
        for key in range(1, 11)
    ]
    return streams + prompts


def make_search(
    tmp_path: Path, goals: Goals, *overrides: str
) -> tuple[Search, Forecast, RunConfig]:
    space, config = make_space(*overrides, goals=goals)
    forecast = make_forecast(config, mixed_requests())
    storage = open_storage(tmp_path / "study.journal")
    return Search(config, space, forecast, goals, storage, "test"), forecast, config


def hard_goals() -> Goals:
    """With a whole prompt of 400 tokens in a step, the streams wait 42 ms."""
    return make_goals(itl_ms=15.0, ttft_ms=600.0)


def test_the_search_meets_a_goal_that_the_configuration_misses(tmp_path: Path):
    goals = hard_goals()
    search, forecast, config = make_search(tmp_path, goals)
    default = forecast.predict(config)
    assert default is not None
    assert goals.violation(default) > 0.5
    search.run(30, time.monotonic() + 600)
    best = search.candidates()[0]
    assert goals.violation(best.predicted) <= 0.0
    # The forecast equals a simulation of that configuration.
    assert forecast.predict(apply_values(config, best.values)) == best.predicted
    assert search.front()


def test_a_study_resumes_and_is_seeded(tmp_path: Path):
    goals = hard_goals()
    search, _, _ = make_search(tmp_path, goals)
    search.run(8, time.monotonic() + 600)
    first = [trial.params for trial in search.study.trials]
    again, _, _ = make_search(tmp_path, goals)
    assert again.num_done == 8
    again.run(12, time.monotonic() + 600)
    assert again.num_done == 12
    assert [trial.params for trial in again.study.trials][:8] == first
    other, _, _ = make_search(tmp_path / "other", goals)
    other.run(8, time.monotonic() + 600)
    assert [trial.params for trial in other.study.trials] == first


def test_a_study_is_resumed_by_an_equal_engine_and_traffic_only():
    space, config = make_space()
    name = study_name(config, space, 4.0)
    again, same = make_space("tune.trials=9", "tune.budget_s=20", "server.port=1234")
    assert study_name(same, again, 4.0) == name
    others = [
        study_name(make_space(override)[1], space, 4.0)
        for override in (
            *("parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2"),
            *("runtime.determinism=bitwise", "load.rates=[7]", "slo.itl_ms=3"),
            *("scheduler.max_num_seqs=8", "speculation.method=ngram", "simulate.acceptance=0.3"),
        )
    ]
    others += [study_name(config, space, None)]
    others += [study_name(config, make_space("tune.keys=[device.threads]")[0], 4.0)]
    assert len({name, *others}) == 1 + len(others)


def test_an_engine_that_cannot_be_simulated_ends_the_search_with_the_reason(tmp_path: Path):
    """An engine that cannot start does not end the search: it is a trial without a result."""
    staged = ("parallel.pipeline=2", "speculation.method=ngram")
    search, forecast, _config = make_search(tmp_path, make_goals(), *staged)
    with pytest.raises(ConfigError, match=r"method=ngram with parallel\.pipeline=2"):
        search.run(8, time.monotonic() + 600)
    assert forecast.predict(apply_values(load_config(), {"cache.memory_gib": 1e-9})) is None


def test_no_time_no_trials(tmp_path: Path):
    search, _, _ = make_search(tmp_path, make_goals())
    search.run(8, time.monotonic())
    assert search.num_done == 0


def test_a_file_that_is_no_study_is_named(tmp_path: Path):
    file = tmp_path / "study.journal"
    file.write_text("this is no journal\n")
    with pytest.raises(ConfigError, match=r"tune\.storage=.*is not a study file"):
        open_storage(file)
    with pytest.raises(ConfigError, match=r"tune\.storage=/proc/none/x cannot be written"):
        open_storage(Path("/proc/none/x"))


def test_an_impossible_goal_is_named_with_what_the_machine_needs(tmp_path: Path):
    goals = make_goals(itl_ms=1.0, ttft_ms=10_000.0)
    _, forecast, config = make_search(tmp_path, goals)
    [line] = impossible_goals(config, forecast, goals)
    assert line.startswith("slo.itl_ms=1 cannot be met: with one request at a time p95 is 2.")
    assert impossible_goals(config, forecast, hard_goals()) == []


def test_goals_that_exclude_each_other_are_told_apart(tmp_path: Path):
    goals = make_goals(itl_ms=5.0, ttft_ms=60.0)
    search, _forecast, _config = make_search(tmp_path, goals)
    search.run(30, time.monotonic() + 600)
    candidates = search.candidates()
    assert goals.violation(candidates[0].predicted) > 0.0
    text = "\n".join(why_missed(candidates, goals, {}))
    assert "slo.itl_ms=5 can be met, but then at best with TTFT" in text
    assert "slo.ttft_ms=60 can be met, but then at best with ITL" in text


def test_a_search_without_time_is_named_as_such():
    assert why_missed([], make_goals(ttft_ms=60.0), {}) == [
        "no time was left for a search; raise tune.budget_s"
    ]


def test_the_highest_load_is_where_the_goals_begin_to_fail(tmp_path: Path):
    goals = make_goals(ttft_ms=150.0)
    _, forecast, config = make_search(tmp_path, goals)
    load = highest_load(config, forecast, goals, {})
    assert load is not None
    for factor, holds in ((0.9, True), (1.3, False)):
        metrics = forecast.predict(config, job=forecast.at_load(load * factor))
        assert metrics is not None
        assert (goals.violation(metrics) <= 0.0) == holds
    assert highest_load(config, forecast, make_goals(ttft_ms=0.01), {}) is None
    assert not forecast.is_at_once
    at_once = [JobRequest(prompt=[1], max_tokens=1, at_s=at_s) for at_s in (None, 0.0)]
    assert make_forecast(config, at_once).is_at_once


def test_a_written_option_gives_the_tuned_configuration(tmp_path: Path):
    config = load_config(
        [
            *("model=llama-45m", "graphs.mode=compiled", "server.port=1234"),
            *("runtime.determinism=bitwise", "parallel.tensor=2", "parallel.executor=ray"),
            *("parallel.ray_address=192.0.2.1:6379", "parallel.host=192.0.2.2"),
        ]
    )
    values = {
        "scheduler.itl_target_ms": 31.5,
        "scheduler.max_num_seqs": 8,
        "device.threads": 1,
        "speculation.method": "auto",
        "speculation.max_tokens": 3,
    }
    tuned = apply_values(config, values)
    path = write_option(tmp_path, "mine", option_text(tuned, ["Made by a test.", "# twice"]))
    assert path == tmp_path / "tuned" / "mine.yaml"
    loaded = load_config(["tuned=mine"], config_dir=str(tmp_path))
    for name in (
        "model",
        "device",
        "cache",
        "scheduler",
        "speculation",
        "graphs",
        "runtime",
        "sampling",
    ):
        assert getattr(loaded, name) == getattr(tuned, name)
    # The option holds the engine's settings only, without addresses of machines.
    assert loaded.server.port == 8000
    assert loaded.parallel == dataclasses.replace(tuned.parallel, host="", ray_address="")
    again = load_config(["tuned=mine", "scheduler.max_num_seqs=4"], config_dir=str(tmp_path))
    assert again.scheduler.max_num_seqs == 4


def test_the_command_names_the_directory_unless_it_is_our_own(tmp_path: Path):
    assert serve_command(Path(tmp_path), "x") == f"run serve --config-dir {tmp_path} tuned=x"
    assert serve_command(ROOT / "conf", "x") == "run serve tuned=x"


def test_an_unknown_tuned_option_lists_those_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_option(tmp_path, "mine", option_text(load_config(), []))
    assert run(["serve", f"--config-dir={tmp_path}", "tuned=mime", "--cfg=job"]) == 2
    assert "did you mean mine?" in capsys.readouterr().err


def test_the_plot_is_a_png(tmp_path: Path):
    metrics = [make_metrics(ttft_ms=50.0 + 10 * n, itl_ms=40.0 - n) for n in range(9)]
    verified = [
        Verified("as configured", {}, metrics[0], metrics[1]),
        Verified("candidate 1", {}, metrics[3], metrics[2]),
    ]
    path = tmp_path / "plot.png"
    plot_front(path, make_goals(ttft_ms=100.0, itl_ms=35.0), metrics, metrics[2:4], verified, "t")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["load.rates=[1,2]"], "run tune needs one point of load"),
        (["load.url=http://127.0.0.1:1"], "run tune starts its own servers"),
        (
            ["parallel.pipeline=2", "speculation.method=ngram"],
            "parallel.pipeline=2: run tune simulates drafts with one stage only",
        ),
        (
            ["parallel.pipeline=2", "tune.keys=[speculation.method]"],
            "parallel.pipeline=2: run tune simulates drafts with one stage only",
        ),
        (["tune.keys=[cache.block_sizes]"], "tune.keys must be one of scheduler.max_num_seqs"),
        (["tune.percentile=100"], "tune.percentile must be in (0, 99.9], got 100"),
        (["tune.nothing=1"], "there is no key 'tune.nothing'"),
        (["workload=trace", "workload.path=/no/such/trace"], "/no/such/trace cannot be read"),
    ],
)
def test_what_can_not_be_tuned_is_one_line(
    overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    storage = f"tune.storage={tmp_path}/study.journal"
    assert run(["tune", "load.rates=[1]", storage, *overrides]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_tune_on_a_real_server(tmp_path: Path):
    """The whole command on the bundled model: a goal that is met, and one that cannot be met."""
    small = ("model.max_model_len=512", "cache.memory_gib=0.05", "workload=random")
    traffic = ("workload.num_requests=12", "workload.output_len=16", "load.rates=[4]")
    where = (f"tune.config_dir={tmp_path}", f"tune.storage={tmp_path}/study.journal")
    search = ("tune.trials=12", "tune.verify=1", "tune.keys=[scheduler.max_num_seqs]")

    def invoke(*goals: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ostinato", "tune", *small, *traffic, *where, *search]
        return subprocess.run(
            [*command, *goals], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )

    done = invoke("slo.ttft_ms=20000", "slo.itl_ms=5000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run serve --config-dir {tmp_path} tuned=tuned" in done.stdout
    traffic_line = r"traffic: random, 12 requests of \d+ prompt \+ 16 output tokens on average, "
    assert re.search(traffic_line, " ".join(done.stdout.split()))
    loaded = load_config(["tuned=tuned"], config_dir=str(tmp_path))
    assert dataclasses.asdict(loaded)["model"]["max_model_len"] == 512
    assert (tmp_path / "tuned" / "tuned.png").read_bytes().startswith(b"\x89PNG")
    done = invoke("slo.itl_ms=0.01")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "slo.itl_ms=0.01 cannot be met" in " ".join(done.stdout.split())
    met = [
        json.loads((tmp_path / "tuned" / f"{name}.json").read_text())["conditions"]["goals_met"]
        for name in ("tuned", "tuned-missed")
    ]
    assert met == [True, False]
