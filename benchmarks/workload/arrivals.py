"""Arrival times of requests, computed from a seed.

Gaps are drawn from a gamma distribution whose mean is 1 / rate. Its shape is the burstiness: 1 is
the exponential distribution (a Poisson process). Below 1 arrivals come in bursts, above 1 they are
more even. A ramp changes the rate from request to request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.bench_schema import LoadSection, Ramp

__all__ = ("LoadPoint", "arrival_times", "load_points", "rate_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """A way to send a workload. Without rate and concurrency: as recorded, or all at once."""

    rate: float | None = None  # open loop: requests per second
    concurrency: int | None = None  # closed loop: requests in progress

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "as they come"


def load_points(load: LoadSection) -> list[LoadPoint]:
    """The points of a load section; without rates and concurrencies, one point with neither.

    Raises:
        ConfigError: there is a ramp without a rate to begin or to end with, or a rate to end with
            without a ramp.
    """
    points = [LoadPoint(rate=rate) for rate in load.rates]
    points += [LoadPoint(concurrency=count) for count in load.concurrency]
    if load.ramp is not Ramp.none and (load.ramp_to is None or not load.rates):
        raise ConfigError(
            f"load.ramp={load.ramp} goes from load.rates to load.ramp_to; set both, "
            "for example load.rates=[1] load.ramp_to=8"
        )
    if load.ramp is Ramp.none and load.ramp_to is not None:
        raise ConfigError(
            f"load.ramp_to={load.ramp_to:g} needs load.ramp=linear or load.ramp=exponential"
        )
    return points or [LoadPoint()]


def rate_at(share: float, rate: float, load: LoadSection) -> float:
    """Requests per second after `share` (0 to 1) of the requests have arrived."""
    if load.ramp is Ramp.none or load.ramp_to is None:
        return rate
    if load.ramp is Ramp.linear:
        return rate + (load.ramp_to - rate) * share
    return rate * (load.ramp_to / rate) ** share


def arrival_times(
    point: LoadPoint,
    load: LoadSection,
    recorded: Sequence[float | None],
    seed: int,
) -> list[float] | None:
    """Seconds after the start at which each request arrives, ascending.

    Args:
        point: a rate or a concurrency.
        load: burstiness and ramp.
        recorded: each request's recorded arrival in seconds, or None.
        seed: the same seed gives the same times.

    Returns:
        The times; None for a closed loop, where a request arrives when another one has ended.
    """
    if point.concurrency is not None:
        return None
    if point.rate is None:
        return [0.0 if at is None else at for at in recorded]
    source = random.Random(f"arrivals {seed}")
    times: list[float] = []
    now = 0.0
    for index in range(len(recorded)):
        rate = rate_at(index / max(1, len(recorded) - 1), point.rate, load)
        times.append(now)
        now += source.gammavariate(load.burstiness, 1 / (rate * load.burstiness))
    return times
