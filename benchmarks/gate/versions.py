"""Times two versions of the engine side by side: the working tree and a known commit.

    python -m ostinato.benchmarks.gate --against HEAD

Stored ratios come from another time and another process. On a shared machine they detect only a
loss of a fifth. Here two processes, one for each version, run the same steps in turns, milliseconds
apart. So the ratio of a pair depends almost only on the versions. The lower confidence bound of
99 % for the median of the pairs follows from order statistics, without a noise model. A version is
slower if this bound exceeds the limit.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, Self

from ostinato.runtime.errors import EngineError

__all__ = ("ALLOWED", "Comparison", "Worker", "compare_works", "extract", "lower_bound")

# A margin, because the memory of two processes of the same version is laid out differently.
ALLOWED = 0.03
_MISTAKE = 0.01  # probability that the lower bound is wrong
_MIN_PAIRS, _MAX_PAIRS = 15, 120
_WORK_S = 3.5  # seconds for one kind of step, both versions together
_WORKER = Path(__file__).parent / "worker.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The times of one kind of step in both versions."""

    name: str
    ratio: float  # this version's seconds over the other's, median of the pairs
    at_least: float  # the 99 % lower confidence bound of the ratio
    ours_ms: float
    num_pairs: int

    @property
    def is_slower(self) -> bool:
        return self.at_least > 1.0 + ALLOWED


def lower_bound(ratios: Sequence[float]) -> float:
    """The 99 % lower confidence bound of the median of the distribution of `ratios`.

    Minus infinity if there are too few ratios.
    """
    ordered, count = sorted(ratios), len(ratios)
    below, place = 0.5**count, 0  # the probability that no value of a sample is below the median
    if below > _MISTAKE:
        return float("-inf")
    while (more := below + comb(count, place + 1) * 0.5**count) <= _MISTAKE:
        below, place = more, place + 1
    return ordered[place]


class Worker:
    """A process that runs steps of one version.

    Args:
        tree: the version's files.
        bundles: a directory for its compiled bundles.
    """

    def __init__(self, tree: Path, bundles: Path) -> None:
        self._process = subprocess.Popen(
            # -P keeps modules in the script's folder from being imported.
            [sys.executable, "-P", str(_WORKER), str(bundles), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=tree,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def names(self) -> list[str]:
        """The names of the kinds of steps that it runs. Waits until the process is ready.

        Raises:
            EngineError: the process ended.
        """
        return self._read()

    def seconds(self, name: str) -> float:
        """Processor seconds of one turn of steps of a kind.

        Raises:
            EngineError: the process ended.
        """
        try:
            _pipe(self._process.stdin).write(f"{name}\n")
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            pass  # the process has ended; reading its answer reports that
        return self._read()

    def _read(self) -> Any:
        for line in _pipe(self._process.stdout):
            mark, _, text = line.partition(" ")
            if mark == "gate":
                return json.loads(text)
        raise EngineError(
            f"the engine of {self._process.args!r} ended with code {self._process.wait()}; run it "
            "by hand to see why"
        )


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the worker was started with pipes"
    return pipe


def extract(revision: str, root: Path, to: Path) -> str:
    """Write a commit's files to a directory; returns the commit's short name.

    Raises:
        EngineError: there is no such commit, or `root` is not a checkout.
    """
    try:
        name = _git(root, "rev-parse", "--short", f"{revision}^{{commit}}").decode().strip()
        data = _git(root, "archive", "--format=tar", name)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", b"") or str(error).encode()
        raise EngineError(
            f"--against {revision}: {told.decode(errors='replace').strip()}; name a commit of the "
            f"checkout in {root}"
        ) from error
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(to, filter="data")
    return name


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, check=True
    ).stdout


def compare_works(
    ours: Worker, other: Worker, words: Sequence[str], show: Callable[[str], None]
) -> list[Comparison]:
    """Measure every kind of step in both versions, in turns.

    Args:
        ours: this version.
        other: the version to compare with.
        words: measure only kinds whose names contain one of these; empty = all.
        show: called with the name of the kind that is measured.

    Raises:
        EngineError: a process ended.
    """
    other.names()
    found: list[Comparison] = []
    for name in ours.names():
        if not words or any(word in name for word in words):
            show(name)
            found.append(_compare(ours, other, name))
    return found


def _compare(ours: Worker, other: Worker, name: str) -> Comparison:
    for worker in (ours, other):  # the first turn warms up
        worker.seconds(name)
    ratios: list[float] = []
    seconds: list[float] = []
    begin = time.monotonic()
    while len(ratios) < _MIN_PAIRS or (
        len(ratios) < _MAX_PAIRS and time.monotonic() - begin < _WORK_S
    ):
        # The order alternates, so that being second in a pair affects both versions equally.
        if len(ratios) % 2:
            theirs, own = other.seconds(name), ours.seconds(name)
        else:
            own, theirs = ours.seconds(name), other.seconds(name)
        ratios.append(own / theirs)
        seconds.append(own)
    return Comparison(
        name=name,
        ratio=median(ratios),
        at_least=lower_bound(ratios),
        ours_ms=1000.0 * median(seconds),
        num_pairs=len(ratios),
    )
