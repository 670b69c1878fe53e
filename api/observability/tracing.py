"""OpenTelemetry traces of requests, exported to `server.otlp_endpoint`.

A request has one span, with a child span for each phase: queue, prefill, decode. The SDK is
imported only if an endpoint is set. It exports on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ostinato import __version__
from ostinato.api.base.request_context import RequestContext
from ostinato.runtime.errors import StartupError

__all__ = ("Tracer",)

_PHASES = (
    ("queue", "begin", "scheduled"),
    ("prefill", "scheduled", "first_token"),
    ("decode", "first_token", "end"),
)
# Field of `RequestStats` -> attribute of the request's span. The names are those of the semantic
# conventions for generative models, those of vLLM (`gen_ai.latency`) and our own (`ostinato`).
_ATTRIBUTES = {
    "prompt": "gen_ai.usage.input_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "output": "gen_ai.usage.output_tokens",
    "preemptions": "ostinato.preemptions",
    "endpoint": "url.path",
}
_SECONDS = {
    "queue_ms": "gen_ai.latency.time_in_queue",
    "ttft_ms": "gen_ai.latency.time_to_first_token",
    "e2e_ms": "gen_ai.latency.e2e",
    "grammar_ms": "ostinato.latency.grammar",
}


class Tracer:
    """Creates and exports spans.

    Args:
        endpoint: the URL of an OTLP collector over HTTP, with the path.

    Raises:
        StartupError: the SDK is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise StartupError(
                f"server.otlp_endpoint={endpoint} needs the OpenTelemetry SDK ({error}):"
                " pip install 'ostinato[otel]', or leave the setting empty"
            ) from error
        resource = Resource.create({"service.name": "ostinato", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("ostinato", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def export(
        self,
        context: RequestContext,
        reply_id: str,
        fields: Mapping[str, object],
        times: Mapping[str, float],
    ) -> str:
        """Export the spans of a finished request.

        Args:
            context: the request's context. Its `traceparent` names the caller's span, if any.
            reply_id: the id that the client sees.
            fields: the values of the log line.
            times: `begin` and `end`, and if they are known `scheduled` and `first_token`, in
                seconds of time.monotonic().

        Returns:
            The trace's id in hexadecimal; empty if the caller's trace is not sampled.
        """
        from opentelemetry import trace

        parent = self._propagator.extract({"traceparent": context.traceparent})
        offset = time.time_ns() - time.monotonic_ns()

        def at(name: str) -> int:
            return int(times[name] * 1e9) + offset

        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=at("begin"),
            attributes=_attributes(reply_id, fields),
        )
        if not span.is_recording():
            return ""
        within = trace.set_span_in_context(span)
        for name, begin, end in _PHASES:
            if begin in times and end in times:
                child = self._tracer.start_span(name, context=within, start_time=at(begin))
                child.end(max(at(begin), at(end)))
        if fields.get("finish") is None:
            span.set_status(trace.StatusCode.ERROR, "the request did not finish")
        span.end(at("end"))
        return trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Export the remaining spans, and wait for the collector."""
        self._provider.shutdown()


def _attributes(reply_id: str, fields: Mapping[str, object]) -> dict[str, Any]:
    attributes: dict[str, Any] = {"gen_ai.response.id": reply_id}
    for field, name in _ATTRIBUTES.items():
        if fields.get(field) is not None:
            attributes[name] = fields[field]
    for field, name in _SECONDS.items():
        value = fields.get(field)
        if isinstance(value, float):
            attributes[name] = value / 1e3
    finish = fields.get("finish")
    if isinstance(finish, str):
        attributes["gen_ai.response.finish_reasons"] = finish.split(",")
    return attributes
