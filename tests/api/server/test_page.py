"""The files of the page and the routes that it reads, with a scripted engine."""

from __future__ import annotations

import re
import time

import msgspec
import pytest

from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.engine.engine_state import BlockMap, EngineState, RunningState, WaitingState
from ostinato.runtime.engine.flight_recorder import StepRecord
from ostinato.runtime.errors import EngineDeadError
from ostinato.runtime.types.engine_info import EngineStats
from ostinato.runtime.types.tier_stats import TierStats
from tests.api.fake_client import FakeClient

FILES = [
    "page.css",
    "icon.svg",
    "blocks.js",
    "charts.js",
    "chat.js",
    "dom.js",
    "engine.js",
    "main.js",
    "server.js",
    "tokens.js",
]
STEP = StepRecord(7, 5.0, 3, 2, 2, 0, 9, 1, [("a", 0, 2)], "captured", 4, 0.125)
STATE = EngineState(
    stats=EngineStats(num_running=2, max_num_seqs=8, num_output_tokens=11),
    rows=[RunningState(0, "a", 5, 5, 2, 9, 1, 1, 3, 0, 0.5)],
    num_rows=2,
    waiting=[WaitingState("b", 6, 0, 0.25, 0)],
    blocks=BlockMap(4, 16, 1, [3, 2, 1, 0], [3, 0, 0, 0], [1, 1, 1, 1]),
    steps=[STEP],
    bucket_tokens=[1, 2, 4],
)


class TestFiles:
    def test_the_page(self, app):
        response = app.http.get("/")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert '<html lang="en">' in response.text

    def test_what_it_names_exists(self, app):
        text = app.http.get("/").text
        named = set(re.findall(r'(?:href|src)="/page/([^"]+)"', text))
        assert named == {"page.css", "main.js", "icon.svg"}
        for name in FILES:
            response = app.http.get(f"/page/{name}")
            assert response.status_code == 200
            named |= set(re.findall(r'from "\./([^"]+)"', response.text))
        assert named == set(FILES)

    @pytest.mark.parametrize("name", ["", *(f"page/{name}" for name in FILES)])
    def test_nothing_from_elsewhere_and_no_markup_from_text(self, app, name):
        text = app.http.get(f"/{name}").text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<script(?![^>]*src=)|\son[a-z]+=|\sstyle=|javascript:", text)

    @pytest.mark.parametrize(
        "path",
        [
            *("/page/none.js", "/page/..%2fapp.py", "/page/page.py", "/page/x", "/page/"),
            *(f"/page/{'x' * 300}.html", "/page/a%00.js"),
        ],
    )
    def test_nothing_else_is_served(self, app, path):
        assert app.http.get(path).status_code == 404

    @pytest.mark.parametrize("path", ["/", "/page/main.js", "/debug/state", "/debug/flight"])
    def test_it_can_be_left_out(self, make_app, path):
        app = make_app(server=ServerConfig(page=False))
        assert app.http.get(path).status_code == 404


class TestState:
    def test_a_working_engine(self, app):
        app.engine.state = STATE
        state = app.http.get("/debug/state").json()
        assert state["problem"] is None
        assert state["model"] == {
            "name": "test-model",
            "max_model_len": 64,
            "can_generate": True,
            "can_chat": True,
        }
        engine = state["engine"]
        assert engine["rows"][0]["request_id"] == "a"
        assert engine["rows"][0]["num_shared_blocks"] == 1
        assert (engine["num_rows"], engine["max_num_seqs"]) == (2, 8)
        assert engine["waiting"][0]["num_prompt_tokens"] == 6
        assert engine["blocks"]["kinds"] == [3, 2, 1, 0]
        assert engine["steps"][0]["num_padded_tokens"] == 4
        assert engine["bucket_tokens"] == [1, 2, 4]
        assert state["stats"]["num_output_tokens"] == 11
        assert state["use"]["processes"]["api"]["resident_bytes"] > 1e7
        assert state["live"] == {"ttft": None, "itl": None}

    def test_tiers_are_named(self, app):
        app.engine.state = STATE
        assert app.http.get("/debug/state").json()["stats"]["tiers"] == {}
        tiers = {"disk": TierStats(num_places=9, num_used_places=4)}
        app.engine.state = msgspec.structs.replace(STATE, stats=EngineStats(tiers=tiers))
        disk = app.http.get("/debug/state").json()["stats"]["tiers"]["disk"]
        assert (disk["num_places"], disk["num_used_places"]) == (9, 4)

    def test_one_of_several_engines(self, app, monkeypatch):
        app.engine.state = STATE
        assert app.http.get("/debug/state").json()["engines"] == []
        monkeypatch.setattr(FakeClient, "replicas", property(lambda self: [self, self]))
        state = app.http.get("/debug/state?engine=1").json()
        assert [one["status"]["state"] for one in state["engines"]] == ["serving", "serving"]
        app.engine.stats = EngineStats()  # as before the engine's first report: no blocks
        state = app.http.get("/debug/state").json()
        assert [one["kv_cache_usage"] for one in state["engines"]] == [0, 0]
        for path in ("/debug/state", "/debug/flight"):
            refused = app.http.get(f"{path}?engine=2")
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == "engine=2; it must be in [0, 1]"

    def test_latencies_once_somebody_looks(self, app):
        app.engine.state = STATE
        app.http.get("/debug/state")
        app.chat()
        live = app.http.get("/debug/state").json()["live"]
        assert (live["ttft"]["count"], live["itl"]["count"]) == (1, 2)

    def test_no_text_and_no_tokens(self, app):
        app.engine.state = STATE
        assert not re.search(r"token_ids|prompt\"|text", app.http.get("/debug/state").text)

    def test_while_it_starts(self, app):
        app.service.admission.phase = "loading"
        state = app.http.get("/debug/state").json()
        assert state["problem"] == "the engine is starting: loading"
        assert (state["engine"], state["model"]) == (None, None)

    def test_when_it_is_dead(self, app):
        app.engine.death_reason = "it was killed"
        state = app.http.get("/debug/state").json()
        assert "it was killed" in state["problem"]
        assert state["engine"] is None

    @pytest.mark.parametrize(
        ("error", "text"),
        [(TimeoutError(), "has not answered for 2 s"), (EngineDeadError("it ended"), "it ended")],
    )
    def test_when_it_does_not_answer(self, app, error, text):
        app.engine.state = error
        response = app.http.get("/debug/state")
        assert response.status_code == 200
        assert text in response.json()["problem"]


def test_the_flight_recorder(app):
    app.engine.records = [STEP, StepRecord(8, 6.0, 1, 1, 1, 0, 9, 1, [("a", 2, 1)])]
    flight = app.http.get("/debug/flight").json()
    assert [(one["step"], one["state"]) for one in flight["steps"]] == [
        (7, "done"),
        (8, "under way"),
    ]
    assert flight["steps"][0]["entries"] == [["a", 0, 2]]
    assert abs(flight["written_at"] - time.time()) < 300
