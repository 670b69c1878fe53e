"""Configuration sections of `run bench`: measurement, workload, load and latency goals.

`run tune` and `run simulate` read `workload`, `load` and `slo` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ostinato.conf.schema import Section, setting

__all__ = (
    "BenchKind",
    "BenchSection",
    "LoadSection",
    "PromptFormat",
    "Ramp",
    "RequestEndpoint",
    "SloSection",
    "WorkloadKind",
    "WorkloadSection",
)


class BenchKind(StrEnum):
    throughput = "throughput"
    latency = "latency"
    serve = "serve"
    startup = "startup"
    prefix = "prefix"
    determinism = "determinism"
    speculation = "speculation"
    ops = "ops"
    compare = "compare"
    history = "history"


class WorkloadKind(StrEnum):
    standard = "standard"
    random = "random"
    fixed = "fixed"
    sharegpt = "sharegpt"
    tokens = "tokens"
    prefix = "prefix"
    conversations = "conversations"
    trace = "trace"


class Ramp(StrEnum):
    none = "none"
    linear = "linear"
    exponential = "exponential"


class RequestEndpoint(StrEnum):
    completions = "completions"
    chat = "chat"


class PromptFormat(StrEnum):
    ids = "ids"
    text = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSection(Section):
    """The measurement: its kind, its repetitions, and its result file."""

    key = "bench"
    kind: BenchKind = setting(
        BenchKind.throughput, "which measurement; `run bench serve` sets it to serve"
    )
    parts: list[str] = setting(
        ["single", "ttft", "offline", "prefix"],
        "parts of the standard workload to run",
        one_of=("single", "ttft", "offline", "prefix"),
    )
    repeats: int = setting(3, "measured repetitions of each point", at_least=1, at_most=1000)
    warmup: int = setting(
        1, "repetitions before the measured ones, not counted", at_least=0, at_most=100
    )
    batch_sizes: list[int] = setting(
        [1, 4, 16], "latency: requests that are sent together", at_least=1, at_most=4096
    )
    input_lens: list[int] = setting([32, 256], "latency: tokens of each prompt", at_least=1)
    output_lens: list[int] = setting([32], "latency: tokens of each output", at_least=1)
    shares: list[float] = setting(
        [0.0, 0.5, 0.9],
        "prefix: share of a prompt that all requests have in common",
        at_least=0,
        at_most=0.99,
    )
    engines: list[str] = setting(
        [],
        'compare: two or more engines, each as overrides ("cache.block_size=32 graphs.mode=eager", '
        '"" = as configured) or as the URL of an OpenAI-compatible server; the others are compared '
        "with the first",
    )
    files: list[str] = setting([], "history: result files, JSON or JSON lines")
    percentiles: list[float] = setting(
        [50.0, 90.0, 95.0, 99.0], "percentiles of latencies to report", above=0, at_most=100
    )
    detailed: bool = setting(False, "keep every request's times in the result file")
    report: bool = setting(True, "write plots (PNG) and an HTML report beside the result file")
    output: str = setting(
        "", "JSON file to write, a directory for a sweep; empty = outputs/bench/<kind>-<time>.json"
    )
    append: str = setting(
        "",
        "JSON-lines file that the result is also appended to, for run bench history; empty = none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSection(Section):
    """The requests: made from numbers, or read from a file."""

    key = "workload"
    kind: WorkloadKind = setting(
        WorkloadKind.standard,
        "standard = the four parts that compare engines; docs/benchmarks.md has the other kinds",
    )
    path: str = setting("", "sharegpt, tokens and trace: the file to read")
    num_requests: int | None = setting(
        None,
        "requests or conversations to make, or to read from the file; null = 32, or the whole file",
        at_least=1,
    )
    input_len: int = setting(
        256, "mean prompt tokens of a request, or of each turn of a conversation", at_least=1
    )
    output_len: int = setting(
        64, "mean output tokens of a request, or of each turn of a conversation", at_least=1
    )
    length_spread: float = setting(
        0.0, "random lengths lie within mean * (1 +- this)", at_least=0, at_most=0.99
    )
    num_prefixes: int = setting(4, "prefix: number of different shared prefixes", at_least=1)
    prefix_len: int = setting(128, "prefix: tokens of a shared prefix", at_least=1)
    turns: int = setting(4, "conversations: turns of each one", at_least=1, at_most=1000)
    think_time_s: float = setting(
        0.0, "conversations: seconds between an answer and the next turn", at_least=0
    )
    time_scale: float = setting(
        1.0, "trace: arrival times are multiplied by this; 0.5 = twice the load", above=0
    )
    seed: int = setting(0, "seed of lengths, ids and arrivals", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSection(Section):
    """How the requests arrive at a server; each rate and each concurrency is measured apart."""

    key = "load"
    url: str = setting(
        "", "an OpenAI-compatible server to measure; empty = start run serve as configured"
    )
    model: str = setting("", "the model's name in requests; empty = the first in /v1/models")
    endpoint: RequestEndpoint = setting(
        RequestEndpoint.completions, "/v1/completions or /v1/chat/completions"
    )
    prompt_format: PromptFormat = setting(
        PromptFormat.ids, "send prompts as token ids, or as the text that they decode to"
    )
    rates: list[float] = setting([], "open loop: mean requests per second, one point each", above=0)
    concurrency: list[int] = setting(
        [], "closed loop: numbers of concurrent requests, one point each", at_least=1
    )
    burstiness: float = setting(
        1.0,
        "shape of the gamma distribution of the gaps: 1 = Poisson, less = bursts, more = even gaps",
        above=0,
        at_most=1000,
    )
    ramp: Ramp = setting(Ramp.none, "how a point's rate changes towards load.ramp_to")
    ramp_to: float | None = setting(None, "requests per second at a ramp's end", above=0)
    max_concurrency: int | None = setting(
        None,
        "open loop: while this many requests run, further ones wait at the client",
        at_least=1,
    )
    duration_s: float | None = setting(
        None,
        "requests that would arrive later than this are left out; null = all are sent",
        above=0,
    )
    num_warmups: int = setting(1, "requests before each point, not counted", at_least=0)
    ignore_eos: bool = setting(True, "request outputs of exactly the workload's length")
    temperature: float = setting(0.0, "temperature of every request", at_least=0, at_most=2)
    extra_body: dict[str, Any] = setting({}, "fields to add to every request's body")
    headers: dict[str, str] = setting({}, "HTTP headers to add; not written to results")
    ready_timeout_s: float = setting(60.0, "how long to wait for load.url to answer", above=0)
    stall_timeout_s: float = setting(
        60.0, "a request without a byte for this long is counted as stalled", above=0
    )
    give_up_after: int = setting(
        32, "after this many failures and no success, no further request is sent", at_least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSection(Section):
    """Latency goals of a request; goodput counts the requests that meet all goals set here."""

    key = "slo"
    ttft_ms: float | None = setting(None, "time to first token; null = no goal", above=0)
    itl_ms: float | None = setting(
        None, "99th percentile of a request's gaps between outputs; null = no goal", above=0
    )
    tpot_ms: float | None = setting(
        None, "a request's mean time per output token after the first; null = no goal", above=0
    )
    e2e_ms: float | None = setting(None, "time to the last token; null = no goal", above=0)
