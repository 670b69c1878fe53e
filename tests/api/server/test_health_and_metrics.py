"""Health endpoints, metrics and log lines over a scripted engine."""

from __future__ import annotations

import json
import logging

from prometheus_client.parser import text_string_to_metric_families

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.types.engine_info import EngineStats
from tests.api.answers import error_of
from tests.api.fake_client import FakeClient


class TestHealth:
    def test_well(self, app):
        assert app.http.get("/health").json() == {"status": "ok"}
        assert app.http.get("/ready").json() == {"status": "ready"}

    def test_several_engines_are_listed(self, app, monkeypatch):
        monkeypatch.setattr(FakeClient, "replicas", property(lambda self: [self, self]))
        body = app.http.get("/health").json()
        assert body["status"] == "ok"
        assert [one["state"] for one in body["engines"]] == ["serving", "serving"]
        names = {name for name in app.http.get("/metrics").text.splitlines() if name[0] != "#"}
        assert 'ostinato_kv_cache_blocks{engine="1"} 0.0' in names
        assert 'ostinato_engine_restarts_total{engine="0",reason="reload"} 0.0' in names
        assert any(name.startswith('vllm:num_requests_running{engine="0"') for name in names)

    def test_starting(self, app):
        app.service.admission.phase = "weights"
        for path in ("/health", "/ready"):
            response = app.http.get(path)
            assert response.status_code == 503
            assert response.json()["reason"] == "the engine is starting: weights"
        for response in (app.chat(), app.http.get("/v1/models")):
            assert response.status_code == 503
            assert error_of(response)["code"] == "starting"
            assert int(response.headers["retry-after"]) > 0

    def test_dead(self, app):
        app.engine.death_reason = "its process ended"
        assert app.http.get("/health").status_code == 503
        response = app.chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_dead"

    def test_restarting(self, app):
        app.engine.restart_reason = "its process died of SIGSEGV"
        for path, status in (("/health", "unhealthy"), ("/ready", "restarting")):
            response = app.http.get(path)
            assert (response.status_code, response.json()["status"]) == (503, status)
            assert "SIGSEGV" in response.json()["reason"]
        # The real client waits for the engine here. The scripted one need not wait.
        assert app.chat().status_code == 200

    def test_restarts_are_counted(self, app):
        app.engine.restarts = {"killed": 2}
        text = app.http.get("/metrics").text
        assert 'ostinato_engine_restarts_total{reason="killed"} 2.0' in text
        assert 'ostinato_engine_restarts_total{reason="hang"} 0.0' in text

    def test_ping_is_health(self, app):
        for age in (29.0, 31.0):
            app.engine.seconds_since_step = app.engine.seconds_overdue = age
            health, ping = app.http.get("/health"), app.http.get("/ping")
            assert (ping.status_code, ping.content) == (health.status_code, health.content)

    def test_frozen(self, app):
        app.engine.seconds_since_step = app.engine.seconds_overdue = 29.0
        for path in ("/health", "/live", "/ready"):
            assert app.http.get(path).status_code == 200
        app.engine.seconds_since_step = app.engine.seconds_overdue = 31.0
        for path, status in (("/health", "unhealthy"), ("/ready", "engine_silent")):
            response = app.http.get(path)
            assert (response.status_code, response.json()["status"]) == (503, status)
            assert "server.health_timeout_s=30" in response.json()["reason"]
        assert app.http.get("/live").status_code == 200  # no request waits for it
        app.engine.num_unfinished = 2
        response = app.http.get("/live")
        assert (response.status_code, response.json()["status"]) == (503, "stuck")
        assert "unfinished sequences: 2" in response.json()["reason"]

    def test_a_long_step_is_no_hang(self, app):
        app.engine.seconds_since_step, app.engine.seconds_overdue = 300.0, 1.0
        app.engine.num_unfinished = 2
        for path in ("/health", "/live", "/ready"):
            assert app.http.get(path).status_code == 200

    def test_live_while_it_starts_and_restarts_but_not_when_dead(self, app):
        app.engine.num_unfinished = 2
        app.service.admission.phase = "weights"
        assert app.http.get("/live").status_code == 200
        app.service.admission.phase = None
        app.engine.restart_reason = "its process died of SIGSEGV"
        assert app.http.get("/live").status_code == 200
        app.engine.restart_reason = None
        app.engine.death_reason = "too many restarts"
        assert app.http.get("/live").status_code == 503

    def test_draining(self, app):
        app.service.admission.is_draining = True
        assert app.http.get("/health").status_code == 200
        assert app.http.get("/ready").json()["status"] == "shutting_down"
        response = app.complete()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert error_of(response)["code"] == "shutting_down"


class TestMetrics:
    def samples(self, app) -> dict[str, float]:
        response = app.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            sample.name + json.dumps(sample.labels) * bool(sample.labels): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    def test_the_engines_snapshot(self, app):
        app.engine.stats = EngineStats(
            num_running=3,
            num_waiting=2,
            num_blocks=10,
            num_free_blocks=4,
            steps_by_kind={"captured": 7, "eager": 1},
            layers_by_program={"captured": 8},
            num_prompt_tokens=100,
            num_output_tokens=50,
            prefix_queries=40,
            prefix_hits=30,
            num_preemptions=1,
            late_compiles=[
                LateCompile("dynamo", "tokens=5,seqs=2", 2),
                LateCompile("c++", "idle", 1),
            ],
            step_seconds=1.5,
            model_seconds=1.25,
            device_seconds_by_kind={"captured": 1.125},
            host_gap_seconds=0.125,
            num_scheduled_tokens=60,
            num_padding_tokens=4,
            num_waiting_for_grammar=1,
            grammar_seconds=0.5,
            grammar_build_seconds=0.25,
            iteration_tokens=[0] * 3 + [2] + [0] * 11,
            num_evictions=5,
            num_waiting_for_encodings=1,
            num_inputs_encoded=6,
            num_encoding_hits=4,
            encode_seconds=0.75,
            num_state_slots=8,
            num_free_state_slots=2,
        )
        samples = self.samples(app)
        expected = {
            "ostinato_requests_running": 3,
            "ostinato_requests_waiting": 2,
            "ostinato_kv_cache_usage_ratio": 0.6,
            "ostinato_kv_cache_blocks": 10,
            "ostinato_state_slots_usage_ratio": 0.75,
            "ostinato_state_slots": 8,
            "ostinato_engine_up": 1,
            "ostinato_engine_heartbeat_age_seconds": 0,
            "ostinato_prompt_tokens_total": 100,
            "ostinato_generation_tokens_total": 50,
            "ostinato_prefix_cache_queries_total": 40,
            "ostinato_prefix_cache_hits_total": 30,
            "ostinato_preemptions_total": 1,
            'ostinato_late_compiles_total{"shape": "tokens=5,seqs=2", "what": "dynamo"}': 2,
            'ostinato_late_compiles_total{"shape": "idle", "what": "c++"}': 1,
            'ostinato_late_compiles_total{"shape": "idle", "what": "dynamo"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "inductor"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "triton"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "flashinfer"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "cuda"}': 0,
            'ostinato_late_compiles_total{"shape": "idle", "what": "build"}': 0,
            "ostinato_step_seconds_total": 1.5,
            "ostinato_model_seconds_total": 1.25,
            'ostinato_device_seconds_total{"kind": "captured"}': 1.125,
            'ostinato_device_seconds_total{"kind": "eager"}': 0,
            "ostinato_host_gap_seconds_total": 0.125,
            "ostinato_scheduled_tokens_total": 60,
            "ostinato_padding_tokens_total": 4,
            "ostinato_requests_waiting_for_grammar": 1,
            "ostinato_grammar_seconds_total": 0.5,
            "ostinato_grammar_build_seconds_total": 0.25,
            "ostinato_kv_cache_evictions_total": 5,
            "ostinato_requests_waiting_for_encodings": 1,
            "ostinato_inputs_encoded_total": 6,
            "ostinato_encoding_hits_total": 4,
            "ostinato_encode_seconds_total": 0.75,
            'ostinato_iteration_tokens_bucket{"le": "4.0"}': 0,
            'ostinato_iteration_tokens_bucket{"le": "8.0"}': 2,
            'ostinato_iteration_tokens_bucket{"le": "+Inf"}': 2,
            "ostinato_iteration_tokens_sum": 60,
            'ostinato_steps_total{"kind": "captured"}': 7,
            'ostinato_steps_total{"kind": "compiled"}': 0,
            'ostinato_steps_total{"kind": "eager"}': 1,
            'ostinato_layers{"program": "captured"}': 8,
            'ostinato_layers{"program": "inductor"}': 0,
        }
        assert {name: samples[name] for name in expected} == expected

    def test_the_apis_own_timing(self, app):
        app.chat()
        app.complete(n=2, stream=True)
        samples = self.samples(app)
        expected = {
            "ostinato_time_to_first_token_seconds_count": 3,
            "ostinato_inter_token_latency_seconds_count": 6,
            "ostinato_e2e_request_latency_seconds_count": 2,
            "ostinato_request_generation_tokens_sum": 9,
            'ostinato_completions_total{"finish_reason": "stop"}': 3,
            'ostinato_completions_total{"finish_reason": "abort"}': 0,
            'ostinato_completions_total{"finish_reason": "repetition"}': 0,
        }
        assert {name: samples[name] for name in expected} == expected

    def test_refusals_by_status(self, app):
        app.chat(temperature=9)
        app.chat(messages=[])
        app.chat(model="x")
        samples = self.samples(app)
        assert samples['ostinato_refused_requests_total{"status": "400"}'] == 2
        assert samples['ostinato_refused_requests_total{"status": "404"}'] == 1

    def test_two_servers_do_not_share_figures(self, make_app):
        first, second = make_app(), make_app()
        first.chat()
        assert self.samples(second)["ostinato_e2e_request_latency_seconds_count"] == 0


def test_one_log_line_per_request_without_its_text(app, caplog):
    with caplog.at_level(logging.INFO, "ostinato.requests"):
        app.chat(request_id="me", messages=[{"role": "user", "content": "confidential"}])
    (line,) = [record.getMessage() for record in caplog.records if "me" in record.getMessage()]
    assert line.startswith("chatcmpl-me done prompt=")
    assert "cached=2 output=3 preparation=" in line
    assert "confidential" not in caplog.text
    assert "Hel" not in caplog.text
