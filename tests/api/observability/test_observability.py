"""Timelines, log lines, metrics and traces of the application, with a scripted engine."""

from __future__ import annotations

import json
import logging
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato.api.observability.metrics_registry import Metrics
from ostinato.api.observability.recent_latency import RecentLatency
from ostinato.api.observability.resource_usage import MachineProbe
from ostinato.api.observability.vllm_metrics import VLLM_NAMES
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.process.log_format import JsonFormatter
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.outputs import FinishReason, TimelineEvent
from tests.api.fake_client import scripted
from tests.api.otlp_receiver import otlp_receiver

TRACE = {"x-trace": "1"}


def traced_script() -> list[object]:
    now = time.monotonic()
    return [
        scripted(
            "Hel",
            [5],
            num_cached_tokens=2,
            scheduled_time=now,
            events=[
                TimelineEvent("scheduled", now),
                TimelineEvent("prefill", now, 0.002, 2, 9, 4, "captured", 3),
                TimelineEvent("first_token", now + 0.002),
            ],
        ),
        scripted(
            "lo",
            [6],
            num_cached_tokens=2,
            num_preemptions=1,
            finish_reason=FinishReason.stop,
            events=[TimelineEvent("preempted", now + 0.003), TimelineEvent("resumed", now + 0.004)],
        ),
    ]


def chunks_of(response: object) -> list[dict]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]  # type: ignore[attr-defined]
    return [json.loads(line) for line in lines]


def post(app, path: str = "/v1/chat/completions", headers: dict | None = None, **fields: object):
    body = {"prompt": "Hi"} if path == "/v1/completions" else {}
    if not body:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
    return app.http.post(path, json={**body, **fields}, headers=headers or {})


class TestTimeline:
    def check(self, trace: dict) -> None:
        (one,) = trace["completions"]
        assert one["queue_ms"] == one["events"][0]["at_ms"]
        assert one["first_token_ms"] == pytest.approx(one["queue_ms"] + 2, abs=0.01)
        assert (one["preemptions"], one["cached_tokens"]) == (1, 2)
        assert [event["event"] for event in one["events"]] == [
            "scheduled",
            "prefill",
            "first_token",
            "preempted",
            "resumed",
            "finished",
        ]
        prefill = dict(one["events"][1])
        prefill.pop("at_ms")
        assert prefill == {
            "event": "prefill",
            "ms": 2.0,
            "start": 2,
            "tokens": 9,
            "step": 4,
            "kind": "captured",
            "batch": 3,
        }
        assert one["events"][-1]["reason"] == "stop"
        assert 0 <= one["output_ms"][0] <= one["output_ms"][1] <= trace["total_ms"]
        assert 0 <= trace["preparation_ms"] <= trace["total_ms"]
        assert trace["grammar_wait_ms"] == 0
        assert abs(trace["arrived_at"] - time.time()) < 300

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_in_the_answer(self, make_app, path):
        app = make_app(traced_script())
        self.check(post(app, path, TRACE).json()["trace"])
        assert app.engine.traced == [True]

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_in_a_stream_before_the_usage(self, make_app, path):
        app = make_app(traced_script())
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *others, trace, usage = chunks_of(post(app, path, TRACE, **options))
        self.check(trace["trace"])
        assert trace["choices"] == []
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)
        assert [chunk for chunk in others if "trace" in chunk] == []

    def test_last_in_a_stream_without_usage(self, make_app):
        app = make_app(traced_script())
        *others, last = chunks_of(post(app, headers=TRACE, stream=True, service_tier="auto"))
        self.check(last["trace"])
        assert all(chunk["choices"] for chunk in others)
        assert {chunk["service_tier"] for chunk in (*others, last)} == {"default"}

    @pytest.mark.parametrize("headers", [{}, {"x-trace": "0"}])
    def test_without_the_header_there_is_no_trace(self, make_app, headers):
        app = make_app(traced_script())
        assert "trace" not in post(app, headers=headers).json()
        assert all("trace" not in chunk for chunk in chunks_of(post(app, stream=True)))
        assert app.engine.traced == [False, False]

    def test_completions_apart(self, make_app):
        app = make_app(traced_script())
        trace = post(app, headers=TRACE, n=3).json()["trace"]
        assert [(one["prompt"], one["index"]) for one in trace["completions"]] == [
            (0, 0),
            (0, 1),
            (0, 2),
        ]

    def test_another_value_is_refused(self, app):
        response = post(app, headers={"x-trace": "yes"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-trace"


class TestLog:
    def test_figures_in_one_line(self, make_app, caplog):
        app = make_app(traced_script())
        with caplog.at_level(logging.INFO, "ostinato.requests"):
            post(app, request_id="me")
        (line,) = [one.getMessage() for one in caplog.records if "-me " in one.getMessage()]
        words = dict(word.split("=") for word in line.split()[2:])
        assert (words["cached"], words["output"], words["preemptions"]) == ("2", "2", "1")
        assert (words["finish"], words["endpoint"]) == ("stop", "/v1/chat/completions")
        assert words["queue"].endswith("ms")
        assert words["tpot"].endswith("ms")

    def test_as_json(self, make_app, caplog):
        app = make_app(traced_script())
        with caplog.at_level(logging.INFO, "ostinato.requests"):
            post(app, request_id="me")
        (record,) = [one for one in caplog.records if "-me " in one.getMessage()]
        line = json.loads(JsonFormatter("api").format(record))
        assert line["request_id"] == "chatcmpl-me"
        assert (line["message"], line["outcome"], line["process"]) == ("request", "done", "api")
        assert (line["output"], line["finish"]) == (2, "stop")
        assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]
        assert "prompt_token_ids" not in line

    def test_prompts_only_when_asked(self, make_app, caplog):
        app = make_app(traced_script(), server=ServerConfig(log_prompts=True))
        with caplog.at_level(logging.INFO, "ostinato.requests"):
            app.http.post("/v1/completions", json={"prompt": [4, 2], "request_id": "me"})
        (record,) = [one for one in caplog.records if "-me " in one.getMessage()]
        assert json.loads(JsonFormatter("api").format(record))["prompt_token_ids"] == [[4, 2]]

    def test_other_lines_as_json(self):
        record = logging.makeLogRecord(
            {"name": "x", "levelname": "ERROR", "msg": "so %s", "args": ("bad",)}
        )
        line = json.loads(JsonFormatter("engine").format(record))
        assert (line["message"], line["level"], line["process"]) == ("so bad", "error", "engine")


def samples(app) -> dict[str, float]:
    return {
        sample.name + json.dumps(sample.labels) * bool(sample.labels): sample.value
        for family in text_string_to_metric_families(app.http.get("/metrics").text)
        for sample in family.samples
    }


class TestMetrics:
    def test_phases_of_a_request(self, make_app):
        app = make_app(traced_script())
        post(app, n=2, max_tokens=9)
        found = samples(app)
        expected = {
            "ostinato_request_queue_seconds_count": 2,
            "ostinato_request_prefill_seconds_count": 2,
            "ostinato_request_decode_seconds_count": 2,
            "ostinato_request_inference_seconds_count": 2,
            "ostinato_time_per_output_token_seconds_count": 2,
            "ostinato_request_preemptions_sum": 2,
            "ostinato_request_max_generation_tokens_sum": 2,
            "ostinato_request_params_n_sum": 2,
            "ostinato_request_params_max_tokens_sum": 9,
        }
        assert {name: found[name] for name in expected} == expected

    def test_a_request_that_goes_on_in_another_engine_was_queued_once(self, make_app, caplog):
        """The next engine reports again when the request joined its batch."""
        first, last = traced_script()
        again = msgspec.structs.replace(last, scheduled_time=time.monotonic())
        app = make_app([first, again])
        with caplog.at_level(logging.INFO, "ostinato.requests"):
            post(app, request_id="me")
        found = samples(app)
        assert found["ostinato_request_queue_seconds_count"] == 1
        parts = ("queue", "inference")
        whole = sum(found[f"ostinato_request_{name}_seconds_sum"] for name in parts)
        to_first_token = found["ostinato_time_to_first_token_seconds_sum"]
        to_last_token = to_first_token + found["ostinato_request_decode_seconds_sum"]
        assert whole == pytest.approx(to_last_token, abs=1e-6)

    def test_vllms_names(self, make_app):
        app = make_app(traced_script())
        app.engine.stats = EngineStats(
            num_running=3,
            num_waiting=5,
            num_waiting_for_grammar=1,
            num_waiting_for_encodings=2,
            num_blocks=10,
            num_free_blocks=4,
            num_prompt_tokens=100,
            prefix_hits=30,
            num_scheduled_tokens=8,
            iteration_tokens=[0, 0, 1] + [0] * 12,
        )
        post(app)
        labels = {"engine": "0", "model_name": "test-model"}
        text = json.dumps(labels)

        def with_label(name: str, value: str) -> str:
            return json.dumps(dict(sorted({**labels, name: value}.items())))

        found = samples(app)
        expected = {
            f"vllm:num_requests_running{text}": 3,
            f"vllm:kv_cache_usage_perc{text}": 0.6,
            f"vllm:prompt_tokens_total{text}": 130,
            f"vllm:prompt_tokens_cached_total{text}": 30,
            f"vllm:prompt_tokens_by_source_total{with_label('source', 'local_compute')}": 100,
            f"vllm:prompt_tokens_by_source_total{with_label('source', 'local_cache_hit')}": 30,
            f"vllm:num_requests_waiting_by_reason{with_label('reason', 'capacity')}": 2,
            f"vllm:num_requests_waiting_by_reason{with_label('reason', 'deferred')}": 3,
            f"vllm:request_prefill_kv_computed_tokens_count{text}": 1,
            f"vllm:iteration_tokens_total_sum{text}": 8,
            f"vllm:request_queue_time_seconds_count{text}": 1,
            f"vllm:time_to_first_token_seconds_count{text}": 1,
            "vllm:request_success_total"
            + json.dumps({"engine": "0", "finished_reason": "stop", "model_name": "test-model"}): 1,
        }
        assert {name: found.get(name) for name in expected} == expected
        assert not any("finished_reason" in name and '"error"' in name for name in found)

    def test_what_was_not_in_the_cache(self, make_app):
        app = make_app(traced_script())
        post(app, "/v1/completions", prompt=[1, 2, 3, 4, 5])
        assert samples(app)["ostinato_request_prefill_computed_tokens_sum"] == 3

    def test_answers_by_endpoint_and_class(self, app):
        post(app)
        post(app, temperature=9)
        post(app, "/no/such/path")
        app.http.get("/v1/models/nobody")

        def count(handler: str, status: str, method: str = "POST") -> float:
            labels = {"handler": handler, "method": method, "status": status}
            return samples(app)[f"http_requests_total{json.dumps(labels)}"]

        assert count("/v1/chat/completions", "2xx") == count("/v1/chat/completions", "4xx") == 1
        assert count("none", "4xx") == 1
        assert count("/v1/models/{name}", "4xx", "GET") == 1

    def test_every_renamed_figure_exists(self, app):
        families = text_string_to_metric_families(app.http.get("/metrics").text)
        names = {family.name for family in families}
        assert [one for pair in VLLM_NAMES.items() for one in pair if one not in names] == []

    def test_without_vllms_names(self, make_app):
        app = make_app(server=ServerConfig(vllm_metrics=False))
        assert not any(name.startswith("vllm:") for name in samples(app))

    def test_without_vllms_names_while_the_model_is_not_known(self, app):
        app.service.admission.phase = "loading"
        assert not any(name.startswith("vllm:") for name in samples(app))

    def test_what_the_processes_use(self, app):
        found = samples(app)
        assert found['ostinato_process_cpu_seconds_total{"process": "api"}'] > 0
        assert found['ostinato_process_resident_memory_bytes{"process": "api"}'] > 1e7
        assert found["ostinato_cpus"] >= 1
        assert found["process_open_fds"] > 0

    def test_a_process_that_is_gone(self, app):
        app.engine.engine_pid = 2**22 + 1  # above the largest process id of the kernel
        use = MachineProbe().read([app.engine.engine_pid])
        assert set(use.processes) == {"api"}
        assert Metrics(app.engine, app.service.metrics.adapters).render()


class TestRecentLatency:
    def test_nothing_is_collected_before_the_first_snapshot(self):
        now = [0.0]
        window = RecentLatency(lambda: now[0])
        window.add("ttft", 1.0)
        assert window.snapshot() == {"ttft": None, "itl": None}
        for value in range(1, 101):
            window.add("itl", float(value))
        found = window.snapshot()["itl"]
        assert found is not None
        assert (found.count, found.p50, found.p90, found.p99) == pytest.approx(
            (100, 50.5, 90.1, 99.01)
        )

    def test_it_forgets(self):
        now = [0.0]
        window = RecentLatency(lambda: now[0])
        window.snapshot()
        window.add("itl", 1.0)
        now[0] = 9.0
        window.add("itl", 3.0)
        found = window.snapshot()["itl"]
        assert found is not None
        assert found.count == 2
        now[0] = 15.0
        found = window.snapshot()["itl"]
        assert found is not None
        assert (found.count, found.p50) == (1, 3.0)
        now[0] = 30.0  # more than ten seconds after the last snapshot
        window.add("itl", 4.0)
        assert window.snapshot()["itl"] is None


class TestTraces:
    CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    def spans(self, bodies: list[bytes]) -> dict[str, object]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        return {
            span.name: span
            for body in bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def test_a_request_is_a_span_with_its_phases(self, make_app):
        pytest.importorskip("opentelemetry.sdk")
        with otlp_receiver() as (endpoint, bodies):
            app = make_app(traced_script(), server=ServerConfig(otlp_endpoint=endpoint))
            post(app, headers={"traceparent": self.CALLER}, request_id="me")
            app.service.close()
        spans = self.spans(bodies)
        assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
        root = spans["llm_request"]
        assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
        assert root.parent_span_id.hex() == "b7ad6b7169203331"
        for name in ("queue", "prefill", "decode"):
            assert spans[name].parent_span_id == root.span_id
            assert root.start_time_unix_nano <= spans[name].start_time_unix_nano
            assert spans[name].end_time_unix_nano <= root.end_time_unix_nano
        assert abs(root.start_time_unix_nano / 1e9 - time.time()) < 300
        attributes = {one.key: one.value for one in root.attributes}
        assert attributes["gen_ai.response.id"].string_value == "chatcmpl-me"
        assert attributes["gen_ai.usage.output_tokens"].int_value == 2
        assert attributes["gen_ai.latency.time_to_first_token"].double_value > 0
        assert "Hel" not in str(root)

    def test_a_trace_that_is_not_sampled_is_not_sent(self, make_app):
        pytest.importorskip("opentelemetry.sdk")
        with otlp_receiver() as (endpoint, bodies):
            app = make_app(traced_script(), server=ServerConfig(otlp_endpoint=endpoint))
            post(app, headers={"traceparent": self.CALLER[:-1] + "0"})
            app.service.close()
        assert bodies == []
