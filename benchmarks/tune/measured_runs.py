"""Runs configurations for `run tune` on a real server with the load client; fits the overheads."""

from __future__ import annotations

import dataclasses

from ostinato.benchmarks.load.job import LoadJob
from ostinato.benchmarks.load.run import Target, find_target, make_job, measure_point
from ostinato.benchmarks.load.server_process import Server
from ostinato.benchmarks.report.record import Point
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.step_times.fit import fit_overheads
from ostinato.benchmarks.simulate.step_times.overheads import ServingOverheads
from ostinato.benchmarks.simulate.validation.calibration_traffic import (
    Calibration,
    recording_server,
)
from ostinato.benchmarks.tune.goals import ServingMetrics
from ostinato.benchmarks.workload.arrivals import LoadPoint
from ostinato.benchmarks.workload.model_facts import ModelFacts
from ostinato.benchmarks.workload.workload import Part
from ostinato.conf.root import RunConfig

__all__ = ("RealRun", "RealRuns")

_CALIBRATIONS = 2  # rounds of calibration traffic before the workload, and as many after it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """The result of one configuration under the workload."""

    metrics: ServingMetrics
    point: Point
    overheads: ServingOverheads | None  # None = the run was not calibrated


@dataclasses.dataclass(slots=True)
class RealRuns:
    """Runs the same traffic, each time with other token ids.

    Args:
        config: its `load` section says how requests are sent.
        facts: facts about the model.
        part: the requests.
        point: rate or concurrency.
        duration_s: requests after this are left out; None = all are sent.
    """

    config: RunConfig
    facts: ModelFacts
    part: Part
    point: LoadPoint
    duration_s: float | None
    count: int = 0  # runs so far, on which the token ids of the next run depend

    def job(self, url: str = "", model: str = "", *, gives_token_ids: bool = False) -> LoadJob:
        """The requests of the next run, sent as token ids."""
        load = dataclasses.replace(self.config.load, duration_s=self.duration_s)
        part = self.part.rotated(self.count, self.facts.vocab_size)
        tokenizer = self.facts.tokenizer
        return make_job(
            Target(url=url, model=model, gives_token_ids=gives_token_ids),
            part,
            self.point,
            load,
            seed=self.config.workload.seed,
            decode=None if tokenizer is None else tokenizer.decode,
        )

    def run(self, config: RunConfig, spec: EngineSpec | None = None) -> RealRun:
        """Start a server with `config` and measure it.

        With `spec`, the overheads of serving are measured too, before and after the workload.

        Raises:
            StartupError: the server cannot start.
            EngineError: the load client ended without a report.
            ValueError: with `spec`: the calibration had too few steps or requests.
        """
        percentile = self.config.tune.percentile
        with Server(recording_server(config) if spec else config) as server:
            target, _ = find_target(server.url, config.load, is_ours=True)
            calibration = spec and Calibration(target, self.facts.vocab_size, spec)
            recordings = [calibration.run() for _ in range(_CALIBRATIONS)] if calibration else []
            job = self.job(target.url, target.model, gives_token_ids=target.gives_token_ids)
            self.count += 1
            percentiles = sorted({50.0, percentile, 99.0})
            point, _ = measure_point(job, self.point, self.config.slo, percentiles)
            if calibration:
                recordings += [calibration.run() for _ in range(_CALIBRATIONS)]
        return RealRun(
            metrics=ServingMetrics.of(point.metrics, percentile),
            point=point,
            overheads=fit_overheads(spec.costs, recordings) if spec else None,
        )
