"""`Record`: the result of a benchmark, with points, metrics and conditions.

Every kind of `run bench` writes the format of `benchmarks/report/schema.json`: a list of points,
each with its parameters and its metrics. A metric has one value, its unit, whether higher or lower
is better, and every single measurement. Data that only one kind has are in a point's `details`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import ostinato
from ostinato.benchmarks.machine.probes import commit_of
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.environment import expand_user, require_writable
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.runtime.machine_info import cpu_name, gpu_names, package_versions

__all__ = (
    "SCHEMA_VERSION",
    "Metric",
    "Point",
    "Record",
    "append_record",
    "conditions_of",
    "output_path",
    "read_records",
    "write_record",
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure."""

    value: float  # the median of the runs, or the only measurement
    unit: str = ""
    better: str = ""  # higher, lower, or empty when neither is
    runs: tuple[float, ...] = ()  # every measurement, when there are several

    @staticmethod
    def of(runs: Sequence[float], unit: str, better: str = "") -> Metric:
        """The median of several measurements."""
        return Metric(statistics.median(runs), unit, better, tuple(runs))


@dataclass(slots=True, kw_only=True)
class Point:
    """The measurements at one setting."""

    label: str
    parameters: dict[str, Any]  # the settings of this point
    metrics: dict[str, Metric]
    details: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why there are no metrics, in one line


@dataclass(slots=True, kw_only=True)
class Record:
    """A whole result."""

    kind: str
    conditions: dict[str, Any]
    points: list[Point]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in the file."""
        points: list[dict[str, Any]] = []
        for point in self.points:
            entry: dict[str, Any] = {
                "label": point.label,
                "parameters": point.parameters,
                "metrics": {
                    name: {"value": m.value, "unit": m.unit, "better": m.better}
                    | ({"runs": list(m.runs)} if m.runs else {})
                    for name, m in point.metrics.items()
                },
                "details": point.details,
            }
            if point.error is not None:
                entry["error"] = point.error
            points.append(entry)
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "conditions": self.conditions,
            "points": points,
            "notes": self.notes,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Record:
        """Make a record from plain data that fits the schema."""
        points = [
            Point(
                label=entry["label"],
                parameters=entry["parameters"],
                metrics={
                    name: Metric(m["value"], m["unit"], m["better"], tuple(m.get("runs", ())))
                    for name, m in entry["metrics"].items()
                },
                details=entry["details"],
                error=entry.get("error"),
            )
            for entry in data["points"]
        ]
        return Record(
            kind=data["kind"],
            conditions=data["conditions"],
            points=points,
            notes=list(data["notes"]),
        )


def conditions_of(config: RunConfig, **more: Any) -> dict[str, Any]:
    """The conditions of a measurement: configuration, commit, versions, machine, threads, time.

    HTTP headers are left out, because they may hold API keys.
    """
    resolved = dataclasses.asdict(config)
    resolved["load"]["headers"] = dict.fromkeys(resolved["load"]["headers"], "(not kept)")
    memory = psutil.virtual_memory().total / 2**30
    clock = time.get_clock_info("perf_counter")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [word for word in sys.argv[1:] if "load.headers" not in word],
        "commit": commit_of(Path(ostinato.__file__).parent),
        "config": resolved,
        "model": config.model.name or config.model.path or "ostinato-demo",
        "versions": package_versions(),
        "machine": {
            "cpu": cpu_name(),
            "gpus": gpu_names(),
            "memory_gib": round(memory, 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "threads": config.device.threads or len(_affinity()),
        "clock": {"name": clock.implementation, "resolution_s": clock.resolution},
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        **more,
    }


def _affinity() -> list[int]:
    process = psutil.Process()
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else [0]  # type: ignore[return-value]


def output_path(output: str, kind: str, key: str = "bench.output") -> Path:
    """The path of the result file; its folder is created.

    Args:
        output: the configured path; empty = a new file in `outputs/bench`.
        kind: the beginning of the new file's name.
        key: the setting that has `output`, for messages.

    Raises:
        ConfigError: the path is a directory, or cannot be written.
    """
    name = f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path = expand_user(output) if output else Path("outputs/bench") / name
    if path.is_dir():
        raise ConfigError(f"{key}={output} is a directory; it must be a file")
    require_writable(path, key)
    return path


def write_record(record: Record, path: Path) -> None:
    """Write the file atomically."""
    write_json(record.to_dict(), path)


def append_record(record: Record, path: Path) -> None:
    """Append one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record.to_dict()) + "\n")


def read_records(path: Path) -> list[Record]:
    """Every result of a JSON or JSON-lines file.

    Raises:
        ConfigError: the file is missing, not JSON, or does not fit benchmarks/report/schema.json.
    """
    import jsonschema

    try:
        text = expand_user(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        try:
            found = [json.loads(text)]
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from error
    if not found:
        raise ConfigError(f"{path} is empty")
    schema = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))
    for data in found:
        try:
            jsonschema.validate(data, schema)
        except jsonschema.ValidationError as error:
            raise ConfigError(
                f"{path} is not a result of run bench: {error.json_path}: {error.message:.200}"
            ) from error
    return [Record.from_dict(data) for data in found]
