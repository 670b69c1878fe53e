"""Runs one load measurement: builds the job, runs the load client, computes the metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import msgspec

from ostinato.benchmarks.load.job import JobRequest, LoadJob, LoadProgress, LoadReport
from ostinato.benchmarks.load.serving_metrics import (
    client_warnings,
    failures,
    itl_histogram,
    load_metrics,
    request_rows,
)
from ostinato.benchmarks.report.record import Point
from ostinato.benchmarks.workload.arrivals import LoadPoint, arrival_times
from ostinato.benchmarks.workload.workload import Part
from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.bench_schema import (
    LoadSection,
    PromptFormat,
    RequestEndpoint,
    SloSection,
)
from ostinato.runtime.errors import EngineError

__all__ = ("Target", "find_target", "make_job", "measure_point", "run_client", "to_point")

_PROBE_S = 10.0
Decode = Callable[[Sequence[int]], str]
OnProgress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to send requests to."""

    url: str
    model: str  # its name in requests
    gives_token_ids: bool = False  # whether it supports return_token_ids


def find_target(url: str, load: LoadSection, *, is_ours: bool = False) -> tuple[Target, list[str]]:
    """The server at `url` and its model, and a note if the server did not name its model.

    A server that does not answer is a target too. Its requests will fail, and failures are counted.

    Raises:
        ConfigError: `url` is not an http URL.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"load.url={url} must begin with http:// or https://")
    if load.model:
        return Target(url=base, model=load.model, gives_token_ids=is_ours), []
    deadline = time.monotonic() + load.ready_timeout_s
    while True:
        problem = ""
        try:
            request = urllib.request.Request(f"{base}/v1/models", headers=dict(load.headers))
            opener = urllib.request.build_opener(_NoRedirect)
            with opener.open(request, timeout=min(_PROBE_S, load.ready_timeout_s)) as reply:
                entry = json.load(reply)["data"][0]
            is_ours |= entry.get("owned_by") == "ostinato"
            return Target(url=base, model=str(entry["id"]), gives_token_ids=is_ours), []
        except urllib.error.HTTPError as error:
            problem = f"answered {error.code}"
            if error.code != 503:  # a server that is still starting answers 503
                break
        except (  # no server, another protocol, or other JSON
            OSError,
            HTTPException,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    note = f"{base}/v1/models {problem}; requests name the model 'default' (set load.model)"
    return Target(url=base, model="default", gives_token_ids=is_ours), [note]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> None:
        """Do not follow: urllib then raises the answer as an HTTPError."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def make_job(
    target: Target,
    part: Part,
    point: LoadPoint,
    load: LoadSection,
    *,
    seed: int = 0,
    decode: Decode | None = None,
) -> LoadJob:
    """The job for the load client.

    Args:
        target: the server.
        part: the requests.
        point: rate or concurrency.
        load: further settings of how requests are sent.
        seed: seed of the arrival times.
        decode: turns token ids into text, for load.prompt_format=text and for chat.

    Raises:
        ConfigError: prompts must be text and there is no tokenizer.
    """
    chat = load.endpoint is RequestEndpoint.chat
    as_text = chat or load.prompt_format is PromptFormat.text
    if as_text and decode is None:
        raise ConfigError("prompts as text need a tokenizer: set model.tokenizer")
    heads = [place for place, item in enumerate(part.items) if item.after is None]
    times = arrival_times(point, load, [part.items[h].arrival_s for h in heads], seed)
    at = dict(zip(heads, times or (), strict=bool(times)))
    kept: dict[int, int] = {}
    requests: list[JobRequest] = []
    for place, item in enumerate(part.items):
        too_late = load.duration_s is not None and at.get(place, 0.0) > load.duration_s
        if too_late or (item.after is not None and item.after not in kept):
            continue
        kept[place] = len(requests)
        requests.append(
            JobRequest(
                prompt=decode(item.prompt) if as_text and decode is not None else item.prompt,
                max_tokens=item.max_tokens,
                at_s=at.get(place),
                after=None if item.after is None else kept[item.after],
                think_s=item.think_s,
            )
        )
    body = {"temperature": load.temperature}
    if load.ignore_eos:
        body["ignore_eos"] = True
    return LoadJob(
        url=target.url,
        model=target.model,
        requests=requests,
        chat=chat,
        concurrency=point.concurrency,
        max_concurrency=load.max_concurrency,
        stop_after_s=load.duration_s if times is None else None,
        return_token_ids=target.gives_token_ids and not chat,
        body=body | load.extra_body,
        headers=dict(load.headers),
        stall_timeout_s=load.stall_timeout_s,
        give_up_after=load.give_up_after,
        num_warmups=load.num_warmups,
    )


def run_client(job: LoadJob, on_progress: OnProgress = lambda progress: None) -> LoadReport:
    """Run a job in a process of its own.

    Raises:
        EngineError: the client ended without a report.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "ostinato.benchmarks.load.load_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None, "both are pipes"  # noqa: PT018
    decoder = msgspec.json.Decoder(LoadProgress | LoadReport)
    try:
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
        for line in process.stdout:
            message = decoder.decode(line)
            if isinstance(message, LoadReport):
                return message
            on_progress(message)
    finally:
        process.kill() if sys.exc_info()[0] else None
        process.wait()
    raise EngineError(f"the load client ended with code {process.returncode} and no report")


def to_point(
    report: LoadReport,
    point: LoadPoint,
    slo: SloSection,
    percentiles: Sequence[float],
    *,
    detailed: bool = False,
) -> Point:
    """A report as a point of a result."""
    found = failures(report)
    details = {
        "itl_histogram": itl_histogram(report),
        "requests": request_rows(report, slo, with_chunks=detailed),
        "client": {
            "began_at": report.began_at,
            "loop_lag_ms": report.loop_lag_ms,
            "send_lag_ms": report.send_lag_ms,
            "cpu_share": round(report.cpu_share, 4),
        },
    }
    if found:
        details["failures"] = found
    return Point(
        label=point.label,
        parameters={"rate": point.rate, "concurrency": point.concurrency},
        metrics=load_metrics(report, slo, percentiles),
        details=details,
    )


def measure_point(
    job: LoadJob,
    point: LoadPoint,
    slo: SloSection,
    percentiles: Sequence[float],
    *,
    detailed: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> tuple[Point, list[str]]:
    """Run one point; returns its metrics, and warnings about failures and the client.

    Raises:
        EngineError: the client ended without a report.
    """
    report = run_client(job, on_progress)
    result = to_point(report, point, slo, percentiles, detailed=detailed)
    warnings = [f"{point.label}: {text}" for text in client_warnings(report)]
    for status, entry in result.details.get("failures", {}).items():
        example = f" ({entry['example']})" if entry["example"] else ""
        warnings.append(
            f"{point.label}: {entry['count']} of {len(report.requests)} requests {status}{example}"
        )
    return result, warnings
