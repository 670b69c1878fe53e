"""Predicts the speed of serving on one GPU or many, and writes the tables of docs/scaling.md.

    python -m ostinato.benchmarks.parallel.scaling_forecast            # cases without results
    python -m ostinato.benchmarks.parallel.scaling_forecast --again    # all; minutes on two cores

Each case is one command of `run simulate`. Its traffic comes from a seed, and its step costs from
data sheets, so that every run has the same figures on every machine. The results are in
benchmarks/results/scaling-forecast.json, with the commands.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.plot_style import COLOURS, STYLE, make_axes, plain_log
from ostinato.benchmarks.simulate.command import simulated_record
from ostinato.conf.compose import load_config

__all__ = (
    "FLEETS",
    "LAYOUTS",
    "PAGE",
    "RESULTS",
    "Fleet",
    "Layout",
    "command_line",
    "forecast",
    "with_tables",
)

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs/scaling.md"
RESULTS = _ROOT / "benchmarks/results/scaling-forecast.json"
_PLOT = _ROOT / "docs/images/scaling-forecast.png"
_LOADS = (2, 8, 32)  # requests in progress for each GPU
_MOST = 128  # requests in progress for each GPU, for layouts that are `full`
_CHAT = ("workload=random", "workload.input_len=1024", "workload.output_len=256")
_NAMES = {
    "llama-8b": "Llama 8B",
    "llama-70b": "Llama 70B",
    "qwen3-235b-a22b": "Qwen 3 235B-A22B (mixture of experts)",
}


class Layout(NamedTuple):
    """How one engine is divided among H100 GPUs."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    link: str = "nvlink"  # between the ranks of a stage
    stage_link: str = ""  # between stages; empty = as `link`
    full: bool = False  # whether it is also predicted with `_MOST` requests for each GPU
    max_num_seqs: int = 1024

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def label(self) -> str:
        """The division in a few words: `tensor 8 x pipeline 2`."""
        parts = [f"tensor {self.tensor}"] if self.tensor > 1 or self.pipeline == 1 else []
        parts += [f"pipeline {self.pipeline}"] if self.pipeline > 1 else []
        return " x ".join(parts)

    @property
    def links(self) -> str:
        """The links between the GPUs."""
        if self.num_gpus == 1:
            return ""
        return f"{self.link}, {self.stage_link}" if self.stage_link else self.link

    def words(self) -> list[str]:
        """The settings of the engine, as on a command line."""
        found = [f"model={self.model}", "simulate.device=h100"]
        if self.tensor > 1:
            found.append(f"parallel.tensor={self.tensor}")
        if self.pipeline > 1:
            found.append(f"parallel.pipeline={self.pipeline}")
        if self.link != "nvlink":
            found.append(f"simulate.link={self.link}")
        if self.stage_link:
            found.append(f"simulate.stage_link={self.stage_link}")
        return found

    def commands(self) -> list[list[str]]:
        """Commands for one request at a time, and then for the loads of each GPU."""
        counts = [load * self.num_gpus for load in _LOADS]
        busy = f"load.concurrency=[{','.join(map(str, counts))}]"
        alone = [*self.words(), *_CHAT, "workload.num_requests=8", "load.concurrency=[1]"]
        requests = f"workload.num_requests={3 * counts[-1]}"
        seqs = f"scheduler.max_num_seqs={self.max_num_seqs}"
        found = [alone, [*self.words(), *_CHAT, requests, seqs, busy]]
        if self.full:
            most = _MOST * self.num_gpus
            sizes = [f"workload.num_requests={2 * most}", f"load.concurrency=[{most}]"]
            found.append([*self.words(), *_CHAT, seqs, *sizes])
        return found


class Fleet(NamedTuple):
    """Engines behind a router, and traffic in proportion to them."""

    layout: Layout
    num_engines: int
    router: str
    rate: float  # requests a second of each engine
    # prefixes of 3,072 tokens; each prompt begins with one of them; 0 = no prefixes
    num_prefixes: int = 0
    requests: int = 60  # of each engine

    def command(self) -> list[str]:
        """The words of the command line."""
        traffic = list(_CHAT)
        if self.num_prefixes:
            traffic = ["workload=prefix", "workload.input_len=128", "workload.output_len=128"]
            traffic += [f"workload.num_prefixes={self.num_prefixes}", "workload.prefix_len=3072"]
        return [
            *self.layout.words(),
            *traffic,
            f"workload.num_requests={self.requests * self.num_engines}",
            f"load.rates=[{self.rate * self.num_engines:g}]",
            f"simulate.replicas={self.num_engines}",
            f"simulate.router={self.router}",
        ]


LAYOUTS = (
    Layout("llama-8b", full=True),
    Layout("llama-8b", 2, full=True),
    Layout("llama-8b", 2, link="pcie"),
    Layout("llama-8b", 4, full=True),
    Layout("llama-8b", 8),
    Layout("llama-70b", 4, full=True),
    Layout("llama-70b", 4, link="pcie"),
    Layout("llama-70b", 1, 4, link="pcie"),
    Layout("llama-70b", 8, full=True),
    Layout("llama-70b", 4, 2),
    Layout("llama-70b", 16, link="infiniband"),
    Layout("llama-70b", 8, 2, stage_link="infiniband"),
    Layout("llama-70b", 8, 2, stage_link="ethernet"),
    Layout("qwen3-235b-a22b", 8, max_num_seqs=256),
    Layout("qwen3-235b-a22b", 8, link="pcie", max_num_seqs=256),
    Layout("qwen3-235b-a22b", 4, 2, max_num_seqs=256),
    Layout("qwen3-235b-a22b", 16, link="infiniband", max_num_seqs=512),
    Layout("qwen3-235b-a22b", 8, 2, stage_link="infiniband", max_num_seqs=512),
)
_8B, _70B, _235B = LAYOUTS[0], LAYOUTS[5], LAYOUTS[13]
FLEETS = (
    Fleet(_8B, 1, "least_load", 12, requests=600),
    Fleet(_8B, 8, "least_load", 12, requests=200),
    Fleet(_8B, 64, "least_load", 12),
    Fleet(_8B, 1000, "least_load", 12, requests=36),
    Fleet(_70B, 2, "least_load", 6, requests=400),
    Fleet(_70B, 16, "least_load", 6, requests=100),
    Fleet(_70B, 250, "least_load", 6, requests=30),
    Fleet(_235B, 1, "least_load", 8, requests=600),
    Fleet(_235B, 8, "least_load", 8, requests=200),
    Fleet(_235B, 125, "least_load", 8, requests=40),
    *(Fleet(_8B, 8, router, 7.5, 256, 150) for router in ("least_load", "prefix_aware")),
    *(Fleet(_8B, 64, router, 7.5, 512) for router in ("least_load", "prefix_aware")),
)
_KEPT = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "prefix_hit_rate")


def forecast(command: list[str]) -> list[dict[str, Any]]:
    """The points that `run simulate` predicts: the load, and some of its figures.

    Args:
        command: the words after `run simulate`.
    """
    record = simulated_record(load_config(command))
    return [
        {
            "load": point.label,
            **{name: _rounded(point.metrics[name].value) for name in _KEPT},
        }
        for point in record.points
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _predict(results: dict[str, Any]) -> None:
    """Add the results of cases that have none, and write them to the file one by one.

    The file has the order of the cases.
    """
    layouts = [command for each in LAYOUTS for command in each.commands()]
    commands = [*layouts, *(fleet.command() for fleet in FLEETS)]
    lines = [command_line(command) for command in commands]
    for command, line in zip(commands, lines, strict=True):
        if line in results:
            continue
        print(line, file=sys.stderr, flush=True)
        results[line] = forecast(command)
        ordered = {one: results[one] for one in lines if one in results}
        write_json(ordered, RESULTS)


def command_line(command: list[str]) -> str:
    """The command as it is typed."""
    return "run simulate " + " ".join(command)


def _of(results: dict[str, Any], command: list[str]) -> list[dict[str, Any]]:
    return results[command_line(command)]


def _points(results: dict[str, Any], layout: Layout) -> list[dict[str, Any]]:
    return [point for command in layout.commands() for point in _of(results, command)]


def _layout_table(results: dict[str, Any], model: str) -> str:
    head = "| GPUs | an engine | links | ms a token, alone |"
    head += "".join(f" {load} for each GPU |" for load in (*_LOADS, _MOST))
    lines = [head, "|---" * (5 + len(_LOADS)) + "|"]
    for layout in LAYOUTS:
        if layout.model != model:
            continue
        alone, *loaded = _points(results, layout)
        cells = [str(layout.num_gpus), layout.label, layout.links, f"{alone['itl_p50']:.1f}"]
        cells += [
            f"{one['output_throughput'] / layout.num_gpus:,.0f} ({one['itl_p50']:.0f} ms)"
            for one in loaded
        ]
        cells += [""] * (1 + len(_LOADS) - len(loaded))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _fleet_table(results: dict[str, Any], has_prefixes: bool) -> str:
    head = "| model | GPUs | engines | router | requests/s | output tokens/s |"
    head += " TTFT p50, p99 | ITL p50, p99 |" + (" prompt tokens found |" if has_prefixes else "")
    lines = [head, "|---" * (9 if has_prefixes else 8) + "|"]
    for fleet in FLEETS:
        if bool(fleet.num_prefixes) != has_prefixes:
            continue
        (point,) = _of(results, fleet.command())
        cells = [
            _NAMES[fleet.layout.model].split(" (")[0],
            f"{fleet.num_engines * fleet.layout.num_gpus:,}",
            f"{fleet.num_engines:,} of {fleet.layout.label}",
            f"`{fleet.router}`",
            f"{fleet.rate * fleet.num_engines:,.0f}",
            f"{point['output_throughput']:,.0f}",
            f"{point['ttft_p50']:,.0f}, {point['ttft_p99']:,.0f} ms",
            f"{point['itl_p50']:.0f}, {point['itl_p99']:.0f} ms",
        ]
        cells += [f"{point['prefix_hit_rate']:.0%}"] if has_prefixes else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_tables(page: str, results: dict[str, Any]) -> str:
    """The page with its tables replaced. Each table is between two comments with its name."""
    tables = {model: _layout_table(results, model) for model in _NAMES}
    tables["fleets"] = _fleet_table(results, has_prefixes=False)
    tables["prefixes"] = _fleet_table(results, has_prefixes=True)
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        head, rest = page.split(begin)
        page = head + begin + table + end + rest.split(end)[1]
    return page


def _draw(results: dict[str, Any], file: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure, found = make_axes(len(_NAMES), height=5.0)
        for axes, (model, name) in zip(found, _NAMES.items(), strict=True):
            layouts = [one for one in LAYOUTS if one.model == model]
            for layout, colour in zip(layouts, COLOURS, strict=False):
                points = _points(results, layout)
                label = layout.label + (f", {layout.links}" if layout.links else "")
                axes.plot(
                    [one["itl_p50"] for one in points],
                    [one["output_throughput"] / layout.num_gpus for one in points],
                    "o-",
                    color=colour,
                    markersize=3,
                    linewidth=1.2,
                    label=label,
                )
            axes.set(xscale="log", yscale="log", title=name.split(" (")[0])
            axes.set_xlabel("ms between tokens, median")
            plain_log(axes.xaxis)
            plain_log(axes.yaxis)
            if axes is not found[0]:
                # with two decades there is no room for the labels 20 and 50
                axes.xaxis.set_minor_formatter("")
            axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
        found[0].set_ylabel("output tokens/s of each GPU")
        figure.savefig(file, dpi=160)


def main() -> int:
    """Predict the cases that have no results, or all, and write the tables and the figure."""
    parser = argparse.ArgumentParser(description="Predicts the speed of serving on GPUs.")
    parser.add_argument("--again", action="store_true", help="predict all cases again")
    again = parser.parse_args().again or not RESULTS.exists()
    results: dict[str, Any] = {} if again else json.loads(RESULTS.read_text())
    _predict(results)
    PAGE.write_text(with_tables(PAGE.read_text(), results))
    _draw(results, _PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
