"""The search of `run tune`: an Optuna study over simulated configurations, resumable and seeded.

The study has three objectives (TTFT, ITL, throughput) and the goals as constraints. Its sampler is
the multi-objective tree-structured Parzen estimator (Ozaki et al., GECCO 2020). A trial first
simulates a third of the requests, and is pruned if the result is far from the goals. Optuna's
pruners support one objective only, so this rule is implemented here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ostinato.benchmarks.tune.forecast import Forecast
from ostinato.benchmarks.tune.goals import Goals, ServingMetrics
from ostinato.benchmarks.tune.space import Space, Value, apply_values, value_of
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.runtime.machine_info import cpu_name

__all__ = ("Candidate", "Search", "open_storage", "study_name")

_LOG = logging.getLogger(__name__)
_TRIAL_FORMAT = 3  # format of a stored trial; a study in another format is not resumed
_KEYED = (
    *("model", "workload", "load", "slo", "device", "cache", "scheduler", "graphs", "speculation"),
    *("parallel", "runtime"),
)  # the sections on which a trial's metrics depend, beside single settings of others
_BOUNDED = "bounded"  # whether there is a target for inter-token latency
_TARGET = "scheduler.itl_target_ms"
_PART = 1 / 3  # share of the requests after which a trial may be pruned
_NUM_STARTUP = 24  # first trials, which are random
_MOST = 1e9  # violation of a configuration with failed requests
# A trial is pruned above this multiple of the best violation so far, which counts as at least 0.5.
_HOPELESS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration of the search and its predicted metrics."""

    values: dict[str, Value]
    predicted: ServingMetrics


def open_storage(path: Path) -> JournalStorage:
    """Open the study file; it is created if it does not exist.

    Raises:
        ConfigError: the file cannot be written, or is not a study.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not _is_journal(path):
            raise ConfigError(
                f"tune.storage={path} is not a study file; name another one or delete it"
            )
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise ConfigError(f"tune.storage={path} cannot be written: {error.strerror}") from error


def _is_journal(path: Path) -> bool:
    """Whether the file begins like a study. Optuna itself skips lines that it cannot read."""
    with path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline()
    try:
        return not line or "op_code" in json.loads(line)
    except (ValueError, TypeError):
        return False


def study_name(config: RunConfig, space: Space, duration_s: float | None) -> str:
    """The name of a study, which is the same for the same search.

    Args:
        config: the given configuration.
        space: the search space.
        duration_s: requests of the traffic after this are left out; None = all are sent.
    """
    parts = (
        _TRIAL_FORMAT,
        dataclasses.replace(config.tune, trials=1, verify=1, budget_s=10.0, storage=""),
        *(getattr(config, name) for name in _KEYED),
        config.simulate.acceptance,
        space.choices,
        cpu_name(),
        duration_s,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Search:
    """One study.

    Args:
        config: the given configuration; settings outside the space are not changed.
        space: the search space.
        forecast: predicts metrics.
        goals: the constraints.
        storage: stores the study.
        name: the name of the study, from `study_name`.
    """

    def __init__(
        self,
        config: RunConfig,
        space: Space,
        forecast: Forecast,
        goals: Goals,
        storage: JournalStorage,
        name: str,
    ) -> None:
        self._config = config
        self._space = space
        self._forecast = forecast
        self._goals = goals
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = config.tune.seed
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            load_if_exists=True,
            directions=["minimize", "minimize", "maximize"],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            # A resumed study must not draw the same trials again.
            self.study.sampler = optuna.samplers.TPESampler(
                seed=seed + self.num_done, multivariate=True, n_startup_trials=_NUM_STARTUP
            )

    @property
    def num_done(self) -> int:
        """Trials that have ended."""
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))

    def run(
        self, num_trials: int, until: float, on_trial: Callable[[int], None] = lambda done: None
    ) -> None:
        """Search until `num_trials` trials have ended, or until a time.

        Args:
            num_trials: trials, those of earlier runs included.
            until: seconds of time.monotonic().
            on_trial: called with the number of trials that have ended.
        """
        if not self.num_done:
            self._enqueue()
        while self.num_done < num_trials and time.monotonic() < until:
            self.study.optimize(self._try, n_trials=1, catch=())
            on_trial(self.num_done)

    def candidates(self, factors: dict[str, float] | None = None) -> list[Candidate]:
        """Distinct configurations, the best first.

        Args:
            factors: {figure: factor that corrects its predictions}.
        """
        found: dict[str, Candidate] = {}
        for trial in self._completed():
            values = dict(trial.user_attrs["values"])
            predicted = ServingMetrics(**trial.user_attrs["metrics"])
            found.setdefault(repr(sorted(values.items())), Candidate(values, predicted))
        return sorted(
            found.values(), key=lambda one: self._goals.rank(one.predicted.scaled(factors or {}))
        )

    def front(self) -> list[Candidate]:
        """The candidates on the Pareto front of the objectives."""
        return [
            Candidate(
                dict(trial.user_attrs["values"]), ServingMetrics(**trial.user_attrs["metrics"])
            )
            for trial in self.study.best_trials
        ]

    def current_values(self) -> dict[str, Value]:
        """The configuration's own values of the searched keys."""
        keys = [*self._space.choices, *([_TARGET] if self._space.targets_ms else [])]
        return {key: value_of(self._config, key) for key in keys}

    def _completed(self) -> Sequence[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])

    def _enqueue(self) -> None:
        """Enqueue the given configuration and some ITL targets near the goal as first trials."""
        current = self.current_values()
        current |= {
            key: self._space.choices[key][0]
            for key, value in current.items()
            if key in self._space.choices and value not in self._space.choices[key]
        }
        target = current.pop(_TARGET, None)
        targets: list[float | None] = [None if target is None else float(target)]
        limits = self._space.targets_ms
        if limits is not None:
            targets += [share * limits[1] for share in (0.95, 0.8, 0.6)]
        for one in dict.fromkeys(targets):
            params: dict[str, Any] = dict(current)
            if limits is not None:
                params[_BOUNDED] = one is not None
                if one is not None:
                    params[_TARGET] = min(max(one, limits[0]), limits[1])
            self.study.enqueue_trial(params)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Value]:
        values: dict[str, Value] = {
            key: trial.suggest_categorical(key, choices)
            for key, choices in self._space.choices.items()
        }
        if self._space.targets_ms is not None:
            values[_TARGET] = None
            if trial.suggest_categorical(_BOUNDED, [True, False]):
                low, high = self._space.targets_ms
                values[_TARGET] = round(trial.suggest_float(_TARGET, low, high, log=True), 2)
        return values

    def _try(self, trial: optuna.Trial) -> tuple[float, float, float]:
        values = self._suggest(trial)
        trial.set_user_attr("values", values)
        if not self._space.is_legal(values):
            raise optuna.TrialPruned("not legal together, or step costs not known")
        config = apply_values(self._config, values)
        first = self._forecast.predict(config, job=self._forecast.part_of_job(_PART))
        if first is None:
            raise optuna.TrialPruned("such an engine cannot start")
        best = min((_violation(one) for one in self._completed()), default=None)
        # The queue only grows, so a trial that is far from the goals will not come closer.
        if best is not None and self._goals.violation(first) > _HOPELESS * max(best, 0.5):
            raise optuna.TrialPruned("far from the goals after a third of the requests")
        metrics = self._forecast.predict(config)
        assert metrics is not None, "it could start a moment ago"
        trial.set_user_attr("metrics", dataclasses.asdict(metrics))
        violation = min(self._goals.violation(metrics), _MOST)
        trial.set_user_attr("violation", violation)
        trial.set_constraint("goals", violation)
        return metrics.ttft_ms, metrics.itl_ms, metrics.throughput


def _violation(trial: FrozenTrial) -> float:
    return float(trial.user_attrs["violation"])
