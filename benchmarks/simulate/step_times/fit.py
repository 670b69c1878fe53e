"""Fits the overheads of serving to the engine's flight recorder and the client's times.

A server receives calibration traffic. Its flight recorder has the beginning, the duration and the
sequences of each step. Together with the client's times, this gives the distributions of five
values: the ratio of step time to the table, the pause between steps, the time from a request's
sending to its first step, the time from a token's step to its arrival at the client, and the time
from the last token to the end of the answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

import msgspec
import numpy as np

from ostinato.benchmarks.load.job import LoadJob, LoadReport, RequestTimes
from ostinato.benchmarks.simulate.step_times.overheads import ServingOverheads, SizedValues
from ostinato.benchmarks.simulate.step_times.step_noise import SeenStep, fit_ratios
from ostinato.runtime.costs.cost_table import Chunk, CostTable

__all__ = ("EngineStep", "Recording", "fit_overheads")

_NUM_KEPT = 400  # values that are kept of one distribution
_LEAST_REQUESTS = 24  # requests of a group of one size, at least
_LEAST_STEPS = 20
_GRID = 160  # grid points of delays of which only bounds are known
_ROUNDS = 200

T = TypeVar("T")


class EngineStep(msgspec.Struct, frozen=True):
    """A step of the flight recorder (runtime/engine/flight_recorder.py)."""

    began_at: float  # unix seconds
    seconds: float
    num_tokens: int
    num_seqs: int
    num_decodes: int
    num_waiting: int
    entries: list[tuple[str, int, int]]  # (request id, start, tokens), of the first sequences

    @property
    def ended_at(self) -> float:
        return self.began_at + self.seconds


@dataclass(frozen=True, slots=True)
class Recording:
    """Traffic with the client's times, and the engine's steps meanwhile, in order."""

    job: LoadJob
    report: LoadReport
    steps: list[EngineStep]


def fit_overheads(costs: CostTable, recordings: Sequence[Recording]) -> ServingOverheads:
    """Fit the overheads.

    Args:
        costs: the step-cost table that steps are compared with.
        recordings: recordings of one server, in the order of their times.

    Raises:
        ValueError: there are too few steps or requests.
    """
    seen = _Seen()
    steps: list[SeenStep] = []
    for recording in recordings:
        steps += _compare(costs, recording.steps, len(steps))
        seen.pauses += _pauses(recording.steps)
        _add_requests(seen, recording)
    decode = [one for one in steps if not one.num_prompt_tokens]
    prompt = [one for one in steps if one.num_prompt_tokens]
    if len(steps) < _LEAST_STEPS or not decode or not prompt:
        raise ValueError(
            f"a calibration needs at least {_LEAST_STEPS} steps, some with prompts and some "
            f"without; it has {len(steps)}, {len(prompt)} of them with prompts"
        )
    if not seen.idle or not seen.ends:
        raise ValueError("a calibration needs answered requests, one of them to an idle engine")
    return ServingOverheads(
        decode=fit_ratios(decode),
        prompt=fit_ratios(prompt),
        pause_s=_kept(seen.pauses or [0.0]),
        idle_request_s=_kept(seen.idle),
        busy_request_s=_busy(seen),
        delivery_s=tuple(seen.deliveries[:: max(1, len(seen.deliveries) // (8 * _NUM_KEPT))]),
        end_s=_kept(seen.ends),
    )


class _Seen:
    """Measured values of all recordings."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.idle: list[float] = []
        # {log2 of the number of sequences in the step before, rounded down: bounds of delays}
        self.busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.deliveries: list[tuple[float, ...]] = []
        self.ends: list[float] = []


def _compare(costs: CostTable, steps: Sequence[EngineStep], first: int) -> list[SeenStep]:
    rows: list[SeenStep] = []
    ended_at = -math.inf
    for step in steps:
        # With overlap, a step is launched while the previous step runs.
        seconds = step.ended_at - max(step.began_at, ended_at)
        ended_at = step.ended_at
        table_s = _table_seconds(costs, step)
        if table_s > 0.0 and seconds > 0.0:
            num_prompt_tokens = step.num_tokens - step.num_decodes
            number = first + len(rows)
            rows.append(SeenStep(number, num_prompt_tokens, step.num_decodes, seconds / table_s))
    return rows


def _pauses(steps: Sequence[EngineStep]) -> list[float]:
    """Seconds between successive steps, if the engine was not idle between them."""
    return [
        max(0.0, late.began_at - early.ended_at)
        for early, late in pairwise(steps)
        if not _was_idle(early, late)
    ]


def _was_idle(before: EngineStep, step: EngineStep) -> bool:
    """Whether the engine was idle between two steps: no request took part in both."""
    if step.num_decodes or before.num_waiting:
        return False
    ids = {request_id for request_id, _, _ in before.entries}
    return not any(request_id in ids for request_id, _, _ in step.entries)


def _table_seconds(costs: CostTable, step: EngineStep) -> float:
    chunks = [Chunk(tokens, start) for _, start, tokens in step.entries if tokens > 1]
    contexts = [start for _, start, tokens in step.entries if tokens == 1]
    # Sequences that the record does not name are assumed to have the same contexts on average.
    unknown = step.num_tokens - step.num_decodes - sum(chunk.num_tokens for chunk in chunks)
    if unknown > 0:
        chunks.append(Chunk(unknown, 0))
    return costs.mixed_seconds(step.num_decodes, fmean(contexts) if contexts else 0.0, chunks)


def _add_requests(seen: _Seen, recording: Recording) -> None:
    """Add delays from requests to their first steps, and from steps to the arrival of tokens."""
    steps, report = recording.steps, recording.report
    entries: dict[str, list[tuple[int, int]]] = defaultdict(list)  # id -> (step, end of positions)
    for number, step in enumerate(steps):
        for request_id, start, tokens in step.entries:
            # The engine's request id is the client's id with a number appended.
            entries[request_id.partition("#")[0]].append((number, start + tokens))
    delays: dict[int, list[float]] = defaultdict(list)  # the delays of each step's tokens
    pairs = zip(recording.job.requests, report.requests, strict=False)
    for place, (request, times) in enumerate(pairs):
        found = entries.get(times.request_id, [])
        if times.status != "ok" or not found or not times.chunk_s:
            continue
        # The first requests of a closed loop are sent at once. They are left out.
        if place >= (recording.job.concurrency or 0):
            _add_admission(seen, steps, found[0][0], report.began_at + times.intended_s)
        num_prompt = len(request.prompt)
        sampled = [number for number, end in found if end >= num_prompt]
        seen.ends.append(max(0.0, times.end_s - times.chunk_s[-1]))
        for number, delay in _token_delays(steps, sampled, report.began_at, times):
            delays[number].append(delay)
    seen.deliveries += [tuple(delays[number]) for number in sorted(delays)]


def _add_admission(seen: _Seen, steps: Sequence[EngineStep], number: int, sent_at: float) -> None:
    """Add the delay of a request until its first step (`number`), or bounds of this delay."""
    step = steps[number]
    wait_s = step.began_at - sent_at
    if not number:
        seen.idle.append(max(0.0, wait_s))  # the engine was idle
        return
    before = steps[number - 1]
    if _was_idle(before, step):
        if sent_at > before.ended_at:
            seen.idle.append(max(0.0, wait_s))
    elif not before.num_waiting:  # otherwise the request can have waited for a row
        # The previous step would have admitted the request. So the request arrived after that step
        # began.
        bounds = (max(0.0, before.began_at - sent_at), max(0.0, wait_s))
        seen.busy[before.num_seqs.bit_length() - 1].append(bounds)


def _token_delays(
    steps: Sequence[EngineStep], sampled: Sequence[int], began_at: float, times: RequestTimes
) -> Iterable[tuple[int, float]]:
    """(step, seconds until its token reached the client). One piece may have several tokens."""
    if len(sampled) != times.num_output_tokens:
        return
    arrivals = [began_at + at for at in times.chunk_s]
    if len(arrivals) == len(sampled):
        for number, at in zip(sampled, arrivals, strict=True):
            yield number, max(0.0, at - steps[number].ended_at)
        return
    # Tokens arrive in order. A token is in the first piece that arrives after its step, or else in
    # the last piece.
    place = 0
    for number in sampled:
        while place < len(arrivals) - 1 and arrivals[place] < steps[number].ended_at:
            place += 1
        yield number, max(0.0, arrivals[place] - steps[number].ended_at)


def _busy(seen: _Seen) -> tuple[SizedValues, ...]:
    groups = _gather(seen.busy, _LEAST_REQUESTS)
    if not groups:
        return (SizedValues(1, _kept(seen.idle)),)
    return tuple(SizedValues(1 << power, _from_bounds(bounds)) for power, bounds in groups)


def _gather(found: dict[int, list[T]], least: int) -> list[tuple[int, list[T]]]:
    """Merge neighbouring groups until each has `least` values. A remainder joins the last group."""
    groups: list[tuple[int, list[T]]] = []
    gathered: list[T] = []
    for key in sorted(found):
        gathered += found[key]
        if len(gathered) >= least:
            groups.append((key, gathered))
            gathered = []
    if groups:
        groups[-1][1].extend(gathered)
    return groups


def _kept(values: Iterable[float]) -> tuple[float, ...]:
    """The values in ascending order; at most `_NUM_KEPT`, at evenly spaced quantiles."""
    found = sorted(values)
    if len(found) <= _NUM_KEPT:
        return tuple(found)
    shares = (np.arange(_NUM_KEPT) + 0.5) / _NUM_KEPT
    return tuple(float(one) for one in np.quantile(found, shares))


def _from_bounds(bounds: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Evenly spaced quantiles of a distribution, if only bounds of each value are known.

    The distribution is estimated by expectation-maximisation (Turnbull, 1976).
    """
    lows, highs = (np.array(column) for column in zip(*bounds, strict=True))
    grid = np.unique(np.quantile(np.concatenate([lows, highs]), np.linspace(0, 1, _GRID)))
    fits = (grid >= lows[:, None]) & (grid <= highs[:, None])
    fits = fits[fits.any(axis=1)].astype(float)
    weights = np.full(len(grid), 1.0 / len(grid))
    for _ in range(_ROUNDS):
        parts = fits * weights
        weights = (parts / parts.sum(axis=1, keepdims=True)).mean(axis=0)
    ends = np.cumsum(weights)
    shares = (np.arange(100) + 0.5) / 100
    places = np.minimum(np.searchsorted(ends, shares), len(grid) - 1)
    return tuple(float(grid[place]) for place in places)
