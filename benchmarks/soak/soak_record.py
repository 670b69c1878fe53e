"""The checks of a soak test, and its record: the figures behind the checks, and the conditions."""

from __future__ import annotations

import os
import re
import signal
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.soak.request_phases import GoodRequest, HeavyAct, slowest
from ostinato.benchmarks.soak.soak_run import ALLOWED_GROWTH, OVERRIDES, Observations, SoakPlan
from ostinato.benchmarks.soak.soak_server import Resources
from ostinato.runtime.machine_info import gpu_names
from ostinato.runtime.replicas.restarts import death_of

__all__ = ("record_of",)

_GROWTH_MIB = 32.0  # allowed growth of a process: memory that the allocator keeps
_LONG_S = 100.0  # in shorter runs times and the growth of memory are not checked
_MOST_SLOWER = 2.0  # allowed p99 of good requests: with hostile clients / without
_HEALTH_S = 0.1  # the longest allowed answer of /health
_YOUNG_S = 15.0  # after a kill: the start of the next engine, and its first requests
_DRAFTS = re.compile(r" drafted=(\d+) accepted=(\d+)")  # of a request, in the log
# Errors in the log that are expected when the test kills an engine.
_ERRORS_OF_KILLS = (
    f"ended: {death_of(-signal.SIGKILL).text}",
    "flight recorder: the last",
)


def record_of(plan: SoakPlan, seen: Observations) -> dict[str, Any]:
    """The record: `checks` (name -> whether it holds), the figures behind them, `conditions`."""
    late = _late_compiles(seen.metrics)
    errors = [
        line.rstrip()
        for line in seen.lines
        if (" ERROR " in line or "Traceback" in line)
        and not (seen.kills and any(text in line for text in _ERRORS_OF_KILLS))
    ]
    starts = [(at - seen.begin, at - seen.begin + _YOUNG_S) for at in seen.kills]
    growth = _growth(seen.memory, plan, starts)
    latency, health = _latency(plan, seen), _health(plan, seen)
    leaked = (
        seen.metrics["ostinato_kv_cache_usage_ratio"] * seen.metrics["ostinato_kv_cache_blocks"]
    )
    assert seen.before is not None, "measured"
    assert seen.after is not None, "measured"
    kept = {
        name: [before, after]
        for name, before, after in zip(Resources._fields, seen.before, seen.after, strict=True)
    }
    wrong_of_libraries = [
        text for result in seen.libraries.values() for text in result.get("wrong", ())
    ]
    counts, is_long = seen.counts, plan.seconds >= _LONG_S
    wrong = [*counts.wrong, *seen.hostile.get("wrong", ()), *wrong_of_libraries]
    return {
        "checks": {
            "nothing compiled late": not late,
            "no block leaked": leaked == 0 and seen.metrics["ostinato_requests_running"] == 0,
            "no 5xx but the announced 503": _num_faults(seen) == 0,
            "nothing else leaked": all(
                after <= before + more
                for (before, after), more in zip(kept.values(), ALLOWED_GROWTH, strict=True)
            ),
            "memory stands still": not is_long
            or all(sizes["growth_mib"] <= _GROWTH_MIB for sizes in growth.values()),
            "good answers in time": not (is_long and latency)
            or latency["storm"]["p99_s"] <= _MOST_SLOWER * latency["calm"]["p99_s"],
            "/health in time": not is_long or health["storm"]["max_ms"] <= 1e3 * _HEALTH_S,
            "every answer as expected": not wrong,
            "drafts were verified and changed no answer": _are_drafts_right(plan, seen),
            "every kind of attack was made": not is_long
            or min(seen.hostile.get("groups", {}).values(), default=1) > 0,
            # The engine checks its block accounting when it ends, and logs errors in it.
            "no error in the log, exit code 0": not errors and seen.exit_code == 0,
        },
        "late_compiles": late,
        "leaked_blocks": leaked,
        "statuses": {str(status): count for status, count in sorted(counts.statuses.items())},
        "exchanges": dict(counts.exchanges),
        "hostile": {key: seen.hostile.get(key, {}) for key in ("acts", "groups", "statuses")},
        "libraries": {
            name: {key: value for key, value in result.items() if key not in ("made", "wrong")}
            for name, result in seen.libraries.items()
        },
        "resources": kept,
        "wrong": wrong[:20],
        "errors": errors[:20],
        "exit_code": seen.exit_code,
        "kills": [round(at - seen.begin, 1) for at in seen.kills],
        "restarts_s": [round(end - begin, 2) for begin, end in seen.restarts],
        "engine": _engine_figures(seen.metrics),
        "drafts": _draft_figures(seen),
        "requests_by_field": dict(sorted(counts.options.items())),
        "memory": growth,
        "latency": latency,
        "slowest": slowest(
            [*counts.answered, *_library_requests(seen)],
            seen.lines,
            seen.begin,
            seen.restarts,
            [HeavyAct(*act) for act in seen.hostile.get("heavy", ())],
        ),
        "health": health,
        "memory_mib": seen.memory[:: max(1, len(seen.memory) // 60)],
        "conditions": _conditions(plan),
    }


def _library_requests(seen: Observations) -> list[GoodRequest]:
    return [
        GoodRequest(request_id, name, kind, sent, seconds)
        for name, result in seen.libraries.items()
        for request_id, kind, sent, seconds in result.get("made", ())
    ]


def _num_faults(seen: Observations) -> int:
    """The number of answers with a 5xx status that are errors.

    Not counted are 503 answers with Retry-After, and answers of /health while a killed engine
    starts again.
    """
    counts = seen.counts
    good = sum(count for status, count in counts.statuses.items() if status >= 500)
    hostile = sum(
        count
        for status, count in seen.hostile.get("statuses", {}).items()
        if status.startswith("5") and status != "503"
    )
    polls = [at for at, _, status in seen.polls if status != 200]
    unexpected = [at for at in polls if not any(begin <= at <= end for begin, end in seen.restarts)]
    return good - counts.exchanges["told to come again"] + hostile + len(unexpected)


def _quantiles(series: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(series, n=100, method="inclusive")
    return {
        "answers": len(series),
        "p50_s": round(cuts[49], 3),
        "p99_s": round(cuts[98], 3),
        "max_s": round(max(series), 3),
    }


def _latency(plan: SoakPlan, seen: Observations) -> dict[str, dict[str, float]]:
    """Seconds until good clients have whole answers, grouped by when the requests were sent.

    `calm` is the time before the hostile clients begin, `storm` the time after that. `restarts` has
    the requests that were under way while a killed engine restarted; they are left out of `storm`.
    The first tenth of the calm time is left out, because all clients begin at once. The last tenth
    is left out, because its answers arrive during the storm. The result is empty if `calm` or
    `storm` has too few answers.
    """
    calm_end = seen.begin + plan.calm_s
    margin = 0.1 * plan.calm_s
    found: dict[str, list[float]] = {"calm": [], "storm": [], "restarts": []}
    for sent, took in ((one.sent, one.seconds) for one in seen.counts.answered):
        if seen.begin + margin <= sent <= calm_end - margin:
            found["calm"].append(took)
        elif sent >= calm_end:
            waited = any(sent <= end and sent + took >= begin for begin, end in seen.restarts)
            found["restarts" if waited else "storm"].append(took)
    if len(found["calm"]) < 2 or len(found["storm"]) < 2:
        return {}
    found["storm and restarts"] = found["storm"] + found["restarts"]
    return {name: _quantiles(series) for name, series in found.items() if len(series) > 1}


def _health(plan: SoakPlan, seen: Observations) -> dict[str, dict[str, Any]]:
    """Milliseconds that `/health` took, before (`calm`) and after the hostile clients began.

    `late` lists the slow answers: seconds since the beginning, and milliseconds. `pauses` lists the
    times in which the machine gave the poll no processor, in the same form.
    """
    calm_end = seen.begin + plan.calm_s
    parts = {
        "calm": [(at, took) for at, took, _ in seen.polls if at < calm_end],
        "storm": [(at, took) for at, took, _ in seen.polls if at >= calm_end],
    }
    pauses = {
        "calm": [(at, took) for at, took in seen.pauses if at < calm_end],
        "storm": [(at, took) for at, took in seen.pauses if at >= calm_end],
    }

    def rows(times: Sequence[tuple[float, float]]) -> list[list[float]]:
        return [[round(at - seen.begin, 2), round(1e3 * took, 1)] for at, took in times]

    return {
        name: {
            "polls": len(polls),
            "p99_ms": round(1e3 * sorted(took for _, took in polls)[int(0.99 * len(polls))], 2),
            "max_ms": round(1e3 * max(took for _, took in polls), 1),
            "above_100_ms": sum(took > _HEALTH_S for _, took in polls),
            "late": rows([poll for poll in polls if poll[1] > _HEALTH_S]),
            "pauses": rows(pauses[name]),
        }
        for name, polls in parts.items()
        if polls
    }


def _growth(
    memory: Sequence[dict[str, float]], plan: SoakPlan, starts: Sequence[tuple[float, float]]
) -> dict[str, dict[str, float]]:
    """MiB in the second and in the last quarter of the time with hostile clients.

    The least value of a quarter is taken, because memory of large requests is freed only when
    Python collects garbage. An engine that has just started is still small. So its values within
    `starts`, in seconds since the beginning, are left out.
    """
    growth = {}
    quarter = (plan.seconds - plan.calm_s) / 4
    for name in ("api", "engine"):
        series = [
            (row["at"] - plan.calm_s, row[name])
            for row in memory
            if name in row
            and not (name == "engine" and any(a <= row["at"] <= b for a, b in starts))
        ]
        early = [mib for at, mib in series if quarter <= at <= 2 * quarter]
        late = [mib for at, mib in series if at >= 3 * quarter]
        if early and late:
            growth[name] = {
                "second_quarter_mib": min(early),
                "last_quarter_mib": min(late),
                "growth_mib": round(min(late) - min(early), 1),
                "most_mib": max(mib for _, mib in series),
            }
    return growth


def _late_compiles(metrics: dict[str, float]) -> dict[str, int]:
    name = "ostinato_late_compiles_total "
    return {
        key.removeprefix(name): int(value)
        for key, value in metrics.items()
        if key.startswith(name) and value
    }


def _engine_figures(metrics: dict[str, float]) -> dict[str, float]:
    counters = ("preemptions", "prefix_cache_hits", "prompt_tokens", "generation_tokens")
    short = {
        name.removeprefix("ostinato_").removesuffix("_total"): value
        for name, value in metrics.items()
        if name.startswith("ostinato_")
    }
    return {
        name: value
        for name, value in short.items()
        if name.startswith(("steps", "completions_total")) or name in counters
    }


def _are_drafts_right(plan: SoakPlan, seen: Observations) -> bool:
    figures = _draft_figures(seen)
    if figures["different_answers"]:
        return False
    if plan.seconds < _LONG_S / 2 or any("speculation" in one for one in plan.overrides):
        return True
    return min(figures["draft_tokens"], figures["equal_answers"]) > 0


def _draft_figures(seen: Observations) -> dict[str, float]:
    """Draft tokens of all requests, and numbers of answers that were repeated without drafts.

    Draft tokens are those of the log, because `/metrics` lacks the last counts of a killed engine.
    """
    found = [match for line in seen.lines if (match := _DRAFTS.search(line))]
    tokens, accepted = (sum(int(match[number]) for match in found) for number in (1, 2))
    exchanges = seen.counts.exchanges
    return {
        "requests_with_drafts": len(found),
        "draft_tokens": tokens,
        "accepted_tokens": accepted,
        "acceptance": round(accepted / tokens, 3) if tokens else 0.0,
        "equal_answers": exchanges["equal without drafts"],
        "different_answers": exchanges["different without drafts"],
    }


def _conditions(plan: SoakPlan) -> dict[str, Any]:
    given = {
        name: value
        for name, value in asdict(plan).items()
        if name not in ("library_directory", "overrides")
    }
    return {
        **basic_conditions(),
        **given,
        "overrides": [*OVERRIDES, *plan.overrides],
        "num_cpus": os.cpu_count(),
        "load_of_the_machine": [round(one, 1) for one in os.getloadavg()],
        "gpus": gpu_names(),
    }
