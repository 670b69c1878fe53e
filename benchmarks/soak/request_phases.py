"""Divides the time of good requests into phases, from the clients' times and the server's log.

Every good request has an id of its own in its header `X-Request-Id`, which the server logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ("GoodRequest", "HeavyAct", "phases_of", "slowest")

_FIELD = re.compile(r" (\w+)=(\S+)")
_LINE = re.compile(r"INFO (\S+) done( .*)")
# The ends of the phases in a log line, in their order. The seconds of a phase are its end minus the
# end of the previous phase.
_ENDS = {
    "preparation": "preparation",
    "queue": "queue",
    "first token": "ttft",
    "further tokens": "e2e",
}


class GoodRequest(NamedTuple):
    """A request of a good client that was answered."""

    request_id: str
    client: str  # `good`, or the name of a client library
    kind: str  # endpoint and size in words
    sent: float  # time.time()
    seconds: float  # until the whole answer had arrived


class HeavyAct(NamedTuple):
    """A heavy act of the hostile clients."""

    name: str
    begin: float  # time.time()
    seconds: float


def phases_of(lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """The phases of the requests in a server's log, by request id, in seconds.

    `preparation` includes the wait for a grammar. `grammar` is that wait alone. `preemptions` is a
    number, not seconds.
    """
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        match = _LINE.search(line)
        if match is None:
            continue
        fields = dict(_FIELD.findall(match[2]))
        phases: dict[str, float] = {}
        before = 0.0
        for phase, name in _ENDS.items():
            if name in fields:
                end = float(fields[name].removesuffix("ms")) / 1e3
                phases[phase] = round(max(0.0, end - before), 3)
                before = max(before, end)
        if "grammar" in fields:
            phases["grammar"] = float(fields["grammar"].removesuffix("ms")) / 1e3
        phases["preemptions"] = float(fields.get("preemptions", 0))
        request_id = fields.get("x_request_id") or match[1].partition("-")[2]
        found[request_id] = phases
    return found


def slowest(
    requests: Sequence[GoodRequest],
    lines: Iterable[str],
    begin: float,
    restarts: Sequence[tuple[float, float]],
    acts: Sequence[HeavyAct] = (),
    count: int = 10,
) -> list[dict[str, Any]]:
    """The requests that took longest, with the phases that the server has logged.

    Up to `count` requests that were under way during a restart of the engine are chosen, and up to
    `count` others. So the requests during restarts do not hide the others.

    Args:
        requests: the requests of all good clients.
        lines: the lines of the server's log.
        begin: the beginning of the test, as time.time().
        restarts: begin and end of each restart of the engine.
        acts: heavy acts.
        count: how many of each kind are chosen.

    Returns:
        Rows with `client`, `kind`, `at`, `seconds`, `in_restart`, `phase` (the longest one),
        `phases` and `beside`, slowest first. `beside` has the heavy acts that were under way at the
        same time: the seconds that both had in common, by name. `outside` is the time before the
        server read the request's head and after its last token: connecting, waiting for the event
        loop, sending.
    """
    phases = phases_of(lines)
    ordered = sorted(requests, key=lambda one: -one.seconds)
    held_up = [one for one in ordered if _overlaps(one, restarts)][:count]
    others = [one for one in ordered if not _overlaps(one, restarts)][:count]
    rows: list[dict[str, Any]] = []
    for one in sorted([*held_up, *others], key=lambda one: -one.seconds):
        own = dict(phases.get(one.request_id, {}))
        waits = {name: own[name] for name in _ENDS if name in own}
        waits["outside"] = round(max(0.0, one.seconds - sum(waits.values())), 3)
        rows.append(
            {
                "client": one.client,
                "kind": one.kind,
                "at": round(one.sent - begin, 1),
                "seconds": round(one.seconds, 3),
                "in_restart": _overlaps(one, restarts),
                "phase": max(waits, key=lambda name: waits[name]),
                "phases": own | {"outside": waits["outside"]},
                "beside": _beside(one, acts),
            }
        )
    return rows


def _beside(one: GoodRequest, acts: Sequence[HeavyAct]) -> dict[str, float]:
    """Names of the acts that overlap a request -> seconds of the overlap, longest first."""
    common: dict[str, float] = {}
    for act in acts:
        ends = act.begin + act.seconds, one.sent + one.seconds
        seconds = min(ends) - max(act.begin, one.sent)
        if seconds > 0:
            common[act.name] = round(common.get(act.name, 0.0) + seconds, 2)
    return dict(sorted(common.items(), key=lambda item: -item[1]))


def _overlaps(one: GoodRequest, spans: Sequence[tuple[float, float]]) -> bool:
    return any(one.sent <= end and one.sent + one.seconds >= start for start, end in spans)
