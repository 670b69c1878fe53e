"""What serving costs on top of the step-cost table: measured on a running server, then fitted.

A few closed loops of short requests give the gap between tokens at several batch sizes; single
prompts of several lengths give the time to the first token. From those, by least squares of the
relative errors with no parameter below zero:

    gap   = decode_scale * table + step_s + token_s * batch
    first = prompt_scale * table + step_s + token_s + request_s

Then a closed loop of requests that end soon, so that every few steps have decodes and a prompt, is
simulated: mixed_scale is what makes it last as long as the real one did.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median

import numpy as np

from ostinato.benchmarks.load_job import JobRequest, LoadJob, LoadReport
from ostinato.benchmarks.load_run import Target, run_client
from ostinato.benchmarks.simulate.engine import EngineSpec, Overheads
from ostinato.benchmarks.simulate.jobs import simulate_job

__all__ = ("Calibration", "MixedRun", "Observation", "Observations", "fit_overheads", "observe")

_BATCHES = (1, 4, 16)
_BATCH_PROMPT, _BATCH_OUTPUT = 32, 32
_LENGTHS = (32, 192, 448)
_REPEATS = 3  # of each length
_MIXED_PROMPT, _MIXED_OUTPUT, _MIXED_BATCH, _MIXED_COUNT = 96, 4, 6, 36
_NUM_JITTER = 100  # shares at which disturbances are kept
_LEAST_SCALE, _MOST_SCALE = 0.5, 4.0
_BISECTIONS = 12


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that was measured: gaps of a batch, or first tokens of single prompts."""

    batch: int  # sequences that decoded together; 0 = first tokens
    tokens: int  # of the prompt, or the mean context of the batch
    seconds: tuple[float, ...]

    @property
    def usual_s(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class MixedRun:
    """A closed loop of requests that end soon, and how long it took."""

    job: LoadJob
    seconds: float


@dataclass(frozen=True, slots=True)
class Observations:
    """What one calibration, or several, measured."""

    points: list[Observation]
    mixed: list[MixedRun]

    def __add__(self, other: Observations) -> Observations:
        return Observations([*self.points, *other.points], [*self.mixed, *other.mixed])


class Calibration:
    """Sends the calibration's requests.

    Args:
        target: the server.
        vocab_size: ids lie below it.
        max_model_len: of the server.
        max_batch: sequences that it runs at once.
    """

    def __init__(self, target: Target, vocab_size: int, max_model_len: int, max_batch: int) -> None:
        self._target = target
        self._vocab_size = vocab_size
        self._lengths = [n for n in _LENGTHS if n + 2 <= max_model_len] or [max_model_len // 2]
        room = max_model_len - 2
        self._prompt = min(_BATCH_PROMPT, room // 2)
        self._output = min(_BATCH_OUTPUT, room // 2)
        self._batches = [n for n in _BATCHES if n <= max_batch]
        self._draw = random.Random(0)

    def run(self) -> Observations:
        """Measure once; a few seconds.

        Raises:
            EngineError: the load client ended without a report.
        """
        lengths = self._lengths * _REPEATS
        report = run_client(self._job(1, [(length, 1) for length in lengths]))
        firsts = [
            Observation(
                0,
                length,
                tuple(
                    one.chunk_s[0] - one.intended_s
                    for one, its in zip(report.requests, lengths, strict=True)
                    if its == length and one.chunk_s
                ),
            )
            for length in self._lengths
        ]
        gaps: list[Observation] = []
        for batch in self._batches:
            report = run_client(self._job(batch, [(self._prompt, self._output)] * batch))
            gaps.append(observe(report, batch, self._prompt))
        # Lengths differ, or all would end and begin together.
        mixed = self._job(
            min(_MIXED_BATCH, self._batches[-1]),
            [
                (min(_MIXED_PROMPT, 3 * self._prompt), min(_MIXED_OUTPUT + key % 7, self._output))
                for key in range(_MIXED_COUNT)
            ],
        )
        took = run_client(mixed).duration_s
        points = [one for one in (*firsts, *gaps) if one.seconds]
        return Observations(points, [MixedRun(mixed, took)])

    def _job(self, concurrency: int, sizes: Sequence[tuple[int, int]]) -> LoadJob:
        requests = [
            JobRequest(
                prompt=[self._draw.randrange(self._vocab_size) for _ in range(length)],
                max_tokens=max_tokens,
            )
            for length, max_tokens in sizes
        ]
        return LoadJob(
            url=self._target.url,
            model=self._target.model,
            requests=requests,
            concurrency=concurrency,
            return_token_ids=True,
            body={"temperature": 0.0, "ignore_eos": True},
            num_warmups=1,
        )


def observe(report: LoadReport, batch: int, prompt_tokens: int) -> Observation:
    """Gaps between tokens while all requests of a batch were under way."""
    begin = max((one.chunk_s[0] for one in report.requests if one.chunk_s), default=0.0)
    end = min((one.chunk_s[-1] for one in report.requests if one.chunk_s), default=0.0)
    gaps = tuple(
        late - early
        for one in report.requests
        for early, late in pairwise(one.chunk_s)
        if begin <= early and late <= end
    )
    output = max((len(one.chunk_s) for one in report.requests), default=0)
    return Observation(batch, prompt_tokens + output // 2, gaps)


def fit_overheads(spec: EngineSpec, observations: Observations) -> Overheads:
    """The overheads that explain the observations best.

    Args:
        spec: the server's engine.
        observations: of one calibration or several.

    Raises:
        ValueError: there are no gaps, or no first tokens.
    """
    costs = spec.costs
    gaps = [one for one in observations.points if one.batch]
    firsts = [one for one in observations.points if not one.batch]
    if not gaps or not firsts:
        raise ValueError("a calibration needs gaps of a batch and first tokens")
    decode_scale, step_s, token_s = _least_squares(
        [[costs.decode_seconds(one.batch, one.tokens), 1.0, one.batch] for one in gaps],
        [one.usual_s for one in gaps],
    )
    prompt_scale, request_s = _least_squares(
        [[costs.step_seconds(one.tokens, 1, 0), 1.0] for one in firsts],
        [max(one.usual_s - step_s - token_s, 1e-6) for one in firsts],
    )
    off = np.concatenate([np.asarray(one.seconds) - one.usual_s for one in gaps])
    shares = (np.arange(_NUM_JITTER) + 0.5) / _NUM_JITTER
    overheads = Overheads(
        decode_scale=decode_scale,
        prompt_scale=prompt_scale,
        mixed_scale=prompt_scale,
        step_s=step_s,
        token_s=token_s,
        request_s=request_s,
        jitter_s=tuple(float(one) for one in np.quantile(off, shares)),
    )
    return replace(overheads, mixed_scale=_mixed_scale(spec, overheads, observations.mixed))


def _mixed_scale(spec: EngineSpec, overheads: Overheads, runs: Sequence[MixedRun]) -> float:
    """With which the runs last as long in simulation, by bisection: they get longer with it."""
    if not runs:
        return overheads.mixed_scale
    wanted = sum(one.seconds for one in runs)

    def lasts(scale: float) -> float:
        served = replace(spec, overheads=replace(overheads, mixed_scale=scale))
        return sum(max(simulate_job(served, one.job).last_s, default=0.0) for one in runs)

    low, high = _LEAST_SCALE, _MOST_SCALE
    if lasts(high) < 1.1 * lasts(low):
        return overheads.mixed_scale  # hardly a step of the runs is mixed
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if lasts(middle) < wanted else (low, middle)
    return (low + high) / 2


def _least_squares(rows: list[list[float]], values: list[float]) -> list[float]:
    """The unknowns, none below 0 and the first, a scale, not below `_LEAST_SCALE`, with the least
    sum of squared relative errors. Unknowns are few, so that each choice of those that are not at
    their bound is tried.
    """
    matrix = np.asarray(rows) / np.asarray(values)[:, None]
    num_unknowns = matrix.shape[1]
    bounds = np.zeros(num_unknowns)
    bounds[0] = _LEAST_SCALE
    best, best_error = bounds, float("inf")
    for size in range(num_unknowns + 1):
        for free in combinations(range(num_unknowns), size):
            unknowns = bounds.copy()
            if free:
                rest = 1.0 - matrix @ np.where(np.isin(range(num_unknowns), free), 0.0, bounds)
                unknowns[list(free)] = np.linalg.lstsq(matrix[:, free], rest, rcond=None)[0]
            error = float(((matrix @ unknowns - 1.0) ** 2).sum())
            if (unknowns >= bounds - 1e-12).all() and error < best_error - 1e-15:
                best, best_error = unknowns, error
    return [float(one) for one in best]
