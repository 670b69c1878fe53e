"""What happened to one request and when, for those who ask with the header `x-trace: 1`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import msgspec

from ostinato.api.base.admission import timeout_of
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import RequestOutput, TimelineEvent

__all__ = (
    "REQUEST_ID_HEADER",
    "REQUEST_ID_PATTERN",
    "RequestContext",
    "Timeline",
    "TimelineBuilder",
    "TimelineEntry",
    "context_of",
    "is_request_id",
)

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_PATTERN = r"^[\x21-\x7e]{1,128}$"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a completion."""

    event: str  # as in TimelineEvent, or finished
    at_ms: float  # since the request's arrival
    ms: float | None = None  # of a prefill: its step's time; of a grammar: the wait for it
    start: int | None = None  # of a prefill: its first position
    tokens: int | None = None  # of a prefill
    step: int | None = None  # of a prefill: the engine's number of the step
    kind: str | None = None  # of a prefill: captured | compiled | eager
    batch: int | None = None  # of a prefill: sequences in its step
    reason: str | None = None  # of the end


class CompletionTimeline(msgspec.Struct, kw_only=True):
    """One completion of one prompt."""

    prompt: int
    index: int
    queue_ms: float | None = None  # from arrival until it had a row; null = it never had
    first_token_ms: float | None = None  # since arrival
    preemptions: int = 0
    cached_tokens: int = 0
    events: list[TimelineEntry] = []
    output_ms: list[float] = []  # when each output came here, since arrival


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    arrived_at: float  # unix seconds
    preparation_ms: float  # template, tokens and checks, before the engine heard of it
    grammar_wait_ms: float  # of that: for a grammar to be compiled
    total_ms: float
    completions: list[CompletionTimeline]


class RequestContext:
    """What of an HTTP request concerns its record, not its answer.

    Args:
        endpoint: the path.
        wants_timeline: whether the answer has one.
        traceparent: the W3C header, as it came; empty = none.

    Attributes:
        timeline: being written; None when nobody asked.
        grammar_seconds: how long it waited for a grammar.
        timeout_ms: that the answer may take from its arrival on; None = any time.
        request_id: what the header calls it; empty = nothing.
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        wants_timeline: bool = False,
        traceparent: str = "",
        timeout_ms: float | None = None,
        request_id: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self.traceparent = traceparent
        self.arrived_at = time.monotonic()
        self.timeout_ms = timeout_ms
        self.grammar_seconds = 0.0
        self.timeline = TimelineBuilder(self.arrived_at) if wants_timeline else None

    def report(self) -> Timeline | msgspec.UnsetType:
        """The timeline so far; unset when nobody asked."""
        if self.timeline is None:
            return msgspec.UNSET
        return self.timeline.report(self.grammar_seconds)


def context_of(endpoint: str, headers: Mapping[str, str]) -> RequestContext:
    """The context of a request that came this moment.

    Raises:
        InvalidRequestError: `x-trace` is neither 0 nor 1, the timeout header is no time, or the
            request's name is none.
    """
    wanted = headers.get("x-trace", "0").strip()
    if wanted not in ("0", "1"):
        raise InvalidRequestError(
            f"the header x-trace is {wanted[:20]!r}, it must be 1 (a timeline in the answer) or 0",
            param="x-trace",
            code="invalid_value",
        )
    return RequestContext(
        endpoint,
        wants_timeline=wanted == "1",
        traceparent=headers.get("traceparent", ""),
        timeout_ms=timeout_of(headers),
        request_id=_request_id(headers),
    )


def _request_id(headers: Mapping[str, str]) -> str:
    given = headers.get(REQUEST_ID_HEADER, "")
    if given and not is_request_id(given):
        raise InvalidRequestError(
            f"the header {REQUEST_ID_HEADER} is {given[:40]!r}, it must be 1 to 128 visible ASCII"
            " characters",
            param=REQUEST_ID_HEADER,
            code="invalid_value",
        )
    return given


def is_request_id(text: str) -> bool:
    """Whether a request may be called that."""
    return _REQUEST_ID.fullmatch(text) is not None


class TimelineBuilder:
    """Collects the events of a request; times become milliseconds since its arrival.

    Args:
        arrived_at: seconds, monotonic.
    """

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._unix = time.time() - (time.monotonic() - arrived_at)
        self._sent_at = arrived_at
        self._completions: dict[tuple[int, int], CompletionTimeline] = {}

    def sent(self) -> None:
        """The engine hears of the request now."""
        self._sent_at = time.monotonic()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in one piece of news."""
        now = time.monotonic()
        one = self._completions.setdefault(
            (prompt_index, output.index),
            CompletionTimeline(prompt=prompt_index, index=output.index),
        )
        for event in output.events or ():
            one.events.append(self._entry(event))
            if event.name == "scheduled" and one.queue_ms is None:
                one.queue_ms = self._ms(event.at)
            elif event.name == "first_token" and one.first_token_ms is None:
                one.first_token_ms = self._ms(event.at)
        one.preemptions = sum(entry.event == "preempted" for entry in one.events)
        one.cached_tokens = output.num_cached_tokens
        if output.new_token_ids:
            one.output_ms.append(self._ms(now))
        if output.finish_reason is not None:
            one.events.append(
                TimelineEntry(
                    event="finished", at_ms=self._ms(now), reason=output.finish_reason.value
                )
            )

    def report(self, grammar_seconds: float) -> Timeline:
        """All so far."""
        return Timeline(
            arrived_at=round(self._unix, 6),
            preparation_ms=self._ms(self._sent_at),
            grammar_wait_ms=round(grammar_seconds * 1e3, 3),
            total_ms=self._ms(time.monotonic()),
            completions=[one for _, one in sorted(self._completions.items())],
        )

    def _entry(self, event: TimelineEvent) -> TimelineEntry:
        at_ms = self._ms(event.at)
        if event.name == "grammar_built":
            return TimelineEntry(event=event.name, at_ms=at_ms, ms=round(event.seconds * 1e3, 3))
        if event.name != "prefill":
            return TimelineEntry(event=event.name, at_ms=at_ms)
        return TimelineEntry(
            event=event.name,
            at_ms=at_ms,
            ms=round(event.seconds * 1e3, 3),
            start=event.start,
            tokens=event.num_tokens,
            step=event.step,
            kind=event.kind,
            batch=event.num_seqs,
        )

    def _ms(self, at: float) -> float:
        return round((at - self._arrived_at) * 1e3, 3)
