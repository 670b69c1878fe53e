"""The engine as an asynchronous client sees it: a process, a socket, a stream per request.

Imports no torch: this is the API process's side. Detokenisation and stop strings happen here, so
that they never delay a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ostinato.conf.root import EngineConfig
from ostinato.runtime.completion import PromptCompletions
from ostinato.runtime.errors import EngineDeadError, StartupError
from ostinato.runtime.messages import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    EngineFailed,
    EngineReady,
    Phase,
    ResetPrefixCache,
    Shutdown,
    StepNews,
    encoder,
    engine_decoder,
)
from ostinato.runtime.requests import make_requests
from ostinato.runtime.tokenizer import Tokenizer
from ostinato.runtime.types import (
    EngineStats,
    RequestOutput,
    SamplingParams,
    SequenceOutput,
    ServedModel,
)

__all__ = ("EngineClient",)

_LOG = logging.getLogger(__name__)
_CLOSE_S = 5.0  # how long a closing engine process gets before it is killed

News = SequenceOutput | EngineDeadError


class EngineClient:
    """Starts, feeds and ends one engine process.

    All methods run on one event loop. `model`, `tokenizer` are set once `start` has returned.
    """

    model: ServedModel
    tokenizer: Tokenizer | None

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._encoder = encoder()
        self._directory = Path(tempfile.mkdtemp(prefix="ostinato-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None
        self._streams: dict[str, asyncio.Queue[tuple[str, News]]] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._counter = itertools.count()
        self._last_news = time.monotonic()
        self._death: str | None = "it was not started"
        self.stats = EngineStats()
        self.startup_seconds: dict[str, float] = {}  # finished phases of the start, so far

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs and is ready."""
        return self._death is None

    @property
    def death_reason(self) -> str | None:
        """Why the engine does not run, or None."""
        return self._death

    @property
    def num_unfinished(self) -> int:
        """Engine requests without a terminal output yet; a prompt with n completions counts n."""
        return len(self._streams)

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the engine completed a step or an idle beat."""
        return time.monotonic() - self._last_news

    async def start(
        self, on_phase: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        """`spawn` and `wait_until_ready`."""
        await self.spawn()
        await self.wait_until_ready(on_phase)

    async def spawn(self) -> None:
        """Start the engine process; it loads the model while the caller does something else."""
        address = f"ipc://{self._directory}/engine"
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ostinato.runtime.worker", address, stdin=asyncio.subprocess.PIPE
        )
        self._ended = asyncio.create_task(self._process.wait())
        assert self._process.stdin is not None, "stdin=PIPE"
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        await self._process.stdin.drain()

    async def wait_until_ready(
        self, on_phase: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        """Wait until the spawned engine serves.

        Args:
            on_phase: called with each finished phase of the start and its seconds.

        Raises:
            StartupError: the engine can not start; one line that says why.
        """

        def note(name: str, seconds: float) -> None:
            self.startup_seconds[name] = seconds
            on_phase(name, seconds)

        ready = await self._wait_until_ready(note)
        self.model, self.stats = ready.model, ready.stats
        begin = time.perf_counter()
        self.tokenizer = (
            Tokenizer.from_directory(
                ready.model.tokenizer, chat_template_file=self._config.model.chat_template
            )
            if ready.model.tokenizer
            else None
        )
        note("tokenizer", time.perf_counter() - begin)
        self._death = None
        self._last_news = time.monotonic()
        self._receiver = asyncio.create_task(self._receive())

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """News of all `sampling.n` completions until each has ended; closing the iterator aborts.

        With `best_of` and beam search there is one piece of news of each, at the end.

        Raises:
            InvalidRequestError: before the first news, when the request can not be served.
            EngineDeadError: the engine ended; nothing more will come.
        """
        # The engine's ids are unique even when a client sends one id twice.
        unique_id = f"{request_id}#{next(self._counter)}"
        requests = make_requests(
            unique_id,
            prompt_token_ids,
            sampling,
            self.model,
            priority=priority,
            cache_salt=cache_salt,
            tokenizer=self.tokenizer,
        )
        if self._death is not None:
            raise EngineDeadError(f"the engine does not run: {self._death}")
        queue: asyncio.Queue[tuple[str, News]] = asyncio.Queue()
        completions = PromptCompletions(requests, sampling, self.tokenizer)
        self._streams.update(dict.fromkeys(completions.unfinished_ids, queue))
        try:
            for request in requests:
                await self._send(AddRequest(request))
            while unfinished := completions.unfinished_ids:
                engine_id, news = await queue.get()
                if isinstance(news, EngineDeadError):
                    raise news
                outputs = completions.process(news)
                for ended in set(unfinished).difference(completions.unfinished_ids):
                    self._streams.pop(ended, None)
                    if ended != engine_id or news.finish_reason is None:
                        # A stop string, or all end with this one: the engine does not know yet.
                        await self._send(AbortRequests([ended]))
                for output in outputs:
                    output.request_id = request_id
                    yield output
        finally:
            if unfinished := completions.unfinished_ids:
                for engine_id in unfinished:
                    self._streams.pop(engine_id, None)
                with contextlib.suppress(zmq.ZMQError, EngineDeadError):
                    await asyncio.shield(self._send(AbortRequests(unfinished)))

    async def abort(self, request_id: str) -> None:
        """End all completions of a request; no-op when it has ended."""
        engine_ids = [key for key in self._streams if key.rsplit("#", 1)[0] == request_id]
        if engine_ids:
            await self._send(AbortRequests(engine_ids))

    async def reset_prefix_cache(self) -> None:
        """Forget cached blocks that no sequence uses."""
        await self._send(ResetPrefixCache())

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is unfinished; False when `timeout_s` was not enough."""
        deadline = time.monotonic() + timeout_s
        while self._streams and self._death is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        """End the engine process and free everything; safe to call twice."""
        process, self._process = self._process, None
        if self._death is None:
            self._mark_dead("it was closed")
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
            self._receiver = None
        if process is not None and process.returncode is None:
            with contextlib.suppress(zmq.ZMQError, EngineDeadError):
                await self._send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), _CLOSE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _send(self, message: ClientMessage) -> None:
        # The queue has no limit, so a send could only ever wait for a peer that is gone: for ever.
        try:
            await self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDeadError("the engine ended: it left its socket") from error

    async def _next_message(self) -> bytes | None:
        """The next message, or None when the process ended without one."""
        assert self._ended is not None, "called between start and close"
        receive = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({receive, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            # A dying process's last words are in the socket before its end is seen.
            if not receive.done():
                await asyncio.wait({receive}, timeout=0.2)
            return bytes(receive.result()) if receive.done() else None
        finally:
            receive.cancel()

    async def _wait_until_ready(self, on_phase: Callable[[str, float], None]) -> EngineReady:
        while True:
            data = await self._next_message()
            if data is None:
                assert self._process is not None, "started above"
                raise StartupError(
                    f"the engine process ended with code {self._process.returncode} while "
                    "starting; its log is above"
                )
            message = engine_decoder.decode(data)
            if isinstance(message, Phase):
                on_phase(message.name, message.seconds)
            elif isinstance(message, EngineReady):
                return message
            elif isinstance(message, EngineFailed):
                raise StartupError(message.message)

    async def _receive(self) -> None:
        """Routes news to their streams until the engine ends."""
        while True:
            data = await self._next_message()
            if data is None:
                self._mark_dead("its process ended unexpectedly")
                return
            message = engine_decoder.decode(data)
            self._last_news = time.monotonic()
            if isinstance(message, StepNews):
                if message.stats is not None:
                    self.stats = message.stats
                for news in message.outputs:
                    self._route(news)
            elif isinstance(message, EngineFailed):
                self._mark_dead(message.message)
                return

    def _route(self, news: SequenceOutput) -> None:
        queue = self._streams.get(news.request_id)
        if queue is None:  # aborted a moment ago
            return
        if news.finish_reason is not None:
            del self._streams[news.request_id]
        queue.put_nowait((news.request_id, news))

    def _mark_dead(self, reason: str) -> None:
        self._death = reason
        if self._streams:
            _LOG.error("the engine ended with %d requests: %s", len(self._streams), reason)
        for engine_id, queue in self._streams.items():
            queue.put_nowait((engine_id, EngineDeadError(f"the engine ended: {reason}")))
        self._streams.clear()
