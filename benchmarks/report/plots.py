"""Plots of a result: latency over load, gaps between tokens, steps over time, Pareto front.

Each plot is a function from a record to a matplotlib figure. It returns None if the record lacks
the data. matplotlib is imported when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.benchmarks.report.plot_style import (
    AXIS,
    COLOURS,
    INK,
    STYLE,
    WIDTH,
    dress,
    make_axes,
    plain_log,
    whole_ticks,
)
from ostinato.benchmarks.report.record import Point, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ("Plot", "draw", "pareto_front")

_MAX_SERIES = 6  # lines or histograms in one plot


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure and the words around it."""

    name: str  # name of its file
    title: str
    text: str  # how to read it
    figure: Figure


def _busiest(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: _value(point, "peak_concurrency") or 0)


def _value(point: Point, name: str) -> float | None:
    metric = point.metrics.get(name)
    return None if metric is None else metric.value


def _measured(record: Record, *names: str) -> list[Point]:
    """Points that have all of these metrics."""
    return [point for point in record.points if all(name in point.metrics for name in names)]


def pareto_front(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Indices of the Pareto front (lower cost, higher gain), by ascending cost."""
    order = sorted(range(len(costs)), key=lambda place: (costs[place], -gains[place]))
    front: list[int] = []
    best = float("-inf")
    for place in order:
        if gains[place] > best:
            front.append(place)
            best = gains[place]
    return front


def latency_against_load(record: Record) -> Figure | None:
    """TTFT and ITL over the load that was reached."""
    points = _measured(record, "ttft_p50", "itl_p50", "request_throughput")
    if len(points) < 2 or record.kind != "serve" or record.conditions.get("swept"):
        return None
    points.sort(key=lambda point: point.metrics["request_throughput"].value)
    rates = [point.metrics["request_throughput"].value for point in points]
    figure, (left, right) = make_axes(2)
    for axes, name, title in (
        (left, "ttft", "time to first token"),
        (right, "itl", "between tokens"),
    ):
        for figure_name, colour in (("p50", COLOURS[0]), ("p99", COLOURS[1])):
            values = [_value(point, f"{name}_{figure_name}") for point in points]
            if None not in values:
                axes.plot(rates, values, "o-", color=colour, label=figure_name)  # type: ignore[arg-type]
        goal = record.conditions["config"]["slo"][f"{name}_ms"]
        if goal is not None:
            axes.axhline(goal, color=AXIS, linestyle="--", linewidth=1, label="goal")
        axes.set(xlabel="requests answered per second", ylabel="ms", title=title, ylim=(0, None))
        axes.legend(frameon=False)
    return figure


def itl_histogram(record: Record) -> Figure | None:
    """A histogram of the gaps between pieces of output."""
    found = [
        (point.label, point.details["itl_histogram"])
        for point in record.points
        if point.details.get("itl_histogram", {}).get("counts")
    ]
    if not found:
        return None
    figure, [axes] = make_axes()
    for place, (label, histogram) in enumerate(found[:_MAX_SERIES]):
        total = sum(histogram["counts"])
        shares = [100 * count / total for count in histogram["counts"]]
        edges = histogram["edges_ms"]
        ends = [*edges, edges[-1] * 10**0.1]
        axes.stairs(shares, ends, color=COLOURS[place], label=label, linewidth=1.6)
        axes.stairs(shares, ends, color=COLOURS[place], alpha=0.12, fill=True)
    axes.set(xscale="log", xlabel="ms between two pieces of output", ylabel="% of the gaps")
    plain_log(axes.xaxis)
    axes.legend(frameon=False)
    return figure


def pareto(record: Record) -> Figure | None:
    """Throughput against latency, with the front."""
    words = {
        "itl_p50": "median ms between tokens",
        "ttft_p50": "median ms to the first token",
        "time_per_output_token": "ms an output token, prompts included",
    }
    cost = next((name for name in words if len(_measured(record, name)) > 1), None)
    if cost is None or record.kind not in ("serve", "compare", "latency"):
        return None  # in other kinds, points have different requests
    points = _measured(record, cost, "output_throughput")
    if len(points) < 2:
        return None
    costs = [point.metrics[cost].value for point in points]
    gains = [point.metrics["output_throughput"].value for point in points]
    front = pareto_front(costs, gains)
    figure, [axes] = make_axes(height=4.0)
    if len(front) < len(points):
        axes.plot(costs, gains, "o", color=COLOURS[5], alpha=0.75, label="measured")
    axes.plot(
        [costs[p] for p in front],
        [gains[p] for p in front],
        "o-",
        color=COLOURS[1],
        label="Pareto front",
    )
    for place in front if len(points) > 12 else range(len(points)):
        axes.annotate(
            points[place].label,
            (costs[place], gains[place]),
            textcoords="offset points",
            xytext=(7, -4),
            fontsize=8,
            color=INK,
        )
    axes.set(xlabel=words[cost], ylabel="output tokens/s")
    axes.margins(x=0.18, y=0.12)
    axes.legend(frameon=False, loc="best")
    return figure


def step_timeline(record: Record) -> Figure | None:
    """The time of each engine step, and its tokens."""
    found = [p for p in record.points if p.details.get("steps", {}).get("seconds")]
    if not found:
        return None
    in_process = "roofline_share" in found[0].metrics
    point = (
        max(found, key=lambda p: len(p.details["steps"]["seconds"]))
        if in_process
        else (_busiest(found))
    )
    steps = point.details["steps"]
    total, there = int(_value(point, "steps") or 0), len(steps["seconds"])
    # The counter includes the warm-up, so a smaller difference is not mentioned.
    kept = f", {there:,} of {total:,}" if there < 0.8 * total else ""
    begin = steps["begin_s"]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    widths = [max(s, 1e-4) for s in steps["seconds"]]
    draws: dict[str, Any] = {"align": "edge", "linewidth": 0, "rasterized": len(begin) > 1500}
    upper.bar(begin, [1000 * s for s in steps["seconds"]], widths, color=COLOURS[0], **draws)
    upper.set(ylabel="ms a step", title=f"steps of {point.label}{kept}")
    lower.bar(
        begin, steps["decode_tokens"], widths, color=COLOURS[2], label="decode tokens", **draws
    )
    lower.bar(
        begin,
        steps["prompt_tokens"],
        widths,
        bottom=steps["decode_tokens"],
        color=COLOURS[3],
        label="prompt tokens",
        **draws,
    )
    lower.set(xlabel="seconds", ylabel="tokens a step", yscale="symlog", ylim=(0, None))
    lower.set_ylim(0, 4 * lower.get_ylim()[1])  # room for the legend
    plain_log(lower.yaxis)
    lower.legend(frameon=False, ncols=2, loc="upper right")
    for axes in (upper, lower):
        dress(axes)
    return figure


def server_timeline(record: Record) -> Figure | None:
    """The server's batch, queue and cache over time, for the busiest point."""
    found = [p for p in record.points if len(p.details.get("server", {}).get("at_s", ())) > 1]
    if not found:
        return None
    point = _busiest(found)
    columns = point.details["server"]
    figure, (left, right) = make_axes(2)
    at = columns["at_s"]
    for name, colour in (("running", COLOURS[0]), ("waiting", COLOURS[1])):
        left.plot(at, columns[name], color=colour, label=name, drawstyle="steps-post")
    highest = max(1, *columns["running"], *columns["waiting"])
    left.set(xlabel="seconds", ylabel="sequences", title=f"batch at {point.label}")
    left.set(ylim=(0, 1.3 * highest))
    whole_ticks(left.yaxis)
    left.legend(frameon=False, ncols=2, loc="upper right")
    right.plot(at, [100 * u for u in columns["kv_usage"]], color=COLOURS[4])
    right.set(xlabel="seconds", ylabel="% of the KV blocks", title="KV cache", ylim=(0, None))
    return figure


def request_timeline(record: Record) -> Figure | None:
    """Up to 400 requests of the busiest point: waiting for the first token, then streaming."""
    found = [p for p in record.points if p.details.get("requests")]
    if not found or len(found[-1].details["requests"]) < 2:
        return None
    point = _busiest(found)
    rows = [row for row in point.details["requests"] if row["end_s"] > 0][:400]
    if not rows:
        return None
    figure, [axes] = make_axes(height=3.8)
    for place, row in enumerate(rows):
        first = row["first_s"]
        if row["status"] != "ok" or first is None:
            axes.plot([row["intended_s"], row["end_s"]], [place] * 2, color=COLOURS[1], lw=1.5)
            continue
        axes.plot([row["intended_s"], first], [place] * 2, color=COLOURS[3], lw=1.5)
        axes.plot([first, row["end_s"]], [place] * 2, color=COLOURS[0], lw=1.5)
    for label, colour in (("until the first token", 3), ("streaming", 0), ("failed", 1)):
        if label != "failed" or any(row["status"] != "ok" for row in rows):
            axes.plot([], [], color=COLOURS[colour], label=label)
    axes.set(xlabel="seconds", ylabel="request", title=f"requests at {point.label}")
    whole_ticks(axes.yaxis)
    axes.legend(frameon=False, loc="lower right")
    return figure


def roofline(record: Record) -> Figure | None:
    """The kernels' shares of the roofline."""
    points = _measured(record, "roofline_share")
    if record.kind != "ops" or not points:
        return None
    figure, [axes] = make_axes(height=1.2 + 0.23 * len(points))
    places = list(range(len(points)))[::-1]
    shares = [100 * point.metrics["roofline_share"].value for point in points]
    kinds = list(dict.fromkeys(point.parameters["kernel"] for point in points))
    colours = [COLOURS[kinds.index(point.parameters["kernel"]) % len(COLOURS)] for point in points]
    axes.barh(places, shares, color=colours)
    axes.axvline(100, color=AXIS, linestyle="--", linewidth=1)
    axes.set_yticks(places, [point.label for point in points], fontsize=8)
    axes.set(xlabel="% of the roofline (measured bandwidth or matrix rate)")
    axes.margins(y=0.01)
    return figure


def startup_phases(record: Record) -> Figure | None:
    """The phases of cold and warm starts."""
    points = _measured(record, "ready")
    if record.kind != "startup" or not points:
        return None
    names = [n for n in points[0].metrics if points[0].metrics[n].unit == "s"]
    figure, [axes] = make_axes(height=1.4 + 0.28 * len(names))
    for place, point in enumerate(points):
        values = [_value(point, name) or 0.0 for name in names]
        ys = [len(names) - 1 - index - 0.4 * place for index in range(len(names))]
        axes.barh(ys, values, 0.38, color=COLOURS[place], label=point.label)
    axes.set_yticks([len(names) - 1 - i - 0.2 for i in range(len(names))], names, fontsize=8)
    axes.set(xlabel="seconds (phases overlap)")
    axes.legend(frameon=False)
    return figure


def ratio_intervals(record: Record) -> Figure | None:
    """Ratios to the reference engine, with their intervals."""
    rows = [
        (f"{point.label}: {name}", entry)
        for point in record.points
        for name, entry in point.details.get("ratios", {}).items()
    ]
    if not rows:
        return None
    figure, [axes] = make_axes(height=1.2 + 0.28 * len(rows))
    for place, (_, entry) in enumerate(reversed(rows)):
        axes.plot([entry["low"], entry["high"]], [place] * 2, color=COLOURS[0], lw=2)
        axes.plot([entry["ratio"]], [place], "o", color=COLOURS[1])
    axes.axvline(1, color=AXIS, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)], fontsize=8)
    axes.set(xlabel=f"times {record.conditions.get('reference', 'the reference')}", xscale="log")
    plain_log(axes.xaxis)
    return figure


def parameter_effect(record: Record) -> Figure | None:
    """The main metric of each point of a sweep, a grid or a history."""
    names = [
        n for n in ("output_throughput", "ready", "equal_together") if len(_measured(record, n)) > 1
    ]
    others = ("ops", "startup", "compare", "determinism", "speculation", "prefix")
    if record.kind in others or not names:
        return None
    if record.kind == "serve" and not record.conditions.get("swept"):
        return None
    name = names[0]
    points = _measured(record, name)
    figure, [axes] = make_axes(height=1.3 + 0.3 * len(points))
    places = list(range(len(points)))[::-1]
    values = [point.metrics[name].value for point in points]
    runs = [point.metrics[name].runs or (point.metrics[name].value,) for point in points]
    errors = [
        [max(0.0, v - min(r)) for v, r in zip(values, runs, strict=True)],
        [max(0.0, max(r) - v) for v, r in zip(values, runs, strict=True)],
    ]
    axes.barh(places, values, 0.6, color=COLOURS[0], xerr=errors, ecolor=INK)
    axes.set_yticks(places, [point.label for point in points], fontsize=8)
    axes.set(xlabel=f"{name.replace('_', ' ')}, {points[0].metrics[name].unit}")
    return figure


def prefix_gain(record: Record) -> Figure | None:
    """The TTFT of a new prompt, and of a prompt with a cached prefix."""
    points = _measured(record, "ttft_cold", "ttft_cached")
    if record.kind != "prefix" or not points:
        return None
    figure, [axes] = make_axes(height=1.4 + 0.45 * len(points))
    for place, (name, label) in enumerate((("ttft_cold", "new"), ("ttft_cached", "cached"))):
        values = [point.metrics[name].value for point in points]
        ys = [len(points) - 1 - index - 0.4 * place for index in range(len(points))]
        axes.barh(ys, values, 0.38, color=COLOURS[place], label=label)
    ticks = [len(points) - 1.2 - index for index in range(len(points))]
    axes.set_yticks(ticks, [point.label for point in points], fontsize=8)
    axes.set(xlabel="ms to the first token")
    axes.legend(frameon=False)
    return figure


_PLOTS: tuple[tuple[str, str, str, Callable[[Record], Any]], ...] = (
    (
        "load",
        "Latency against load",
        "Medians and 99th percentiles over the rate at which requests were answered. The server is "
        "at its limit where the lines rise.",
        latency_against_load,
    ),
    (
        "pareto",
        "Throughput against latency",
        "Up is higher throughput, left is less latency. A point is on the front if no other point "
        "is at least as good in both.",
        pareto,
    ),
    ("points", "All points", "Bars are medians, whiskers the range of the runs.", parameter_effect),
    (
        "ratios",
        "Ratios to the reference",
        "Dots are geometric means over rounds, lines 95 % bootstrap intervals. If a line crosses "
        "1, these rounds show no difference.",
        ratio_intervals,
    ),
    (
        "itl",
        "Gaps between tokens",
        "The gaps in a stream. A second hump on the right comes from steps that also computed "
        "prompts.",
        itl_histogram,
    ),
    (
        "requests",
        "Requests over time",
        "One line for each request, from its intended sending to its end.",
        request_timeline,
    ),
    (
        "server",
        "The server's state",
        "The server's metrics, read four times a second.",
        server_timeline,
    ),
    (
        "steps",
        "Steps and what they computed",
        "Top: the time of each engine step. Bottom: its tokens, one for each decoding sequence, "
        "more if prompts are computed.",
        step_timeline,
    ),
    ("roofline", "Kernels and the roofline", "100 % is the machine's measured rate.", roofline),
    (
        "prefix",
        "First token with and without the cache",
        "Medians for prompts that have this share in common with others.",
        prefix_gain,
    ),
    ("phases", "Phases of the start", "Medians.", startup_phases),
)


def draw(record: Record) -> list[Plot]:
    """Draw every plot for which this record has the data.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context

    plots: list[Plot] = []
    with rc_context(STYLE):
        for name, title, text, function in _PLOTS:
            figure = function(record)
            if figure is not None:
                plots.append(Plot(name, title, text, figure))
    return plots
