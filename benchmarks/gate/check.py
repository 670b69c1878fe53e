"""One check of the gate: times its work and a reference in turns, and reads stored ratios.

The work and the reference run one after the other within milliseconds. So a change of the machine's
speed affects both, and their ratio stays the same. Single-threaded work is timed by its processor
time, which other programs do not change. Multi-threaded work is timed by the wall clock, because
waiting threads use processor time too. The result of a check is the median ratio of its pairs of
turns, or another quantile (`share`). A check that fails is measured again, in case it was
disturbed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ostinato.conf.errors import ConfigError

__all__ = ("Check", "Finding", "measure", "read_ratios", "run_check", "write_ratios")

_MIN_TURN_S = 0.005  # a turn repeats its work until it takes about this long
_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The work that is timed, and its reference."""

    name: str
    what: str  # description, "work / reference"
    ours: Callable[[], object]
    reference: Callable[[], object]
    tolerance: float = 0.15  # allowed increase of the ratio over the stored one
    pairs: int = 31
    prepare: Callable[[], object] | None = None  # called before each turn of the work, not timed
    repeats: int | None = None  # runs of the work in a turn; None = as many as fill a turn
    clock: Callable[[], float] = time.perf_counter  # seconds
    share: float = 0.5  # the result is this quantile of the pairs' ratios; 0.5 = the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check."""

    name: str
    what: str
    ratio: float
    stored: float | None  # None = nothing is stored for this kind of machine
    tolerance: float
    ours_ms: float
    tries: int

    @property
    def is_regression(self) -> bool:
        return self.stored is not None and self.ratio > self.stored * (1.0 + self.tolerance)

    @property
    def change(self) -> float | None:
        """The change of the ratio relative to the stored ratio; above 0 is slower."""
        return None if self.stored is None else self.ratio / self.stored - 1.0


def measure(check: Check) -> tuple[float, float]:
    """(resulting ratio, median milliseconds of the work)."""
    ours_count = check.repeats or _count(check.ours, check.prepare, check.clock)
    reference_count = _count(check.reference, None, check.clock)
    ratios: list[float] = []
    seconds: list[float] = []
    for _ in range(check.pairs):
        before = _turn(check.reference, reference_count, check.clock)
        if check.prepare is not None:
            check.prepare()
        ours = _turn(check.ours, ours_count, check.clock)
        after = _turn(check.reference, reference_count, check.clock)
        ratios.append(2.0 * ours / (before + after))
        seconds.append(ours)
    ratio = sorted(ratios)[round(check.share * (len(ratios) - 1))]
    return ratio, 1000.0 * median(seconds)


def run_check(check: Check, stored: float | None) -> Finding:
    """Measure a check, and measure it again if it fails; the lowest ratio is the result."""
    ratio, ours_ms = measure(check)
    tries = 1
    limit = None if stored is None else stored * (1.0 + check.tolerance)
    while limit is not None and ratio > limit and tries <= _RETRIES:
        again, again_ms = measure(check)
        tries += 1
        if again < ratio:
            ratio, ours_ms = again, again_ms
    return Finding(
        name=check.name,
        what=check.what,
        ratio=ratio,
        stored=stored,
        tolerance=check.tolerance,
        ours_ms=ours_ms,
        tries=tries,
    )


def _turn(work: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    """Mean seconds of one run of `work`, over `count` runs."""
    begin = clock()
    for _ in range(count):
        work()
    return (clock() - begin) / count


def _count(
    work: Callable[[], object], prepare: Callable[[], object] | None, clock: Callable[[], float]
) -> int:
    """The number of runs that fill a turn. A first run, not counted, warms up."""
    seconds: list[float] = []
    for _ in range(3):
        if prepare is not None:
            prepare()
        seconds.append(_turn(work, 1, clock))
    return max(1, round(_MIN_TURN_S / max(min(seconds[1:]), 1e-7)))


def read_ratios(path: Path, machine: str) -> dict[str, float]:
    """{check: stored ratio} for a kind of machine; {} if there are none.

    Raises:
        ConfigError: the file was not written by `write_ratios`.
    """
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))[machine]
        return {str(name): float(ratio) for name, ratio in entries.items()}
    except KeyError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no ratios of the gate: {error}; store them again"
        ) from error


def write_ratios(path: Path, machine: str, ratios: Mapping[str, float]) -> None:
    """Store ratios of a machine. Ratios of other machines and other checks are kept."""
    everything = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = everything.get(machine, {})
    rounded = {name: round(ratio, 4) for name, ratio in ratios.items()}
    everything[machine] = dict(sorted((kept | rounded).items()))
    text = json.dumps(dict(sorted(everything.items())), indent=1)
    path.write_text(text + "\n", encoding="utf-8")
