"""Applications with a scripted engine that can have adapters, and requests that change these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.runtime.types.engine_info import ServedTask
from tests.api.fake_client import HELLO
from tests.waiting import wait_until

__all__ = ("adapter_apps", "is_released", "load", "unload", "wait_until_released")

TASKS = (ServedTask.generate, ServedTask.embed)


def adapter_apps(make_app: Callable[..., Any]) -> Callable[..., Any]:
    """A function like `make_app` whose applications have four slots for adapters."""

    def make(script: Any = HELLO, *, slots: int = 4, runtime: bool = True, **fields: Any) -> Any:
        lora = LoraConfig(max_adapters=slots, allow_runtime_loading=runtime, directory="adapters")
        return make_app(script, lora=lora, **{"max_model_len": 8000, "tasks": TASKS} | fields)

    return make


def load(app: Any, name: str = "sql", path: str = "sql", **fields: object) -> Any:
    return app.http.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields}
    )


def unload(app: Any, name: str = "sql", **fields: object) -> Any:
    return app.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})


def is_released(app: Any) -> bool:
    return not any(app.engine.adapters.held.values())


def wait_until_released(app: Any) -> None:
    """Wait until no request holds an adapter. A request releases its own just after its answer."""
    wait_until(lambda: is_released(app), "a request holds its adapter after its answer")
