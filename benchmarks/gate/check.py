"""One check of the gate: our work timed beside a reference, and the stored ratios.

Ours and the reference run one after the other within milliseconds, so a change of the machine's
state affects both, and their ratio stays. Single-threaded work is timed by its processor time,
which other programs do not use up. Multi-threaded work is timed by the wall clock, because waiting
threads use processor time too. The result of a check is the median ratio of its pairs. A check that
seems to fail is measured again: a disturbance passes, a regression stays.
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

_MIN_TURN_S = 0.005  # a turn repeats its work until it takes about that long
_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is timed, and beside what."""

    name: str
    what: str  # "ours / reference", in words
    ours: Callable[[], object]
    reference: Callable[[], object]
    tolerance: float = 0.15  # by which the ratio may be above the stored one
    pairs: int = 31
    prepare: Callable[[], object] | None = None  # before each of our turns, not timed
    repeats: int | None = None  # of our work in a turn; None = as many as fill one
    clock: Callable[[], float] = time.perf_counter  # seconds
    share: float = 0.5  # of the pairs' ratios that lie below the one that counts; half = the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of a check."""

    name: str
    what: str
    ratio: float
    stored: float | None  # None = this machine has none yet
    tolerance: float
    ours_ms: float
    tries: int

    @property
    def is_regression(self) -> bool:
        return self.stored is not None and self.ratio > self.stored * (1.0 + self.tolerance)

    @property
    def change(self) -> float | None:
        """Relative to the stored ratio; above 0 is slower."""
        return None if self.stored is None else self.ratio / self.stored - 1.0


def measure(check: Check) -> tuple[float, float]:
    """(ratio that counts, median ms of our work)."""
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
    """Measure; again, when it seems to have failed, and the least counts."""
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
    """Seconds of one run of `work`, over `count` of them."""
    begin = clock()
    for _ in range(count):
        work()
    return (clock() - begin) / count


def _count(
    work: Callable[[], object], prepare: Callable[[], object] | None, clock: Callable[[], float]
) -> int:
    """Repeats that fill a turn; the first run, which warms up, does not count."""
    seconds: list[float] = []
    for _ in range(3):
        if prepare is not None:
            prepare()
        seconds.append(_turn(work, 1, clock))
    return max(1, round(_MIN_TURN_S / max(min(seconds[1:]), 1e-7)))


def read_ratios(path: Path, machine: str) -> dict[str, float]:
    """check -> stored ratio of such a machine; {} when it has none.

    Raises:
        ConfigError: the file is there and is not what `write_ratios` writes.
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
    """Store ratios of a machine beside those of others; checks that were not run keep theirs."""
    everything = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = everything.get(machine, {})
    rounded = {name: round(ratio, 4) for name, ratio in ratios.items()}
    everything[machine] = dict(sorted((kept | rounded).items()))
    text = json.dumps(dict(sorted(everything.items())), indent=1)
    path.write_text(text + "\n", encoding="utf-8")
