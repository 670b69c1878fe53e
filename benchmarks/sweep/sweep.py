"""`run bench --multirun`: one measurement for each combination of values.

    run bench --multirun cache.block_size=16,32 scheduler.max_num_batched_tokens=512,1024,2048
    run bench serve --multirun 'load.rates=[1],[2],[4]' scheduler.max_num_seqs=range(8,33,8)

Points run in child processes, so that a crash fails one point only. Points with the same model,
device, graphs and cache layout share a process, which keeps its loaded model and compiled program.
Each finished point is a file. So after an interruption the same command continues if the commit is
the same, and it repeats failed points.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import ostinato
from ostinato.benchmarks.bench.command import finish
from ostinato.benchmarks.machine.probes import commit_of
from ostinato.benchmarks.report.record import (
    Point,
    Record,
    conditions_of,
    read_records,
    write_record,
)
from ostinato.conf.compose import load_config
from ostinato.conf.environment import expand_user, require_writable
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig

__all__ = ("sweep",)

SweepPoint = tuple[dict[str, str], list[str]]
# Conditions that differ between points.
_OWN = ("time", "commit", "load_average", "model_reused", "startup_s", "startup_phases_s", "limits")


@dataclass(slots=True)
class _Task:
    """One point: its values of the varied keys, its configuration, its file."""

    chosen: dict[str, str]
    words: list[str]
    config: RunConfig
    path: Path

    @property
    def label(self) -> str:
        """The point's values, with the last parts of the keys if these are unique."""
        last = [key.rpartition(".")[2] for key in self.chosen]
        names = last if len(set(last)) == len(last) else list(self.chosen)
        return " ".join(f"{k}={v}" for k, v in zip(names, self.chosen.values(), strict=True))


def sweep(points: Sequence[SweepPoint], config_dir: str | None = None) -> int:
    """Measure every point that has no result yet; then print and write one report of all points.

    Returns 1 if a point failed or no point has results, else 0.

    Raises:
        ConfigError: a point's overrides are wrong, or `bench.output` is a file.
    """
    configs = [load_config(words, config_dir=config_dir) for _, words in points]
    folder = _folder(points, configs[0])
    tasks = [
        _Task(chosen, words, config, folder / f"point-{_digest(words)}.json")
        for (chosen, words), config in zip(points, configs, strict=True)
    ]
    commit = commit_of(Path(ostinato.__file__).parent)
    found = {task.label: _finished(task, commit) for task in tasks}
    waiting = [task for task in tasks if found[task.label] is None]
    kept = len(tasks) - len(waiting)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        bar = progress.add_task("sweep", total=len(tasks), completed=kept)
        for task, result in _run(
            waiting, config_dir, lambda t: progress.update(bar, description=t)
        ):
            found[task.label] = result
            write_record(result, task.path)
            progress.update(bar, advance=1)
    notes = [f"kept from an earlier run: {kept} of {len(tasks)} points"] if kept else []
    record = _merged(tasks, [one for one in found.values() if one is not None], notes)
    code = finish(record, configs[0], folder / "sweep.json")
    return 1 if any(point.error is not None for point in record.points) else code


def _folder(points: Sequence[SweepPoint], config: RunConfig) -> Path:
    name = f"sweep-{config.bench.kind}-{_digest([word for _, words in points for word in words])}"
    folder = expand_user(config.bench.output or Path("outputs/bench") / name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"bench.output={folder} is a file; a sweep writes a directory")
    require_writable(folder / "sweep.json", "bench.output")
    return folder


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def _finished(task: _Task, commit: str | None) -> Record | None:
    """The result of an earlier run of this commit, if there is one without an error."""
    if not task.path.is_file():
        return None
    try:
        [record] = read_records(task.path)
    except (ConfigError, ValueError):
        return None  # an incomplete file or an older format: the point is measured again
    failed = any(point.error is not None for point in record.points)
    return None if failed or record.conditions["commit"] != commit else record


def _run(
    tasks: Sequence[_Task], config_dir: str | None, on_begin: Callable[[str], None]
) -> Iterator[tuple[_Task, Record]]:
    """Yield results as they arrive; points that can share a loaded model run in one process."""
    groups: dict[str, list[_Task]] = {}
    for task in tasks:
        config = task.config
        shared = (config.model, config.device, config.graphs, config.cache.block_size)
        groups.setdefault(repr((*shared, config.cache.dtype)), []).append(task)
    for group in groups.values():
        worker: _Worker | None = None
        for task in group:
            if worker is None:
                worker = _Worker(config_dir)
            on_begin(task.label)
            answer = worker.measure(task.words)
            if "record" in answer:
                yield task, Record.from_dict(answer["record"])
                continue
            yield task, _failed(task, str(answer["error"]))
            if answer.get("died"):
                worker = None
        if worker is not None:
            worker.close()


class _Worker:
    """A process that measures one point after the other."""

    def __init__(self, config_dir: str | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ostinato.benchmarks.sweep.sweep_worker", config_dir or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, words: Sequence[str]) -> Mapping[str, Any]:
        """`{"record": ...}` or `{"error": text}`, with `died` if the process ended."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"  # noqa: PT018
        try:
            process.stdin.write(json.dumps(list(words)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        code = process.wait()
        return {"error": f"its process ended with code {code}", "died": True}

    def close(self) -> None:
        assert self._process.stdin is not None, "stdin=PIPE"
        self._process.stdin.close()
        self._process.wait()


def _failed(task: _Task, error: str) -> Record:
    point = Point(label=task.label, parameters=dict(task.chosen), metrics={}, error=error)
    return Record(
        kind=task.config.bench.kind.value, conditions=conditions_of(task.config), points=[point]
    )


def _merged(tasks: Sequence[_Task], records: Sequence[Record], notes: list[str]) -> Record:
    """One record of all points, with the conditions of the first; labels name the varied keys."""
    points: list[Point] = []
    for task, record in zip(tasks, records, strict=True):
        for point in record.points:
            several = len(record.points) > 1
            label = f"{task.label}, {point.label}" if several else task.label
            chosen = {key: _number(value) for key, value in task.chosen.items()}
            own = {name: record.conditions[name] for name in _OWN if name in record.conditions}
            points.append(
                replace(
                    point,
                    label=label,
                    parameters={**chosen, **point.parameters},
                    details={**point.details, "conditions": own},
                )
            )
        notes = notes + [f"{task.label}: {note}" for note in record.notes]
    kind = tasks[0].config.bench.kind.value
    swept = list(tasks[0].chosen)
    conditions = conditions_of(tasks[0].config, swept=swept)
    return Record(kind=kind, conditions=conditions, points=points, notes=notes)


def _number(value: str) -> str | float:
    try:
        return float(value)
    except ValueError:
        return value
