"""`run serve`: starts the engine process and the HTTP server, and ends both at a signal.

It binds the port, then starts the engine process and the HTTP server in parallel. Requests to
the model get 503 until it is ready. On SIGTERM or SIGINT the server takes no new requests, finishes
the running requests within `server.drain_timeout_s`, stops the engine and exits 0. A second signal
aborts the running requests; the exit code is then 128 plus the signal's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import json
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from ostinato import __version__
from ostinato.api.http.api_keys import with_keys
from ostinato.api.observability.trace_recorder import TraceRecorder
from ostinato.api.server.heap_memory import return_free_memory, return_large_blocks
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.early_start.early_engine import EarlyEngine
from ostinato.runtime.early_start.process_age import process_age_s
from ostinato.runtime.errors import StartupError
from ostinato.runtime.file_limit import reserve_files
from ostinato.runtime.media_files.pyav import require_av
from ostinato.runtime.process.log_format import configure_logging
from ostinato.runtime.types.engine_info import ServedTask

if TYPE_CHECKING:
    import uvicorn

    from ostinato.api.service.service import Service

__all__ = ("serve",)

_LOG = logging.getLogger("ostinato.server")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FLUSH_S = 3  # time for connections to receive their last bytes
_KEEP_ALIVE_S = 60


def serve(config: RunConfig, early: EarlyEngine | None = None) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        config: the configuration of the server and its engines.
        early: an engine process that has been started; None = this function starts all
            engine processes.

    Raises:
        StartupError: the port is taken, a file of the configuration is wrong, too few files may be
            open at once, or the engine cannot start; the message is one line.
    """
    num_connections = reserve_files()
    return_large_blocks()
    config = replace(config, server=with_keys(config.server))
    _check_tls(config.server)
    configure_logging(config.server.log_level, config.server.log_format, "api")
    listener = _listen(config.server)
    trace = None
    if config.server.record_trace:
        trace = TraceRecorder(config.server.record_trace, config.cache.block_size)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, early, listener, trace, num_connections))


async def _serve(
    config: RunConfig,
    early: EarlyEngine | None,
    listener: socket.socket,
    trace: TraceRecorder | None,
    num_connections: int,
) -> int:
    began = time.monotonic() - process_age_s()
    with _Signals() as signals:
        if ensure_cache() and early is not None:
            early.close()  # it was started with the cache directory that cannot be written
        client = EngineClient(config, early)
        try:
            await client.spawn()
            client.startup_seconds["launch"] = time.monotonic() - began
            # The web framework is imported only now, while the engine process starts.
            service, http = _http_server(client, config, trace, num_connections)
        except BaseException:
            await client.close()
            raise
        server = _Server(config, client, service, http, listener, signals, began)
        return await server.run()


class _Signals:
    """Handles SIGTERM and SIGINT while its `with` block runs.

    Attributes:
        first: set by the first signal.
        second: set by the second signal.
        exit_code: the exit code of the process after the signals so far.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.exit_code = 0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._note, number)
        return self

    def __exit__(self, *exception: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _note(self, number: int) -> None:
        if self.first.is_set():
            self.exit_code = 128 + number
            self.second.set()
        self.first.set()


class _Server:
    """One run of the server: start, serve, shut down.

    Args:
        client: the engine client, whose engine process has been spawned.
        service: the state that handlers share.
        http: the HTTP server with its application.
        listener: the socket, bound and listening.
        signals: the signals that end the run.
        began: when this process was started, in seconds of time.monotonic().
    """

    def __init__(
        self,
        config: RunConfig,
        client: EngineClient,
        service: Service,
        http: uvicorn.Server,
        listener: socket.socket,
        signals: _Signals,
        began: float,
    ) -> None:
        self._config = config
        self._listener = listener
        self._say = sys.stdout.write
        self._url = _url(listener, "https" if config.server.tls_certificate else "http")
        self._began = began
        self._client = client
        self._service, self._http = service, http
        self._signals = signals

    async def run(self) -> int:
        """Run the server; returns the exit code. For errors see `serve`."""
        signals = self._signals
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        serving.add_done_callback(lambda _: signals.first.set())
        forcing = asyncio.create_task(self._force_exit())
        returning = asyncio.create_task(return_free_memory())
        try:
            if await self._before_signal(self._start()):
                await signals.first.wait()
            await self._drain()
        finally:
            self._service.admission.is_draining = True
            await self._client.close()
            self._http.should_exit = True
            await serving
            forcing.cancel()
            returning.cancel()
            await asyncio.to_thread(self._service.close)
        return signals.exit_code

    async def _force_exit(self) -> None:
        """After the second signal, let the HTTP server end without waiting for connections."""
        await self._signals.second.wait()
        self._http.force_exit = True

    async def _before_signal(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for `work`; a signal cancels it. Returns whether `work` finished."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._signals.first.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _start(self) -> None:
        self._say(f"ostinato {__version__}: {self._url} answers 503 until the model is ready\n")
        self._on_phase("launch", self._client.startup_seconds["launch"])
        self._service.admission.phase = "loading"
        await self._import_rest()
        self._service.preparer.launch()
        # Objects of the start-up are never freed. After `freeze`, garbage collections skip them.
        # Nearly all of them exist by now, and this process waits for the engine. The command line
        # has switched collections off, because each would visit all objects of imported modules.
        gc.collect()
        gc.freeze()
        gc.enable()
        await self._client.wait_until_ready(self._on_phase)
        gc.freeze()
        if self._client.model.audio is not None or self._client.model.sounds is not None:
            require_av()
        self._service.admission.phase = None
        seconds = time.monotonic() - self._began
        self._client.startup_seconds["ready"] = seconds
        for adapter in self._client.adapters.served:
            text = "adapter %r is loaded: %s, slot %d"
            _LOG.info(text, adapter.name, adapter.path, adapter.slot)
        self._say(self._hints(seconds))
        sys.stdout.flush()
        self._service.preparer.start()

    async def _import_rest(self) -> None:
        """Import what the first stream and the first `/metrics` would import.

        Each takes 50 ms of processor time, and all other requests would wait for it.
        """
        import anyio

        await anyio.sleep(0)  # Litestar's streams use it; it imports its part for asyncio when used
        self._service.metrics.probe.read([])

    def _on_phase(self, name: str, seconds: float) -> None:
        self._service.admission.phase = f"{name} is done"
        self._say(f"  {name:<28} {seconds:7.2f} s\n")
        sys.stdout.flush()

    def _hints(self, seconds: float) -> str:
        model, tokenizer = self._client.model, self._client.tokenizer
        body: Mapping[str, object] | None = None
        if ServedTask.transcribe in model.tasks:
            path = "/v1/audio/transcriptions"
        elif ServedTask.generate not in model.tasks:
            path, body = "/v1/embeddings", {"input": "What is a block table?"}
            if ServedTask.classify in model.tasks:
                path = "/v1/rerank"
                body = {"query": "What is a block table?", "documents": ["A map.", "A chair."]}
        elif tokenizer is not None and tokenizer.chat_template is not None:
            path = "/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": "What is a block table?"}]}
        else:
            path = "/v1/completions"
            body = {"prompt": "Once upon a time" if tokenizer else [1], "max_tokens": 40}
        data = "-F file=@speech.wav"
        if body is not None:
            data = f"-H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"
        page = f"  page       {self._url}/\n" if self._config.server.page else ""
        return (
            f"ready after {seconds:.1f} s: {model.name}, context {model.max_model_len} tokens\n"
            f"\n  curl {self._url}{path} {data}\n\n"
            f"{page}  endpoints  {self._url}/schema\n  metrics    {self._url}/metrics\n"
            f"{self._engine_hints()}  stop with Ctrl-C\n"
        )

    def _engine_hints(self) -> str:
        """A text with the addresses for managing several engines; empty for one engine."""
        count = len(self._client.replicas)
        if count == 1:
            return ""
        hints = f"  {count} engines, listed by {self._url}/health\n"
        if self._config.server.admin:
            hints += (
                f"  load new weights: curl -X POST {self._url}/reload_weights   "
                f"stop requests to engine 0: curl -X POST {self._url}/engines/0/drain\n"
            )
        return hints

    async def _drain(self) -> None:
        admission, timeout_s = self._service.admission, self._config.server.drain_timeout_s
        if admission.has_work:
            text = (
                "unfinished requests: %d, unfinished sequences: %d; waiting at most %g s for them"
            )
            _LOG.info(text, admission.num_admitted, self._client.num_unfinished, timeout_s)
        drain = asyncio.create_task(admission.drain(timeout_s))
        cut = asyncio.create_task(self._signals.second.wait())
        await asyncio.wait({drain, cut}, return_when=asyncio.FIRST_COMPLETED)
        if self._client.num_unfinished:
            _LOG.warning("sequences that are cut off: %d", self._client.num_unfinished)
        for task in (drain, cut):
            task.cancel()
        await asyncio.gather(drain, cut, return_exceptions=True)


def _http_server(
    client: EngineClient, config: RunConfig, trace: TraceRecorder | None, num_connections: int
) -> tuple[Service, uvicorn.Server]:
    import uvicorn

    from ostinato.api.http.http_protocol import HttpProtocol, ReceiveLimits
    from ostinato.api.server.app import create_app, make_service

    class Server(uvicorn.Server):
        """uvicorn's server without its signal handling. `_Server` decides when it ends."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    service = make_service(client, config)
    service.runner.trace = trace
    protocol = functools.partial(
        HttpProtocol,
        limits=ReceiveLimits.of(config.server, num_connections),
        count_refusal=service.metrics.count_refusal,
    )
    http = Server(
        uvicorn.Config(
            create_app(service),
            http=protocol,  # pyright: ignore[reportArgumentType] - uvicorn calls it like the class
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ssl_certfile=config.server.tls_certificate or None,
            ssl_keyfile=config.server.tls_key or None,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
        )
    )
    return service, http


def _listen(server: ServerConfig) -> socket.socket:
    """Bind and listen, before the model loads, so that a port in use is reported early."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"server.port={server.port} on {server.host} is in use: stop the program that"
                f" listens there, or choose another port (server.port=0 takes any free one)"
            ) from error
        raise StartupError(
            f"cannot listen on server.host={server.host} server.port={server.port}:"
            f" {error.strerror or error}"
        ) from error


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host) or str(host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_tls(server: ServerConfig) -> None:
    """Load the TLS files before the engine starts, so that a wrong file is reported at once."""
    if not server.tls_certificate:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.tls_certificate, server.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise StartupError(
            f"server.tls_certificate={server.tls_certificate!r} and "
            f"server.tls_key={server.tls_key!r} cannot be used: {error}"
        ) from error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop factory of uvloop, if it is installed; None = asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
