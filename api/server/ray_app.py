"""The API as an application of Ray Serve.

    serve run ostinato.api.server.ray_app:build model.path=/models/llama device.threads=8

Each replica of the deployment is an API process with `parallel.data` engines on its machine. Ray
Serve listens for requests. It starts, scales and ends replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ostinato.api.server.app import create_app, make_service
from ostinato.api.service.service import Service
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.schema import DeviceName
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import StartupError
from ostinato.runtime.media_files.pyav import require_av
from ostinato.runtime.process.log_format import configure_logging

if TYPE_CHECKING:
    from litestar import Litestar

__all__ = ("LiveApp", "build")

# The largest number of requests of a replica at a time: so large that only the server's own limits
# apply.
_MOST_REQUESTS = 10_000
# Ray Serve listens and receives, and the replicas would number the blocks of one trace separately.
_ONLY_RUN_SERVE = (
    "host",
    "port",
    "tls_certificate",
    "tls_key",
    "max_header_kib",
    "header_timeout_s",
    "body_timeout_s",
    "record_trace",
)


def build(settings: Mapping[str, object]) -> Any:
    """Make the application. `serve run` and the file of `serve deploy` name this function.

    Args:
        settings: the settings of `run serve`, by key.

    Returns:
        A `ray.serve.Application`.

    Raises:
        ConfigError: a setting is wrong, or has no effect under Ray Serve.
    """
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(overrides)
    _check(config.server)
    engines = config.parallel.data
    on_gpus = config.device.name is DeviceName.cuda
    num_ranks = config.parallel.num_ranks
    threads = num_ranks if on_gpus else config.device.threads or num_ranks
    num_gpus = engines * num_ranks if on_gpus else 0
    resources = {"num_cpus": engines * threads, "num_gpus": num_gpus}
    if not on_gpus and config.device.threads is None:
        overrides.append(f"device.threads={threads}")
    serve = import_module("ray.serve")

    def make_app() -> LiveApp:
        return LiveApp(load_config(overrides))

    class Replica:
        app: LiveApp

        async def check_health(self) -> None:
            self.app.check_health()

    deployment = serve.deployment(
        name="ostinato", ray_actor_options=resources, max_ongoing_requests=_MOST_REQUESTS
    )
    return deployment(serve.ingress(make_app)(Replica)).bind()


def _check(server: ServerConfig) -> None:
    default = ServerConfig()
    for name in _ONLY_RUN_SERVE:
        value = getattr(server, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"server.{name}={value} has no effect under Ray Serve, which receives the requests"
                " of all replicas: leave it out, or start the server with `run serve`"
            )


class LiveApp:
    """An ASGI application that starts and ends its engines with its lifespan.

    Args:
        config: the configuration of the server and the engines.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._client: EngineClient | None = None
        self._service: Service | None = None
        self._app: Litestar | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        assert self._app is not None, "a request came before the start"
        await self._app(scope, receive, send)

    def check_health(self) -> None:
        """Raise RuntimeError if no engine will serve again. Ray Serve then replaces the replica."""
        if self._client is not None and (reason := self._client.death_reason):
            raise RuntimeError(f"the engine does not run: {reason}")

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        try:
            await self._start()
        except StartupError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        server = self._config.server
        configure_logging(server.log_level, server.log_format, "api")
        self._client = EngineClient(self._config)
        try:
            self._service = make_service(self._client, self._config)
            self._app = create_app(self._service)
            await self._client.start()
            if self._client.model.audio is not None or self._client.model.sounds is not None:
                require_av()
        except BaseException:
            await self._client.close()
            raise
        self._service.preparer.start()
        self._service.admission.phase = None

    async def _stop(self) -> None:
        assert self._client is not None, "started"
        assert self._service is not None, "started"
        await self._service.admission.drain(self._config.server.drain_timeout_s)
        await self._client.close()
        await asyncio.to_thread(self._service.close)
