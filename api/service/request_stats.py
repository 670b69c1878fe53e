"""Times of one request, for metrics, its log line and its trace."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ostinato.api.base.request_context import RequestContext
from ostinato.api.observability.metrics_registry import Metrics
from ostinato.api.observability.request_log import log_request
from ostinato.api.observability.tracing import Tracer
from ostinato.api.service.reply_state import Tally
from ostinato.runtime.types.outputs import PooledOutput, RequestOutput
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.speculation import SpeculationReport, sum_reports

__all__ = ("RequestStats", "StatsSinks")


class StatsSinks(msgspec.Struct, frozen=True):
    """The receivers of the stats of a request."""

    metrics: Metrics
    tracer: Tracer | None  # None = no traces are exported
    with_prompts: bool  # whether the log line has the token ids of the prompts


class _Completion:
    """Times of one completion, seconds of time.monotonic()."""

    __slots__ = ("first", "last", "num_tokens", "scheduled")

    def __init__(self) -> None:
        self.scheduled = 0.0  # 0 = not known
        self.first = 0.0
        self.last = 0.0
        self.num_tokens = 0


class RequestStats:
    """Times of one request. `close` is called once, at its end.

    Args:
        sinks: the receivers of the stats.
        reply_id: the id that the client sees.
        prompts: token ids of each prompt.
        context: the context of the HTTP request.
        sampling: parameters of each prompt; None = a request for vectors or scores.
    """

    def __init__(
        self,
        sinks: StatsSinks,
        reply_id: str,
        prompts: Sequence[list[int]],
        context: RequestContext,
        sampling: Sequence[SamplingParams] | None = None,
    ) -> None:
        self._sinks = sinks
        self._metrics = sinks.metrics
        self._reply_id = reply_id
        self._prompts = prompts
        self._context = context
        self._sampling = sampling
        self._tally = Tally(sum(map(len, prompts)))
        self._begin = context.arrived_at
        self._completions: dict[tuple[int, int], _Completion] = {}
        self._finish_reasons: list[str] = []
        self._num_preemptions = 0
        self._speculation: SpeculationReport | None = None  # None = no draft so far
        if context.adapter is not None:
            self._metrics.adapters.begin(context.adapter)
        self._sent = time.monotonic()
        if context.timeline is not None:
            context.timeline.sent()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add one output of the engine."""
        now = time.monotonic()
        if self._context.adapter is not None and not self._completions:
            self._metrics.adapters.run(self._context.adapter)
        self._tally.add(prompt_index, output)
        self._speculation = sum_reports((self._speculation, output.speculation))
        if self._context.timeline is not None:
            self._context.timeline.add(prompt_index, output)
        key = prompt_index, output.index
        one = self._completions.get(key)
        if one is None:
            one = self._completions[key] = _Completion()
        # A completion that goes on in another engine joins a batch again.
        if output.scheduled_time and not one.scheduled:
            one.scheduled = output.scheduled_time
            self._metrics.queue.observe(max(0.0, output.scheduled_time - self._begin))
        if output.new_token_ids:
            self._add_tokens(one, len(output.new_token_ids), now)
        if output.finish_reason is not None:
            self._end(one, output)

    def add_vector(self, prompt_index: int, output: PooledOutput) -> None:
        """Add a vector. Its times are measured like those of a completion without tokens."""
        self.add(
            prompt_index,
            RequestOutput(
                request_id=output.request_id,
                index=0,
                text_delta="",
                new_token_ids=[],
                finish_reason=output.finish_reason,
                num_cached_tokens=output.num_cached_tokens,
                scheduled_time=output.scheduled_time,
                num_preemptions=output.num_preemptions,
                events=output.events,
            ),
        )

    @property
    def begin(self) -> float:
        """The time of the request's arrival, in seconds of time.monotonic()."""
        return self._begin

    def output_lengths(self) -> dict[int, list[int]]:
        """Index of the prompt -> number of tokens of each of its completions with an output."""
        lengths: dict[int, list[int]] = {}
        for (index, _), one in self._completions.items():
            lengths.setdefault(index, []).append(one.num_tokens)
        return lengths

    def _add_tokens(self, one: _Completion, count: int, now: float) -> None:
        metrics = self._metrics
        if one.num_tokens:
            metrics.itl.observe(now - one.last)
            metrics.recent_latency.add("itl", now - one.last)
        else:
            metrics.ttft.observe(now - self._begin)
            metrics.recent_latency.add("ttft", now - self._begin)
            one.first = now
            if one.scheduled:
                metrics.prefill.observe(max(0.0, now - one.scheduled))
        one.last = now
        one.num_tokens += count

    def _end(self, one: _Completion, output: RequestOutput) -> None:
        assert output.finish_reason is not None, "checked by add"
        metrics = self._metrics
        self._finish_reasons.append(output.finish_reason.value)
        self._num_preemptions += output.num_preemptions
        if self._sampling is not None:
            metrics.count_completion(output.finish_reason.value)
        metrics.preemptions.observe(output.num_preemptions)
        if one.num_tokens:
            metrics.decode.observe(one.last - one.first)
            if one.scheduled:
                metrics.inference.observe(max(0.0, one.last - one.scheduled))
        if one.num_tokens > 1:
            metrics.tpot.observe((one.last - one.first) / (one.num_tokens - 1))

    def close(self, outcome: str) -> None:
        """End the stats.

        Args:
            outcome: `done`, `disconnected`, or `error` with the HTTP status.
        """
        now = time.monotonic()
        if self._context.adapter is not None:
            self._metrics.adapters.end(self._context.adapter, ran=bool(self._completions))
        if outcome == "done":
            self._metrics.e2e.observe(now - self._begin)
            num_tokens = self._tally.num_prompt_tokens
            num_cached = self._tally.usage.prompt_tokens_details.cached_tokens
            self._metrics.prompt_tokens.observe(num_tokens)
            self._metrics.computed_tokens.observe(max(0, num_tokens - num_cached))
            if self._sampling is None:
                self._metrics.count_vectors(len(self._prompts))
            else:
                self._count_answer(self._sampling)
        fields = self._fields(now)
        trace_id = ""
        if self._sinks.tracer is not None:
            trace_id = self._sinks.tracer.export(
                self._context, self._reply_id, fields, self._times(now)
            )
        if trace_id:
            fields["trace_id"] = trace_id
        if self._sinks.with_prompts:
            fields["prompt_token_ids"] = self._prompts
        log_request(self._reply_id, outcome, fields)

    def _count_answer(self, sampling: Sequence[SamplingParams]) -> None:
        metrics = self._metrics
        metrics.generation_tokens.observe(self._tally.num_output_tokens)
        metrics.max_generation_tokens.observe(
            max((one.num_tokens for one in self._completions.values()), default=0)
        )
        for one in sampling:
            metrics.params_n.observe(one.n)
            metrics.params_max_tokens.observe(one.max_tokens or 0)
        if self._context.grammar_seconds:
            metrics.grammar.observe(self._context.grammar_seconds)

    def _fields(self, now: float) -> dict[str, object]:
        """The values for the log line and the trace, by name."""
        tally, completions = self._tally, self._completions.values()
        firsts = [one.first for one in completions if one.num_tokens]
        scheduled = [one.scheduled for one in completions if one.scheduled]
        gaps = sum(one.num_tokens - 1 for one in completions if one.num_tokens)
        spent = sum(one.last - one.first for one in completions if one.num_tokens)
        fields: dict[str, object] = {
            "prompt": tally.num_prompt_tokens,
            "cached": tally.usage.prompt_tokens_details.cached_tokens,
            "output": None if self._sampling is None else tally.num_output_tokens,
            "vectors": len(self._prompts) if self._sampling is None else None,
            "preparation_ms": _ms(self._sent - self._begin),
            "queue_ms": _ms(min(scheduled) - self._begin) if scheduled else None,
            "ttft_ms": _ms(min(firsts) - self._begin) if firsts else None,
            "tpot_ms": _ms(spent / gaps) if gaps else None,
            "e2e_ms": _ms(now - self._begin),
            "finish": ",".join(sorted(set(self._finish_reasons))) or None,
            "preemptions": self._num_preemptions,
        }
        if self._speculation is not None:
            fields["drafted"] = self._speculation.num_draft_tokens
            fields["accepted"] = self._speculation.num_accepted_tokens
        if self._context.grammar_seconds:
            fields["grammar_ms"] = _ms(self._context.grammar_seconds)
        if self._context.endpoint:
            fields["endpoint"] = self._context.endpoint
        if self._context.adapter is not None:
            fields["adapter"] = self._context.adapter.name
        name = self._context.request_id
        if name and not self._reply_id.endswith(name):  # the reply's id does not show it
            fields["x_request_id"] = name
        return fields

    def _times(self, now: float) -> dict[str, float]:
        """The known times at which phases begin or end, in seconds of time.monotonic()."""
        completions = self._completions.values()
        times = {"begin": self._begin, "end": now}
        scheduled = [one.scheduled for one in completions if one.scheduled]
        firsts = [one.first for one in completions if one.num_tokens]
        if scheduled:
            times["scheduled"] = min(scheduled)
        if firsts:
            times["first_token"] = min(firsts)
        elif scheduled and self._sampling is None:
            times["first_token"] = now  # a vector is ready when its prompt is computed
        return times


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)
