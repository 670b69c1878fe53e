"""Writes the results of `run tune`: an option file with its provenance, and a plot."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

import ostinato
from ostinato.benchmarks.report.plot_style import plain_log
from ostinato.benchmarks.tune.goals import Goals, ServingMetrics
from ostinato.conf.root import RunConfig
from ostinato.conf.schema import Section

__all__ = (
    "Verified",
    "option_text",
    "plot_front",
    "provenance",
    "serve_command",
    "write_option",
)

_ENGINE = (
    *("model", "device", "cache", "scheduler", "speculation", "graphs", "runtime", "sampling"),
    "parallel",
)
# Addresses of one machine. The option is for other machines of this kind too.
_ADDRESSES = {"parallel": ("host", "ray_address")}


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """A configuration that was run on a real server."""

    label: str
    values: dict[str, Any]
    predicted: ServingMetrics | None
    measured: ServingMetrics


def option_text(config: RunConfig, provenance: Sequence[str]) -> str:
    """The YAML of an option: the engine's settings that differ from the defaults.

    `parallel.host` and `parallel.ray_address` are left out, because they are addresses of one
    machine.

    Args:
        config: the configuration to serve.
        provenance: lines of a comment about how the configuration was found.
    """
    changes: dict[str, dict[str, Any]] = {}
    for name in _ENGINE:
        section: Section = getattr(config, name)
        for key, (default, _) in type(section).settings().items():
            value = getattr(section, key)
            if value != default and key not in _ADDRESSES.get(name, ()):
                plain = value.value if isinstance(value, Enum) else value
                changes.setdefault(name, {})[key] = plain
    comment = "".join(f"# {line}".rstrip() + "\n" for line in provenance)
    body = yaml.safe_dump(changes, sort_keys=False) if changes else "{}\n"
    return f"# @package _global_\n{comment}{body}"


def write_option(config_dir: Path, name: str, text: str) -> Path:
    """Write `<config_dir>/tuned/<name>.yaml` atomically."""
    path = config_dir / "tuned" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path


def serve_command(config_dir: Path, name: str) -> str:
    """The command line that serves a written option."""
    own = Path(ostinato.__file__).parent / "conf"
    words = ["run", "serve"]
    built_in = {own.resolve(), (Path(ostinato.__file__).parent.parent / "conf").resolve()}
    if config_dir.resolve() not in built_in:
        words += ["--config-dir", str(config_dir)]
    return shlex.join([*words, f"tuned={name}"])


def provenance(
    config: RunConfig, goals: Goals, facts: Mapping[str, str], best: Verified
) -> list[str]:
    """The comment at the head of an option."""
    measured, share = best.measured, f"p{goals.percentile:g}"
    return [
        f"Made by run tune on {datetime.now(UTC):%Y-%m-%d}, commit {facts['commit']}, on "
        f"{facts['machine']}.",
        f"Traffic: {facts['traffic']}",
        f"Goals: {goals.describe() or 'none'}; objective {goals.objective.value}.",
        f"Measured: TTFT {share} {measured.ttft_ms:.0f} ms, ITL {share} {measured.itl_ms:.1f} ms, "
        f"{measured.throughput:.0f} output tokens/s.",
        f"Search: {config.tune.trials} simulated configurations, seed {config.tune.seed}.",
    ]


def plot_front(
    path: Path,
    goals: Goals,
    simulated: Sequence[ServingMetrics],
    front: Sequence[ServingMetrics],
    verified: Sequence[Verified],
    title: str,
) -> None:
    """Plot TTFT against ITL of all configurations that were tried, with the goals, as PNG.

    Args:
        path: the file to write.
        goals: drawn as lines; the region that meets them is shaded.
        simulated: every configuration of the search.
        front: the Pareto front.
        verified: real runs, connected with their predictions.
        title: the title of the plot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    drawn = axes.scatter(
        [one.ttft_ms for one in simulated],
        [one.itl_ms for one in simulated],
        c=[one.throughput for one in simulated],
        s=16,
        cmap="viridis",
        label="simulated",
    )
    figure.colorbar(drawn, ax=axes, label="output tokens/s")
    edge = sorted((one.ttft_ms, one.itl_ms) for one in _lower_left(front))
    axes.plot(
        *zip(*edge, strict=True), color="0.5", lw=1, zorder=0, label="Pareto front, simulated"
    )
    for index, one in enumerate(verified):
        is_first = index == 0
        x, y = one.measured.ttft_ms, one.measured.itl_ms
        axes.scatter(
            x,
            y,
            marker="X" if is_first else "*",
            s=130,
            edgecolors="black",
            zorder=3,
            color="tab:red" if is_first else "tab:orange",
            label="measured, as configured" if is_first else "measured" if index == 1 else None,
        )
        axes.annotate(one.label, (x, y), xytext=(7, 6), textcoords="offset points", fontsize=9)
        if one.predicted is not None:
            axes.plot(
                [one.predicted.ttft_ms, x], [one.predicted.itl_ms, y], color="0.3", lw=0.8, ls=":"
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    if goals.ttft_ms is not None:
        axes.axvline(goals.ttft_ms, color="tab:green", ls="--", lw=1)
    if goals.itl_ms is not None:
        axes.axhline(goals.itl_ms, color="tab:green", ls="--", lw=1, label="goals")
    if goals.ttft_ms is not None and goals.itl_ms is not None:
        left, bottom = axes.get_xlim()[0], axes.get_ylim()[0]
        axes.fill_between([left, goals.ttft_ms], bottom, goals.itl_ms, color="tab:green", alpha=0.1)
        axes.set_xlim(left=left)
        axes.set_ylim(bottom=bottom)
    axes.set_xlabel(f"time to first token, p{goals.percentile:g}, ms")
    axes.set_ylabel(f"inter-token latency, p{goals.percentile:g}, ms")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _lower_left(points: Sequence[ServingMetrics]) -> list[ServingMetrics]:
    """The points for which no different point is at least as good in both TTFT and ITL."""
    return [
        one
        for one in points
        if not any(
            other.ttft_ms <= one.ttft_ms
            and other.itl_ms <= one.itl_ms
            and (other.ttft_ms, other.itl_ms) != (one.ttft_ms, one.itl_ms)
            for other in points
        )
    ]
