"""The timeline of one request, which an answer includes with the header `x-trace: 1`."""

from __future__ import annotations

import time

import msgspec

from ostinato.runtime.types.outputs import RequestOutput, TimelineEvent

__all__ = ("Timeline", "TimelineBuilder", "TimelineEntry")


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a completion."""

    event: str  # a name of TimelineEvent, or finished
    at_ms: float  # milliseconds since the request's arrival
    # prefill: duration of the step; grammar_built: how long the request waited for its grammar.
    ms: float | None = None
    start: int | None = None  # prefill: first position of the chunk
    tokens: int | None = None  # prefill: tokens of the chunk
    step: int | None = None  # prefill: number of the step
    kind: str | None = None  # prefill: captured | compiled | eager
    batch: int | None = None  # prefill: sequences in the step
    reason: str | None = None  # why the request ended


class CompletionTimeline(msgspec.Struct, kw_only=True):
    """The timeline of one completion of one prompt."""

    prompt: int
    index: int
    # From the request's arrival until the completion was scheduled; null = it never was.
    queue_ms: float | None = None
    first_token_ms: float | None = None  # milliseconds since arrival
    preemptions: int = 0
    cached_tokens: int = 0
    events: list[TimelineEntry] = []
    output_ms: list[float] = []  # for each output with tokens, ms from arrival until received


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one request."""

    arrived_at: float  # unix seconds
    preparation_ms: float  # from arrival until sent to the engine: template, tokenisation, checks
    grammar_wait_ms: float  # the part of `preparation_ms` in which a grammar was compiled
    total_ms: float
    completions: list[CompletionTimeline]


class TimelineBuilder:
    """Collects the events of a request. Times become milliseconds since its arrival.

    Args:
        arrived_at: time of arrival, in seconds of time.monotonic().
    """

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._unix = time.time() - (time.monotonic() - arrived_at)
        self._sent_at = arrived_at
        self._completions: dict[tuple[int, int], CompletionTimeline] = {}

    def sent(self) -> None:
        """Note that the request is sent to the engine now."""
        self._sent_at = time.monotonic()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add one output of the engine."""
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
        """The timeline up to now."""
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
