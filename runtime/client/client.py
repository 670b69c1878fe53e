"""The engine as an asynchronous client sees it: a process, a socket, a stream per request.

Imports no torch: this is the API process's side. Detokenisation and stop strings happen here, so
that they never delay a step. When the engine process dies a new one is started and the open streams
go on in it; docs/reliability.md says how.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq.asyncio

from ostinato.conf.root import EngineConfig
from ostinato.runtime.client.completion import PromptCompletions
from ostinato.runtime.client.in_flight import Flights, given_up_news
from ostinato.runtime.client.inspection import Inspector
from ostinato.runtime.client.pending_calls import PendingCalls
from ostinato.runtime.client.pooling import make_pooling_request
from ostinato.runtime.client.requests import make_requests
from ostinato.runtime.client.restarts import Death, DeathReason, RestartPolicy, death_of
from ostinato.runtime.client.watchdog import TICK_S, Watch
from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.engine.flight_recorder import (
    StepRecord,
    flight_path,
    keep_flight,
    read_flight,
)
from ostinato.runtime.errors import DeadlineError, EngineDeadError, StartupError
from ostinato.runtime.grammar.compiler import GrammarCompiler
from ostinato.runtime.process.engine_process import EngineProcess
from ostinato.runtime.process.ipc import (
    AbortRequests,
    AddRequest,
    CallName,
    CallReply,
    ClientMessage,
    EngineFailed,
    Inspect,
    Inspected,
    StepBegins,
    StepNews,
)
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from ostinato.runtime.types.outputs import FinishReason, PooledOutput, RequestOutput, SequenceOutput
from ostinato.runtime.types.params import PoolingParams, SamplingParams

__all__ = ("EngineClient",)

_LOG = logging.getLogger(__name__)
DEADLINE_REASON = "deadline_exceeded"
# A start after a death has ten times as long as all phases of the first one, and at least this.
_SHORTEST_START_LIMIT_S = 300.0

News = SequenceOutput | EngineDeadError | DeadlineError
Reader = asyncio.Queue[tuple[str, News]]


class EngineClient:
    """Starts, feeds and ends one engine process, and its successors when it dies.

    All methods run on one event loop. `model`, `tokenizer` are set once `start` has returned.
    """

    model: ServedModel
    tokenizer: Tokenizer | None

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._directory = Path(tempfile.mkdtemp(prefix="ostinato-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._engines = itertools.count()  # numbers of engine processes
        self._engine: EngineProcess | None = None
        self._flights: Flights[Reader] = Flights()
        self._calls = PendingCalls()
        self._supervisor: asyncio.Task[None] | None = None
        self._counter = itertools.count()
        self._grammars: GrammarCompiler | None = None
        self._watch = Watch()
        self._watcher: asyncio.Task[None] | None = None
        self._hang: str | None = None  # why this client killed the engine that runs
        self._start_limit_s = _SHORTEST_START_LIMIT_S
        self._death: str | None = "it was not started"
        self._restarting: str | None = None
        server = config.server
        self._restarts = RestartPolicy(
            server.max_restarts, server.restart_window_s, server.restart_backoff_s
        )
        self._inspector = Inspector(lambda: self._send(Inspect()))
        self.stats = EngineStats()
        self.startup_seconds: dict[str, float] = {}  # finished phases of the first start, so far

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs and is ready."""
        return self._death is None and self._restarting is None

    @property
    def death_reason(self) -> str | None:
        """Why the engine does not run and will not be started again, or None."""
        return self._death

    @property
    def restart_reason(self) -> str | None:
        """What the last engine died of while the next one starts; None when none does."""
        return self._restarting

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts so far by `DeathReason`."""
        return self._restarts.counts

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, or None when there is none."""
        return None if self._engine is None else self._engine.pid

    @property
    def num_unfinished(self) -> int:
        """Engine requests without a terminal output yet; a prompt with n completions counts n."""
        return len(self._flights)

    @property
    def num_queued(self) -> int:
        """Engine requests that wait for their first token."""
        return self._flights.num_queued

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._flights.num_queued_tokens

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the engine completed a step or an idle beat."""
        return self._watch.silence_s

    @property
    def seconds_overdue(self) -> float:
        """Of `seconds_since_step`, those that the predicted time of its step does not explain."""
        return self._watch.overdue_s

    async def start(
        self, on_phase: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        """`spawn` and `wait_until_ready`."""
        await self.spawn()
        await self.wait_until_ready(on_phase)

    async def spawn(self) -> None:
        """Start the engine process; it loads the model while the caller does something else."""
        path = self._directory / f"engine-{next(self._engines)}"
        self._engine = EngineProcess(self._context, path)
        # Secrets of the API stay in its process.
        server = replace(self._config.server, api_keys=[], max_requests_per_key=None)
        await self._engine.spawn(msgspec.json.encode(replace(self._config, server=server)))

    async def wait_until_ready(
        self, on_phase: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        """Wait until the spawned engine serves.

        Args:
            on_phase: called with each finished phase of the start and its seconds.

        Raises:
            StartupError: the engine can not start; one line that says why.
        """
        assert self._engine is not None, "spawned"

        def note(name: str, seconds: float) -> None:
            self.startup_seconds[name] = seconds
            on_phase(name, seconds)

        ready = await self._engine.wait_until_ready(note)
        self.model, self.stats = ready.model, ready.stats
        begin = time.perf_counter()
        self.tokenizer = (
            Tokenizer.from_directory(
                ready.model.tokenizer, chat_template_file=self._config.model.chat_template
            )
            if ready.model.tokenizer
            else None
        )
        self._grammars = GrammarCompiler(ready.model)
        note("tokenizer", time.perf_counter() - begin)
        # The next engine must take whatever this one has taken.
        section = replace(self._config.model, max_model_len=ready.model.max_model_len)
        self._config = replace(self._config, model=section)
        self._death = None
        self._start_limit_s = max(_SHORTEST_START_LIMIT_S, 10 * sum(self.startup_seconds.values()))
        self._supervisor = asyncio.create_task(self._supervise())
        self._watcher = asyncio.create_task(self._watch_engine())

    async def prepare(self, sampling: SamplingParams) -> None:
        """Do what can be refused of a request before `generate`: make its grammar.

        Raises:
            InvalidRequestError: `structured_outputs` is not valid, or takes too much.
        """
        await self._grammar(sampling)

    async def _grammar(self, sampling: SamplingParams) -> str:
        if sampling.structured_outputs is None:
            return ""
        assert self._grammars is not None, "called before wait_until_ready"
        return await self._grammars.compile_async(sampling.structured_outputs)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        trace: bool = False,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """News of all `sampling.n` completions until each has ended; closing the iterator aborts.

        With `best_of` and beam search there is one piece of news of each, at the end. While the
        engine is started again the news pause. At the deadline (seconds, time.monotonic) what has
        not ended ends with the reason length and the stop reason `deadline_exceeded`.

        Raises:
            DeadlineError: at the deadline, when there was no news before it.
            InvalidRequestError: before the first news, when the request can not be served.
            EngineDeadError: the engine ended and is not started again; nothing more will come.
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
            grammar=await self._grammar(sampling),
        )
        if trace:
            requests = [msgspec.structs.replace(one, trace=True) for one in requests]
        if self._death is not None:
            raise EngineDeadError(f"the engine does not run: {self._death}")
        reader: Reader = asyncio.Queue()
        completions = PromptCompletions(requests, sampling, self.tokenizer)
        for request in requests:
            self._flights.add(request, reader)
        timer = _alarm(reader, deadline)
        has_news = False
        try:
            await self._board()
            while unfinished := completions.unfinished_ids:
                _, news = await reader.get()
                if isinstance(news, EngineDeadError):
                    raise news
                if isinstance(news, DeadlineError) and not has_news:
                    raise news
                outputs = (
                    completions.cut(DEADLINE_REASON)
                    if isinstance(news, DeadlineError)
                    else completions.process(news)
                )
                has_news = has_news or bool(outputs)
                # By a stop string, or because all end with this one: the engine does not know yet.
                await self._leave(set(unfinished).difference(completions.unfinished_ids))
                for output in outputs:
                    output.request_id = request_id
                    yield output
        finally:
            if timer is not None:
                timer.cancel()
            if unfinished := completions.unfinished_ids:
                await asyncio.shield(self._leave(unfinished))

    async def abort(self, request_id: str) -> None:
        """End all completions of a request; no-op when it has ended."""
        found = [key for key in self._flights.ids() if key.rsplit("#", 1)[0] == request_id]
        aboard = []
        for engine_id in found:
            flight = self._flights.get(engine_id)
            if flight is not None and flight.is_aboard:
                aboard.append(engine_id)
            else:
                self._route(SequenceOutput(engine_id, [], FinishReason.abort))
        if aboard:
            await self._send(AbortRequests(aboard))

    async def pool(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        trace: bool = False,
    ) -> PooledOutput:
        """The vector of one text; a cancelled call aborts it.

        Raises:
            InvalidRequestError: the request can not be served.
            EngineDeadError: the engine ended and is not started again.
        """
        unique_id = f"{request_id}#{next(self._counter)}"
        request = make_pooling_request(
            unique_id,
            prompt_token_ids,
            params,
            self.model,
            priority=priority,
            cache_salt=cache_salt,
            trace=trace,
        )
        if self._death is not None:
            raise EngineDeadError(f"the engine does not run: {self._death}")
        reader: Reader = asyncio.Queue()
        self._flights.add(request, reader)
        try:
            await self._board()
            _, news = await reader.get()
        finally:
            if self._flights.get(unique_id) is not None:
                await asyncio.shield(self._leave([unique_id]))
        if isinstance(news, EngineDeadError | DeadlineError):
            raise news
        return PooledOutput(
            request_id=request_id,
            data=news.pooled or b"",
            num_prompt_tokens=len(prompt_token_ids),
            num_cached_tokens=news.num_cached_tokens,
            finish_reason=news.finish_reason or FinishReason.error,
            error=news.error,
            scheduled_time=news.scheduled_time,
            num_preemptions=news.num_preemptions,
            events=news.events,
        )

    async def reset_prefix_cache(self) -> None:
        """Forget cached blocks.

        Raises:
            InvalidRequestError: sequences use some.
            EngineDeadError: the engine does not run.
        """
        await self._call(CallName.reset_prefix_cache)

    async def start_profile(self) -> str:
        """Let the engine record its steps; the directory of the trace that will be.

        Raises:
            InvalidRequestError: there is no such directory, or it records already.
            EngineDeadError: the engine does not run.
        """
        return await self._call(CallName.start_profile)

    async def stop_profile(self) -> str:
        """End the recording; the trace's file, on the engine's machine.

        Raises:
            InvalidRequestError: nothing is recorded.
            EngineDeadError: the engine does not run.
        """
        return await self._call(CallName.stop_profile)

    async def _call(self, name: CallName) -> str:
        if not self.is_alive:
            raise EngineDeadError(f"the engine does not run: {self._death or self._restarting}")
        call, reply = self._calls.begin(name)
        await self._send(call)
        return await reply

    async def inspect(self, timeout_s: float = 2.0) -> EngineState:
        """What the engine is doing; all who ask at once get the same answer.

        Raises:
            TimeoutError: the engine is in a step that takes longer, or it is frozen.
            EngineDeadError: it does not run.
        """
        if not self.is_alive:
            raise EngineDeadError(f"the engine does not run: {self._death or self._restarting}")
        return await self._inspector.ask(timeout_s)

    def flight_records(self) -> list[StepRecord]:
        """The engine's last steps, read from its file: a frozen engine's too."""
        return [] if self._engine is None else read_flight(flight_path(self._engine.path))

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is unfinished; False when `timeout_s` was not enough."""
        deadline = time.monotonic() + timeout_s
        while self._flights and self._death is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        """End the engine process and free everything; safe to call twice."""
        if self._grammars is not None:
            self._grammars.close()
        if self._death is None:
            self._mark_dead("it was closed")
        self._calls.fail("it was closed")
        for task in (self._supervisor, self._watcher):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._supervisor = self._watcher = None
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if not self._context.closed:
            self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _board(self) -> None:
        """Send the engine what it may have now."""
        if not self.is_alive:
            return
        for request in self._flights.board():
            await self._send(AddRequest(request))

    async def _leave(self, engine_ids: set[str] | list[str]) -> None:
        """Forget requests, and tell the engine of those that it works on."""
        if aboard := self._flights.remove(engine_ids):
            await self._send(AbortRequests(aboard))
        await self._board()

    async def _send(self, message: ClientMessage) -> None:
        """Send to the engine; nothing happens when it has just died, which `_supervise` handles."""
        if self._engine is not None:
            with contextlib.suppress(EngineDeadError):
                await self._engine.send(message)

    async def _supervise(self) -> None:
        """Route news, and start the engine again when it dies, until there are no more tries."""
        while True:
            death = await self._receive()
            self._calls.fail(death.text)
            if not await self._restart(death):
                return

    async def _receive(self) -> Death:
        """Routes news to their readers until the engine ends; how it ended."""
        engine, last_words = self._engine, None
        assert engine is not None, "started"
        while (message := await engine.next_message()) is not None:
            if isinstance(message, StepNews):
                num_steps = None
                if message.stats is not None:
                    self.stats, num_steps = message.stats, message.stats.num_steps
                has_progress = bool(message.outputs or message.progress)
                self._watch.heard(
                    num_steps, has_outputs=has_progress, has_work=len(self._flights) > 0
                )
                self._flights.advance(message.progress)
                for news in message.outputs:
                    self._route(news)
                await self._board()
            elif isinstance(message, CallReply):
                self._calls.finish(message)
            elif isinstance(message, StepBegins):
                self._flights.begin(message.request_ids)
                self._watch.step_begins(message.seconds)
            elif isinstance(message, Inspected):
                self._inspector.answer(message.state)
            elif isinstance(message, EngineFailed):
                last_words = message.message
        death = death_of(engine.return_code, last_words, self._hang)
        keep_flight(flight_path(engine.path), self._config.server.flight_recorder_dir, death.text)
        return death

    async def _watch_engine(self) -> None:
        """Count the engine's silence; end an engine that is silent for too long."""
        limit_s = self._config.server.hang_timeout_s
        then, cpu_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self.is_alive and self._engine is not None:
                before_s, cpu_s = cpu_s, self._engine.cpu_seconds
                self._watch.tick(now - then, cpu_s - before_s)
                overdue_s = self._watch.overdue_s
                if limit_s is not None and overdue_s > limit_s and self._hang is None:
                    self._hang = (
                        f"it completed no step for {self._watch.silence_s:.0f} s and was killed, "
                        f"by server.hang_timeout_s={limit_s:g}"
                    )
                    self._engine.kill()
            then = now

    async def _restart(self, death: Death) -> bool:
        """Whether a new engine serves; the flights are then under way again."""
        self._restarting, self._hang = death.text, None
        given_up = self._flights.crashed(death.num_allowed_crashes)
        for flight in given_up:
            request = flight.request
            news = given_up_news(request, flight.num_crashes, death.text)
            _LOG.error("%s", news.error)
            flight.reader.put_nowait((request.request_id, news))
        while True:
            delay = self._restarts.next_delay(death.reason, time.monotonic())
            if delay is None:
                self._mark_dead(f"{death.text}; {self._limit_text()}")
                return False
            _LOG.error(
                "the engine died: %s; it is started again %s with %d unfinished sequences",
                death.text,
                f"in {delay:g} s" if delay else "now",
                len(self._flights),
            )
            await asyncio.sleep(delay)
            begin = time.monotonic()
            assert self._engine is not None, "there was one"
            await self._engine.close()
            try:
                await self.spawn()
                async with asyncio.timeout(self._start_limit_s):
                    ready = await self._engine.wait_until_ready(lambda name, seconds: None)
            except (StartupError, TimeoutError) as error:
                limit = f"it took more than {self._start_limit_s:.0f} s"
                text = str(error) or limit
                self._engine.kill()
                death = Death(DeathReason.start, f"it did not start again: {text}")
                continue
            self.stats = ready.stats
            self._watch = Watch()
            self._restarting = None
            _LOG.warning("the engine serves again after %.1f s", time.monotonic() - begin)
            await self._board()
            return True

    def _limit_text(self) -> str:
        server = self._config.server
        if not server.max_restarts:
            return "server.max_restarts=0 forbids to start it again"
        return (
            f"it was started again server.max_restarts={server.max_restarts} times within "
            f"server.restart_window_s={server.restart_window_s:g} s, which is the limit"
        )

    def _route(self, news: SequenceOutput) -> None:
        flight = self._flights.take(news)
        if flight is not None:  # else it was aborted a moment ago
            flight.reader.put_nowait((news.request_id, news))

    def _mark_dead(self, reason: str) -> None:
        self._death, self._restarting = reason, None
        flights = self._flights.clear()
        if flights:
            _LOG.error("the engine ended with %d requests: %s", len(flights), reason)
        for flight in flights:
            error = EngineDeadError(f"the engine ended: {reason}")
            flight.reader.put_nowait((flight.request.request_id, error))


def _alarm(reader: Reader, deadline: float | None) -> asyncio.TimerHandle | None:
    """Puts a DeadlineError into the queue at the deadline."""
    if deadline is None:
        return None
    error = DeadlineError("the request's deadline was over before its first token")
    delay = max(0.0, deadline - time.monotonic())
    return asyncio.get_running_loop().call_later(delay, reader.put_nowait, ("", error))
