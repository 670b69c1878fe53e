"""The metrics of adapters, with a scripted engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.adapter_apps import adapter_apps, load, unload
from tests.api.fake_client import HELLO


@pytest.fixture
def make(make_app):
    return adapter_apps(make_app)


@pytest.fixture
def app(make):
    return make()


class TestMetrics:
    def samples(self, app: Any) -> dict[str, float]:
        text = app.http.get("/metrics").text
        return {
            sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "adapter" in sample.name or "lora" in sample.name
        }

    def test_slots_and_requests(self, app):
        load(app, "sql")
        load(app, "chat")
        for name in ("sql", "sql", "chat", None):
            assert app.complete(prompt=["Hi", "the"], model=name).status_code == 200
        found = self.samples(app)
        assert found["ostinato_adapter_slots"] == 4
        assert found["ostinato_adapter_slots_used"] == 2
        assert found["ostinato_adapter_requests_total{adapter=sql}"] == 2
        assert found["ostinato_adapter_requests_total{adapter=chat}"] == 1
        assert "vllm:lora_requests_info{max_lora=4}" in "".join(found)
        unload(app, "sql")
        found = self.samples(app)
        assert found["ostinato_adapter_slots_used"] == 1
        assert not any("sql" in name for name in found)

    def test_names_that_were_unloaded_are_forgotten(self, app):
        for number in range(50):
            app.engine.adapters.add(f"adapter {number}")
            assert app.complete(model=f"adapter {number}").status_code == 200
            app.engine.adapters.remove(f"adapter {number}")
        assert not any("{adapter=" in name for name in self.samples(app))

    @pytest.mark.parametrize("runs", [True, False])
    def test_vllms_figure_of_requests_in_progress(self, make, runs):
        app = make([HELLO[0], None, HELLO[2]] if runs else [None, HELLO[2]])
        load(app)
        thread = threading.Thread(target=lambda: app.complete(model="sql"))
        thread.start()
        names = ("sql", "") if runs else ("", "sql")
        wanted = (
            "vllm:lora_requests_info{max_lora=4}"
            f"{{running_lora_adapters={names[0]}}}{{waiting_lora_adapters={names[1]}}}"
        )
        while wanted not in self.samples(app):
            assert thread.is_alive(), self.samples(app)
        unload(app)  # the request still takes the slot
        assert self.samples(app)["ostinato_adapter_slots_used"] == 1
        app.engine.released.set()
        thread.join()
        found = self.samples(app)
        assert found["ostinato_adapter_slots_used"] == 0
        (name,) = (name for name in found if name.startswith("vllm:lora_requests_info"))
        assert name.endswith("{running_lora_adapters=}{waiting_lora_adapters=}")
        assert found[name] > 1.7e9

    def test_a_server_without_slots_has_no_figure_of_vllm(self, make_app):
        found = self.samples(make_app())
        assert found == {"ostinato_adapter_slots": 0, "ostinato_adapter_slots_used": 0}
