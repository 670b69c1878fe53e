"""One replica of the model: an engine process, the requests sent to it, and its restarts.

When the engine process dies, a new one is started and the open requests continue in it
(docs/reliability.md). This module runs in the API process and imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.engine.flight_recorder import (
    StepRecord,
    flight_path,
    keep_flight,
    read_flight,
)
from ostinato.runtime.errors import DeadlineError, EngineDeadError, StartupError
from ostinato.runtime.fair_queue import FairQueue
from ostinato.runtime.process.engine_process import EngineProcess
from ostinato.runtime.process.ipc import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    EngineFailed,
    EngineMessage,
    EngineOutputs,
    State,
    StepStarted,
    UtilityReply,
)
from ostinato.runtime.replicas.engine_calls import EngineCalls
from ostinato.runtime.replicas.hang_watch import HangWatch
from ostinato.runtime.replicas.in_flight import InFlightRequest, InFlightRequests, given_up_output
from ostinato.runtime.replicas.launcher import EngineLauncher
from ostinato.runtime.replicas.replica_adapters import ReplicaAdapters
from ostinato.runtime.replicas.restarts import Death, DeathReason, RestartPolicy, death_of
from ostinato.runtime.replicas.watchdog import HangLimits
from ostinato.runtime.types.engine_info import (
    EngineStats,
    ReplicaState,
    ReplicaStatus,
    ServedModel,
    continued,
)
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = ("Reader", "Replica")

_LOG = logging.getLogger(__name__)
_NOT_STARTED = "it was not started"
_SENT_AT_ONCE = 8  # requests that are sent before other tasks of the event loop run
_POLL_S = 0.02

Reader = FairQueue[tuple[str, SequenceOutput | EngineDeadError | DeadlineError]]
"""Gets the outputs of some requests with their ids, or the error that ends them."""


class Replica:
    """Starts one engine process, sends it requests, and starts another one when it dies.

    All methods run on one event loop. `model` is set once `wait_until_ready` has returned.

    Attributes:
        calls: questions to the engine.
        adapters: the adapters that the engine has.
    """

    model: ServedModel

    def __init__(
        self,
        number: int,
        launcher: EngineLauncher,
        server: ServerConfig,
        on_change: Callable[[Replica], Awaitable[None]],
        stop_limit_s: float | None = None,
    ) -> None:
        """
        Args:
            number: the number of this replica, from 0.
            launcher: starts its engine processes.
            server: the settings for the watchdog and restarts.
            on_change: called when the engine has ended, serves again, or is not started again.
            stop_limit_s: `HangLimits.stopped_s`.
        """
        self.number = number
        self.name = launcher.name
        self.is_drained = False  # the router sends it no requests
        self._launcher = launcher
        self._server = server
        self._on_change = on_change
        self._engine: EngineProcess | None = None
        self._requests: InFlightRequests[Reader] = InFlightRequests()
        self.calls = EngineCalls(lambda message: self._send(message), self._check_alive)
        self.adapters = ReplicaAdapters(self.name, self.calls, self._wait_until_alive)
        self._supervisor: asyncio.Task[None] | None = None
        self._watch = HangWatch(
            HangLimits(server.hang_timeout_s, stop_limit_s), lambda: len(self._requests)
        )
        self._is_stopping = False  # the present process was asked to end, for a reload
        self._reloading: asyncio.Future[None] | None = None  # None = no caller of `reload` waits
        self._death: str | None = _NOT_STARTED
        self._restarting: str | None = None
        self._restarts = RestartPolicy(
            server.max_restarts, server.restart_window_s, server.restart_backoff_s
        )
        self._before: EngineStats | None = None  # the last figures of the previous process
        self.stats = EngineStats()  # the newest figures; a restart does not reset the counters

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs and is ready."""
        return self._death is None and self._restarting is None

    @property
    def death_reason(self) -> str | None:
        """Why the engine is not started again, or None."""
        return self._death

    @property
    def restart_reason(self) -> str | None:
        """Why the last engine ended, by death or for a reload, if the next one is starting."""
        return self._restarting

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts so far by `DeathReason`."""
        return self._restarts.counts

    @property
    def status(self) -> ReplicaStatus:
        """The replica's state, as `GET /health` shows it."""
        reason = self._death or self._restarting
        if reason == _NOT_STARTED:
            state, reason = ReplicaState.starting, None
        elif reason is None:
            state = ReplicaState.drained if self.is_drained else ReplicaState.serving
        else:
            state = ReplicaState.dead if self._death else ReplicaState.restarting
        return ReplicaStatus(
            engine=self.number,
            state=state,
            reason=reason,
            num_unfinished=len(self._requests),
            num_restarts=sum(self.restarts.values()),
            pid=self.pid,
            node=None if self._engine is None else self._engine.node,
            ranks=self.model.ranks if self.is_alive else (),
        )

    @property
    def pid(self) -> int | None:
        """Process id of the engine, or None if there is no process."""
        return None if self._engine is None else self._engine.pid

    @property
    def requests(self) -> InFlightRequests[Reader]:
        """The requests that have not ended."""
        return self._requests

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the engine completed a step or, without work, sent a heartbeat."""
        return self._watch.watchdog.seconds_stalled

    @property
    def seconds_overdue(self) -> float:
        """Seconds of silence beyond five times the predicted duration of a step; see `Watchdog`."""
        return self._watch.watchdog.seconds_overdue

    async def spawn(self) -> None:
        """Start the engine process. The call returns at once; the process then loads the model.

        Raises:
            StartupError: the system cannot start another process or open its socket.
        """
        self._engine = await self._launcher.spawn()

    async def wait_until_ready(self, on_phase: Callable[[str, float], None]) -> None:
        """Wait until the spawned engine serves.

        Args:
            on_phase: called with each finished phase of the start and its seconds.

        Raises:
            StartupError: the engine cannot start; the message is one line.
        """
        assert self._engine is not None, "spawned"
        ready = await self._launcher.wait_for_first(self._engine, on_phase)
        self.model, self.stats = ready.model, ready.stats
        self._death = None
        self._supervisor = asyncio.create_task(self._supervise())
        self._watch.begin()
        self._watch.resume(self._engine)

    async def submit(self, requests: list[Request], reader: Reader) -> None:
        """Send requests to the engine, now or when it serves again.

        Args:
            requests: requests with unique ids.
            reader: a queue that gets the outputs, until the requests end or `remove` is called.

        Raises:
            EngineDeadError: the engine ended and is not started again.
        """
        if self._death is not None:
            raise EngineDeadError(f"the engine does not run: {self._death}")
        for request in requests:
            self._requests.add(request, reader)
        await self.submit_held()

    async def release(self) -> list[InFlightRequest[Reader]]:
        """Hand over all requests except suspects; returns them for other replicas."""
        submitted = self._requests.submitted_ids() if self.is_alive else []
        released = self._requests.release()
        gone = {one.request.request_id for one in released}
        if aborted := [name for name in submitted if name in gone]:
            await self._send(AbortRequests(aborted))
        return released

    async def reload(self) -> None:
        """Replace the engine process by a new one, which reads the weights again.

        The requests of the old process continue in the new one.

        Raises:
            StartupError: the new process cannot start. Its start is tried again, as after a death.
            EngineDeadError: the engine does not run.
        """
        self._check_alive()
        assert self._engine is not None, "it is alive"
        self._reloading = asyncio.get_running_loop().create_future()
        self._restarting = "its weights are loaded again"
        self._is_stopping = True
        self._watch.pause()
        await self._engine.stop()
        await self._reloading

    async def remove(self, request_ids: set[str] | list[str]) -> None:
        """Forget requests, and abort the ones that the engine works on."""
        if submitted := self._requests.remove(request_ids):
            await self._send(AbortRequests(submitted))
        await self.submit_held()

    async def abort(self, request_ids: list[str]) -> None:
        """End requests. Their readers get a last output."""
        submitted: list[str] = []
        for request_id in request_ids:
            one = self._requests.get(request_id)
            if one is not None and one.is_submitted:
                submitted.append(request_id)
            else:
                self._route(SequenceOutput(request_id, [], FinishReason.abort))
        if submitted:
            await self._send(AbortRequests(submitted))

    def flight_records(self) -> list[StepRecord]:
        """The engine's last steps, from the recorder's file. It works even if the engine hangs."""
        return [] if self._engine is None else read_flight(flight_path(self._engine.path))

    async def close(self) -> None:
        """End the engine process. Unfinished requests get an error. Safe to call twice."""
        if self._death is None:
            self._mark_dead("it was closed")
        await self._watch.close()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervisor
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError(f"the engine does not run: {self._death or self._restarting}")

    async def _wait_until_alive(self) -> None:
        while self._restarting is not None and self._death is None:
            await asyncio.sleep(_POLL_S)
        self._check_alive()

    async def submit_held(self) -> None:
        """Send held requests to the engine, if it serves, a few at a time."""
        while self.is_alive and (requests := self._requests.submit(_SENT_AT_ONCE)):
            for request in requests:
                await self._send(AddRequest(request))
            if self._requests.num_held:
                await asyncio.sleep(0)  # large requests must not delay outputs of other requests

    async def _send(self, message: ClientMessage) -> None:
        """Send to the engine. If it has just died, `_supervise` handles the lost message."""
        if self._engine is not None:
            with contextlib.suppress(EngineDeadError):
                await self._engine.send(message)

    async def _supervise(self) -> None:
        """Route outputs, and restart the engine when it dies, until no restart is allowed."""
        try:
            while True:
                death = await self._receive()
                assert death is not None, "it receives until the engine ends"
                if death.reason is DeathReason.reload:
                    self._requests.on_engine_end()
                else:
                    self._give_up(death)
                await self._on_change(self)
                if not await self._restart(death):
                    return
        except Exception as error:  # without this task, requests would wait for ever
            _LOG.exception("%s is given up", self.name)
            await self._end_requests(f"its supervision failed: {error!r}")

    async def _receive(self, is_enough: Callable[[], bool] = lambda: False) -> Death | None:
        """Handle the engine's messages until it ends; returns how it ended.

        Args:
            is_enough: if it is true after a message, no more messages are handled. The result is
                then None.
        """
        engine, reported_error, reason = self._engine, None, DeathReason.error
        assert engine is not None, "started"
        while not is_enough():
            message = await engine.next_message()
            if message is None:
                break
            if isinstance(message, EngineFailed):
                reported_error, reason = message.message, DeathReason(message.reason)
            else:
                await self._handle(message)
        else:
            return None
        hang = self._watch.reason
        if self._is_stopping and hang is None and reported_error is None:
            death = Death(DeathReason.reload, "its weights are loaded again")
        else:
            death = death_of(engine.return_code, reported_error, hang, reason)
            keep_flight(flight_path(engine.path), self._server.flight_recorder_dir, death.text)
        self._restarting = death.text
        self.calls.fail(death.text)
        self._watch.pause()
        return death

    async def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, EngineOutputs):
            num_steps = None
            if message.stats is not None:
                self.stats = continued(self._before, message.stats)
                num_steps = message.stats.num_steps
            self._watch.watchdog.on_message(
                num_steps,
                has_outputs=bool(message.outputs or message.progress),
                has_work=self.is_alive and len(self._requests) > 0,
            )
            self._requests.advance(message.progress)
            for output in message.outputs:
                if not self._requests.take_old(output):
                    self._route(output)
            await self.submit_held()
        elif isinstance(message, UtilityReply | State):
            self.calls.answer(message)
        elif isinstance(message, StepStarted):
            self._requests.mark_running(message.request_ids)
            self._watch.watchdog.on_step_started(message.seconds)

    def _give_up(self, death: Death) -> None:
        """Hold the unfinished requests. End requests that were running at too many deaths."""
        allowed, free = death.num_allowed_crashes, death.num_unsuspicious_crashes
        for one in self._requests.on_engine_death(allowed, free):
            output = given_up_output(one.request, one.num_crashes, death.text)
            _LOG.error("%s", output.error)
            one.reader.put_nowait((one.request.request_id, output))

    async def _restart(self, death: Death) -> bool:
        """Start the engine again, with the unfinished requests; returns whether it serves."""
        while True:
            delay = self._restarts.next_delay(death.reason, time.monotonic())
            if delay is None:
                await self._end_requests(f"{death.text}; {self._restarts.limit_text}")
                return False
            level = logging.INFO if death.reason is DeathReason.reload else logging.ERROR
            text = "%s ended: %s; it is started again in %g s; unfinished sequences: %d"
            _LOG.log(level, text, self.name, death.text, delay, len(self._requests))
            await asyncio.sleep(delay)
            begin = time.monotonic()
            assert self._engine is not None, "there was one"
            await self._engine.close()
            try:
                self._engine = await self._launcher.spawn()
                ready = await self._launcher.wait_for_next(self._engine)
            except (StartupError, OSError) as error:  # OSError: no process or file can be made
                death = Death(DeathReason.start, f"it did not start again: {error}")
                self._end_reload(StartupError(str(error)))
                continue
            self._before, self.model = self.stats, ready.model
            self.stats = continued(self._before, ready.stats)
            self._is_stopping = False
            self._watch.resume(self._engine)
            # Held requests wait, because the engine refuses those whose adapter is not loaded.
            await self.adapters.begin_again()
            ended = await self._receive(lambda: self.adapters.all_answered)
            self.adapters.end_again()
            if ended is not None:
                death = ended
                self._end_reload(StartupError(death.text))
                continue
            self._restarting = None
            _LOG.warning("%s serves again after %.1f s", self.name, time.monotonic() - begin)
            self._end_reload(None)
            await self._on_change(self)
            await self.submit_held()
            return True

    def _end_reload(self, error: StartupError | None) -> None:
        """Tell the caller of `reload`, if there is one, whether the new engine started."""
        future, self._reloading = self._reloading, None
        if future is not None and not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    def _route(self, output: SequenceOutput) -> None:
        one = self._requests.take(output)
        if one is not None:  # None if the request was aborted a moment ago
            one.reader.put_nowait((output.request_id, output))

    async def _end_requests(self, reason: str) -> None:
        self._death = reason
        await self._on_change(self)
        self._mark_dead(reason)

    def _mark_dead(self, reason: str) -> None:
        self._death, self._restarting = reason, None
        self._watch.pause()
        self.calls.fail(reason)
        self._end_reload(StartupError(reason))
        if requests := self._requests.clear():
            _LOG.error("%s ended: %s; unfinished sequences: %d", self.name, reason, len(requests))
        for one in requests:
            error = EngineDeadError(f"the engine ended: {reason}")
            one.reader.put_nowait((one.request.request_id, error))
