"""Predicts the metrics of a configuration by simulation, with one step-cost table per variant."""

from __future__ import annotations

import dataclasses

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.predicted_metrics import predicted_metrics
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.specs import planned_spec
from ostinato.benchmarks.simulate.step_times.overheads import ServingOverheads
from ostinato.benchmarks.tune.goals import ServingMetrics
from ostinato.benchmarks.tune.space import Variant
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.bench_schema import SloSection
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.errors import StartupError

__all__ = ("Forecast",)


class Forecast:
    """Predicts the metrics of configurations for one job.

    Args:
        job: a job with prompts of token ids.
        costs: the step-cost table of each variant.
        default: the variant of a configuration that does not set one.
        percentile: percentile of latencies, in (0, 100).
        draft_costs: the step-cost table of the draft model; None = there is none.
    """

    def __init__(
        self,
        job: LoadJob,
        costs: dict[Variant, CostTable],
        default: Variant,
        percentile: float,
        draft_costs: CostTable | None = None,
    ) -> None:
        self._draft_costs = draft_costs
        self._job = job
        self._costs = costs
        self._default = default
        self._percentile = percentile
        self.overheads: ServingOverheads | None = None  # of a real server, None = unmeasured
        self._plans: dict[str, EngineSpec] = {}

    def spec(self, config: RunConfig) -> EngineSpec:
        """The simulated engine of a configuration.

        Raises:
            ConfigError: such an engine cannot be simulated.
            StartupError: the engine could not start.
        """
        variant = Variant(config.device.threads or self._default.threads, config.cache.block_size)
        key = repr((config.scheduler, config.cache, config.device, config.speculation))
        if key not in self._plans:
            own = self._costs[variant]
            self._plans[key] = planned_spec(config, own, "", self._draft_costs)
        return dataclasses.replace(self._plans[key], overheads=self.overheads)

    def predict(self, config: RunConfig, *, job: LoadJob | None = None) -> ServingMetrics | None:
        """The metrics of a configuration under `job`, or else the forecast's job.

        None if the engine cannot start.

        Raises:
            ConfigError: such an engine can start, but cannot be simulated.
        """
        try:
            spec = self.spec(config)
        except ConfigError:
            raise  # it is a ValueError too, but it concerns every configuration of the search
        except (StartupError, ValueError):
            return None
        results = simulate_job(spec, job or self._job)
        metrics = predicted_metrics(results, spec, SloSection(), [self._percentile])
        return ServingMetrics.of(metrics, self._percentile)

    def part_of_job(self, share: float) -> LoadJob:
        """A job of the first requests, up to this share, with the earlier turns of each."""
        count = max(1, round(share * len(self._job.requests)))
        return _with_requests(self._job, self._job.requests[:count])

    @property
    def is_at_once(self) -> bool:
        """Whether all requests arrive together, so that no load factor changes the job."""
        requests = self._job.requests
        return self._job.concurrency is None and not any(one.at_s for one in requests)

    def at_load(self, factor: float) -> LoadJob:
        """The job with its arrival rate or concurrency multiplied by `factor`."""
        if self._job.concurrency is not None:
            return _with_requests(
                self._job,
                self._job.requests,
                concurrency=max(1, round(self._job.concurrency * factor)),
            )
        requests = [
            JobRequest(
                prompt=one.prompt,
                max_tokens=one.max_tokens,
                at_s=None if one.at_s is None else one.at_s / factor,
                after=one.after,
                think_s=one.think_s,
            )
            for one in self._job.requests
        ]
        return _with_requests(self._job, requests)

    def one_at_a_time(self) -> LoadJob:
        """The job with one request at a time, whose latency is a lower bound."""
        return _with_requests(self._job, self._job.requests, concurrency=1)


def _with_requests(
    job: LoadJob, requests: list[JobRequest], concurrency: int | None = None
) -> LoadJob:
    return LoadJob(
        url=job.url,
        model=job.model,
        requests=requests,
        concurrency=job.concurrency if concurrency is None else concurrency,
        max_concurrency=job.max_concurrency,
        stop_after_s=job.stop_after_s,
    )
