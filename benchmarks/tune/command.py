"""`run tune`: searches for the configuration that meets latency goals under a given workload.

    run tune workload=random load.rates=[3] slo.ttft_ms=1500 slo.itl_ms=40
    run tune model=llama-45m workload=trace workload.path=trace.jsonl slo.itl_ms=30 tune.name=chat

First, the step costs of the given configuration are measured, and it runs on a real server. This
run shows which goals it misses, and it calibrates the serving overheads. Then the step costs of
other numbers of threads and block sizes are measured, and an Optuna study searches with the
simulator. Finally, the best few candidates run on a real server. Each measurement corrects the
predictions by which the next candidate is chosen.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ostinato.benchmarks.bench.serve import workload_of
from ostinato.benchmarks.report.record import Point, Record, conditions_of, write_record
from ostinato.benchmarks.report.tables import table_console
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.specs import measured_spec, without_default_drafts
from ostinato.benchmarks.tune.forecast import Forecast
from ostinato.benchmarks.tune.goals import Goals, ServingMetrics
from ostinato.benchmarks.tune.infeasible import highest_load, impossible_goals, why_missed
from ostinato.benchmarks.tune.measured_runs import RealRun, RealRuns
from ostinato.benchmarks.tune.output import (
    Verified,
    option_text,
    plot_front,
    provenance,
    serve_command,
    write_option,
)
from ostinato.benchmarks.tune.search import Candidate, Search, open_storage, study_name
from ostinato.benchmarks.tune.space import (
    Space,
    Value,
    Variant,
    apply_values,
    is_alike,
    searched_keys,
)
from ostinato.benchmarks.workload.arrivals import load_points
from ostinato.benchmarks.workload.model_facts import model_facts
from ostinato.conf.environment import expand_user, require_writable
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.speculation_schema import SpeculationMethod
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.errors import StartupError
from ostinato.runtime.machine_info import cpu_name

__all__ = ("tune",)

_GIB = 1 << 30
_BLOCK_SIZES = (16, 32, 64)
# Shares of the time budget: when the measurement of step costs ends, and when the search ends.
_VARIANTS_BY, _SEARCH_BY = 0.4, 0.6
_MIN_RUN_S = 4.0


def tune(config: RunConfig) -> int:
    """Search, verify, write; returns 0 if the goals are met, else 1.

    Raises:
        ConfigError: the workload, the load, the goals or the files are not valid.
        StartupError: the engine cannot start as configured.
    """
    return _Tuning(config).run()


class _Tuning:
    """The state of one tuning."""

    def __init__(self, config: RunConfig) -> None:
        section = config.tune
        self.config = config = without_default_drafts(config)
        self.goals = Goals.of(config.slo, section.percentile, section.objective)
        points = load_points(config.load)
        if len(points) != 1:
            raise ConfigError(
                f"run tune needs one point of load; load.rates and load.concurrency give "
                f"{len(points)}; name one"
            )
        if config.load.url:
            raise ConfigError(
                f"load.url={config.load.url}: run tune starts its own servers; leave load.url out"
            )
        stages = config.parallel.pipeline
        if stages > 1 and _measurable(self.config).speculation.max_drafts:
            raise ConfigError(
                f"parallel.pipeline={stages}: run tune simulates drafts with one stage only; leave "
                "speculation.method at its default and out of tune.keys, or set parallel.pipeline=1"
            )
        self.storage = open_storage(
            expand_user(section.storage or f"outputs/tune/{section.name}.journal")
        )
        require_writable(
            expand_user(section.config_dir) / "tuned" / f"{section.name}.yaml", "tune.config_dir"
        )
        self.facts = model_facts(config)
        part, self.notes = workload_of(config, self.facts)
        self.begin = time.monotonic()
        self.point = points[0]
        self.real = RealRuns(config, self.facts, part, self.point, config.load.duration_s)
        self.verified: list[Verified] = []
        self.runs: list[RealRun] = []
        self.console = table_console()

    def run(self) -> int:
        budget = self.config.tune.budget_s
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True, console=Console(stderr=True)) as self.progress:
            self.task: TaskID = self.progress.add_task("step costs", total=budget)
            self._tell("step costs")
            self._prepare()
            self._measure("as configured", {}, None, fit=True)
            impossible = impossible_goals(self.config, self.forecast, self.goals)
            if not impossible:
                self._search()
                self._verify()
        return self._report(impossible)

    def _left(self) -> float:
        return self.config.tune.budget_s - (time.monotonic() - self.begin)

    def _tell(self, text: str, *, is_phase: bool = True) -> None:
        spent = time.monotonic() - self.begin
        budget = self.config.tune.budget_s
        self.progress.update(self.task, description=text, completed=min(spent, budget))
        if is_phase and not sys.stderr.isatty():
            print(f"tune: {spent:.0f} s: {text}", file=sys.stderr, flush=True)

    def _prepare(self) -> None:
        """Measure step costs of the given configuration, and choose the length of real runs."""
        own = measured_spec(_measurable(self.config))
        self.spec = dataclasses.replace(own, scheduler=self.config.scheduler)
        self.default = Variant(
            self.config.device.threads or _num_threads(), self.config.cache.block_size
        )
        self.costs: dict[Variant, CostTable] = {self.default: own.costs}
        job = self.real.job()
        takes = max(simulate_job(self.spec, job).last_s, default=0.0)
        most = max(_MIN_RUN_S, self.config.tune.budget_s * 0.5 / (self.config.tune.verify + 1))
        if takes > 1.5 * most and (self.real.duration_s or takes) > most:
            self.real.duration_s = round(most, 1)
            self.notes.append(
                f"real runs send the first {most:.0f} s of the traffic, so that "
                f"{self.config.tune.verify + 1} of them fit into tune.budget_s="
                f"{self.config.tune.budget_s:g}"
            )
        self.forecast = Forecast(
            self.real.job(),
            self.costs,
            self.default,
            self.config.tune.percentile,
            None if own.drafts is None else own.drafts.model_costs,
        )

    def _measure(
        self,
        label: str,
        values: dict[str, Value],
        predicted: ServingMetrics | None,
        *,
        fit: bool = False,
    ) -> None:
        """Run a configuration on a real server."""
        self._tell(f"real run: {label}")
        config = apply_values(self.config, values)
        run = self.real.run(config, self.forecast.spec(config) if fit else None)
        if run.overheads is not None:
            self.forecast.overheads = run.overheads
            predicted = self.forecast.predict(config)
        self.runs.append(run)
        self.verified.append(Verified(label, values, predicted, run.metrics))

    def _search(self) -> None:
        section = self.config.tune
        self._measure_variants()
        floor = self.spec.costs.decode_seconds(1, 0)
        space = Space.of(
            self.config,
            self.goals,
            variants=tuple(self.costs),
            floor_ms=1000 * floor,
            cache_gib=self._cache_gib(),
        )
        name = study_name(self.config, space, self.real.duration_s)
        self.search = Search(self.config, space, self.forecast, self.goals, self.storage, name)
        resumed = self.search.num_done
        if resumed:
            self.notes.append(f"resumed a study of {resumed} trials")

        def show(done: int) -> None:
            self._tell(f"simulated {done} of {section.trials}", is_phase=done % 25 == 0)

        until = self.begin + _SEARCH_BY * section.budget_s
        self.search.run(section.trials, until, show)

    def _measure_variants(self) -> None:
        """Measure step costs of other numbers of threads and block sizes, while there is time."""
        keys, default = searched_keys(self.config), self.default
        threads = range(1, default.threads + 1) if "device.threads" in keys else [default.threads]
        sizes = _BLOCK_SIZES if "cache.block_size" in keys else [default.block_size]
        # Variants that differ in one value come first.
        wanted = sorted(
            (Variant(count, size) for count in threads for size in sizes),
            key=lambda one: (
                (one.threads != default.threads) + (one.block_size != default.block_size)
            ),
        )
        for variant in wanted:
            if variant in self.costs:
                continue
            if self._left() < (1 - _VARIANTS_BY) * self.config.tune.budget_s:
                self.notes.append(
                    f"no time to measure step costs of {variant.threads} threads with blocks of "
                    f"{variant.block_size}: left out of the search"
                )
                continue
            self._tell(f"step costs, {variant.threads} threads, blocks of {variant.block_size}")
            changed = apply_values(
                self.config,
                {"device.threads": variant.threads, "cache.block_size": variant.block_size},
            )
            try:
                self.costs[variant] = measured_spec(_measurable(changed)).costs
            except StartupError as error:
                self.notes.append(
                    f"{variant.threads} threads with blocks of {variant.block_size}: left out of "
                    f"the search: {error}"
                )

    def _verify(self) -> None:
        """Run the best candidates on a real server; each measurement corrects the next choice."""
        tried = [one.values for one in self.verified]
        current = self.search.current_values()
        tried.append(current)
        last_s = 2 * _MIN_RUN_S
        for number in range(self.config.tune.verify):
            ranked = self.search.candidates(self._factors())
            fresh = [
                one for one in ranked if not any(is_alike(one.values, other) for other in tried)
            ]
            if not fresh or self._left() < 1.2 * last_s:
                break
            chosen = fresh[0]
            tried.append(chosen.values)
            begin = time.monotonic()
            self._measure(f"candidate {number + 1}", chosen.values, chosen.predicted)
            last_s = time.monotonic() - begin

    def _factors(self, runs: Sequence[Verified] | None = None) -> dict[str, float]:
        """{figure: measured / predicted}, the median over `runs` or over all real runs."""
        factors: dict[str, float] = {}
        runs = self.verified if runs is None else runs
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "throughput"):
            ratios = [
                getattr(one.measured, name) / getattr(one.predicted, name)
                for one in runs
                if one.predicted is not None and getattr(one.predicted, name) > 0
            ]
            if ratios:
                factors[name] = statistics.median(ratios)
        return factors

    def _cache_gib(self) -> float:
        from ostinato.runtime.startup.plan.model_source import open_model

        spec = open_model(self.config).kv_cache_spec(self.config.cache.block_size)
        states = 0 if spec.recurrent is None else spec.recurrent.bytes_per_slot
        num_bytes = self.spec.num_blocks * spec.bytes_per_block + self.spec.num_states * states
        return num_bytes / _GIB

    def _report(self, impossible: list[str]) -> int:
        """Print and write the results; returns the exit code."""
        section, goals = self.config.tune, self.goals
        best = min(self.verified, key=lambda one: goals.rank(one.measured))
        met = goals.violation(best.measured) <= 0.0
        directory = expand_user(section.config_dir)
        # Files of a search that failed do not replace those beside an option that was found.
        name = section.name if met else f"{section.name}-missed"
        self._print_table(best)
        for note in self.notes:
            self.console.print(f"- {note}", markup=False)
        if not impossible:
            plot = directory / "tuned" / f"{name}.png"
            self._plot(plot)
            self.console.print(f"Pareto plot: {plot}", markup=False, soft_wrap=True)
        self._write_record(directory / "tuned" / f"{name}.json", met=met)
        if not met:
            self._explain(impossible, best)
            return 1
        tuned = apply_values(self.config, best.values)
        facts = {
            "commit": str(conditions_of(self.config)["commit"] or "an unknown commit")[:12],
            "machine": cpu_name(),
            "traffic": self._traffic(),
        }
        text = option_text(tuned, provenance(self.config, goals, facts, best))
        path = write_option(directory, section.name, text)
        if goals.limits:
            # A configuration's own ratio of measured to predicted corrects its predictions best.
            loads = [
                highest_load(config, self.forecast, goals, self._factors([run]))
                for config, run in ((self.config, self.verified[0]), (tuned, best))
            ]
            words = [f"up to {load or 0:.2g}x" for load in loads]
            self.console.print(
                f"the goals are predicted to hold {words[1]} this load; as configured {words[0]}",
                markup=False,
            )
        self.console.print(f"{path}:\n{text}", markup=False, soft_wrap=True)
        self.console.print(
            f"serve it:  {serve_command(directory, section.name)}", markup=False, soft_wrap=True
        )
        return 0

    def _explain(self, impossible: list[str], best: Verified) -> None:
        lines = list(impossible)
        if not lines:
            candidates: list[Candidate] = self.search.candidates()
            lines = why_missed(candidates, self.goals, self._factors())
            config = apply_values(self.config, best.values)
            load = highest_load(config, self.forecast, self.goals, self._factors([best]))
            if load is not None and load < 1.0:
                lines.append(
                    f"the goals are predicted to hold up to {load:.2g}x this load, the limit of "
                    "this machine"
                )
            if self.forecast.is_at_once:
                lines.append("all requests arrive at once; load.rates=[N] sends N of them a second")
        self.console.print(
            "the goals are not met; nothing was written for run serve:", markup=False
        )
        for line in lines:
            self.console.print(f"- {line}", markup=False)

    def _print_table(self, best: Verified) -> None:
        goals = self.goals
        share = f"p{goals.percentile:g}"
        self.console.print(f"traffic: {self._traffic()}", markup=False)
        self.console.print(f"goals: {goals.describe() or 'none'}", markup=False)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("real run")
        for heading in (f"TTFT {share}, ms", f"ITL {share}, ms", "tokens/s"):
            table.add_column(heading, justify="right")
        table.add_column("goals")
        table.add_column("what is changed", overflow="fold")
        for one in self.verified:
            changed = (
                "\n".join(
                    f"{key.partition('.')[2]}={'null' if value is None else value}"
                    for key, value in one.values.items()
                    if value != self.search.current_values().get(key)
                )
                if one.values
                else ""
            )
            mark = " *" if one is best else ""
            table.add_row(
                one.label + mark,
                _real_and_predicted(one, "ttft_ms", ".0f"),
                _real_and_predicted(one, "itl_ms", ".1f"),
                _real_and_predicted(one, "throughput", ".0f"),
                "met" if goals.violation(one.measured) <= 0.0 else "missed",
                changed or "nothing",
            )
        self.console.print(table)
        self.console.print("in brackets: predicted before the run; *: the best", markup=False)

    def _plot(self, path: Path) -> None:
        tried = [one.predicted for one in self.search.candidates()]
        front = [one.predicted for one in self.search.front()]
        title = f"{self.facts.name} on {cpu_name()}: {self._traffic()}"
        plot_front(path, self.goals, tried, front, self.verified, title)

    def _write_record(self, path: Path, *, met: bool) -> None:
        points: list[Point] = []
        for one, run in zip(self.verified, self.runs, strict=True):
            details = dict(run.point.details)
            details.pop("requests", None)
            details["predicted"] = (
                None if one.predicted is None else dataclasses.asdict(one.predicted)
            )
            points.append(
                Point(
                    label=one.label,
                    parameters=dict(one.values),
                    metrics=run.point.metrics,
                    details=details,
                )
            )
        record = Record(
            kind="tune",
            conditions=conditions_of(self.config, goals_met=met),
            points=points,
            notes=self.notes,
        )
        write_record(record, path)

    def _traffic(self) -> str:
        workload, part = self.config.workload, self.real.part
        prompt = part.num_prompt_tokens / len(part.items)
        output = part.num_output_tokens / len(part.items)
        return (
            f"{workload.kind.value}, {len(part.items)} requests of {prompt:.0f} prompt + "
            f"{output:.0f} output tokens on average, {self.point.label}"
        )


def _real_and_predicted(one: Verified, name: str, form: str) -> str:
    measured = f"{getattr(one.measured, name):{form}}"
    if one.predicted is None:
        return measured
    return f"{measured} ({getattr(one.predicted, name):{form}})"


def _measurable(config: RunConfig) -> RunConfig:
    """The configuration without limits on steps, so that step costs of all sizes are measured.

    If drafts are searched, the steps that verify them are measured too.
    """
    drafts = config.speculation
    if drafts.method is SpeculationMethod.none and "speculation.method" in searched_keys(config):
        drafts = dataclasses.replace(drafts, method=SpeculationMethod.auto)
        config = dataclasses.replace(config, speculation=drafts)
    section = dataclasses.replace(
        config.scheduler, max_num_seqs=None, max_num_batched_tokens=None, itl_target_ms=None
    )
    return dataclasses.replace(config, scheduler=section)


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()
