"""The job that the load client receives and the report that it returns, as lines of JSON."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ("JobRequest", "LoadJob", "LoadProgress", "LoadReport", "RequestTimes")


class JobRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request to send."""

    prompt: list[int] | str  # for a later turn, the part after the previous answer
    max_tokens: int
    # intended seconds after the start; None = a closed loop decides, or it is a later turn
    at_s: float | None = None
    after: int | None = None  # index of the previous turn in the job's requests
    think_s: float = 0.0  # seconds between the previous turn's answer and this request


class LoadJob(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One measurement."""

    url: str  # URL of the server, without a path
    model: str
    requests: list[JobRequest]
    chat: bool = False  # /v1/chat/completions instead of /v1/completions
    concurrency: int | None = None  # closed loop: requests in progress
    max_concurrency: int | None = None  # open loop: requests in progress at most; others wait
    stop_after_s: float | None = None  # closed loop: no conversation begins after this
    return_token_ids: bool = False  # ask the server for token ids, to count tokens exactly
    body: dict[str, Any] = {}  # further fields of every request
    headers: dict[str, str] = {}
    stall_timeout_s: float = 60.0
    give_up_after: int = 32
    num_warmups: int = 0


class RequestTimes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The outcome of one request; times are seconds after the start of the measurement."""

    status: str  # ok, refused, redirected, stalled, http 500, broken, error, not sent
    intended_s: float = 0.0  # the time at which it should have been sent
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = []  # arrivals of output
    num_prompt_tokens: int = 0  # the server's count, or the number of ids sent; 0 = unknown
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    request_id: str = ""  # the id from the server
    error: str | None = None


class LoadProgress(msgspec.Struct, tag="progress"):
    """Sent repeatedly while a job runs."""

    done: int
    failed: int
    output_tokens: int


class LoadReport(msgspec.Struct, tag="report", kw_only=True):
    """A finished job."""

    requests: list[RequestTimes]
    began_at: float  # unix seconds
    duration_s: float  # from the start of the measurement to the last answer
    loop_lag_ms: dict[str, float]  # lateness of a timer in the client: p50, p99, max
    send_lag_ms: dict[str, float]  # lateness of sending, without waits for max_concurrency
    cpu_share: float  # of one core, used by the client
