"""What an engine process does: reads its configuration, builds the engine and runs its loop.

The configuration is a line of JSON on standard input. If the process was started before the address
of the client's ZeroMQ socket was known (`EarlyEngine`), the address is the line before. Standard
input stays open while the client's process runs. When standard input closes, this process removes
the files of the socket and the flight recorder, and the directory if it is empty, and exits.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import zmq

from ostinato.runtime.early_start.process_age import process_age_s
from ostinato.runtime.early_start.torch_import import import_torch, without_collections
from ostinato.runtime.engine.flight_recorder import FlightRecorder, flight_path
from ostinato.runtime.errors import InvalidRequestError, RankFailedError, StartupError
from ostinato.runtime.process.ipc import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    EngineFailed,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    GetState,
    LastParts,
    LoadAdapter,
    Phase,
    RanksWanted,
    StartEngine,
    State,
    StepStarted,
    UtilityCall,
    attach_data,
    client_decoder,
    encoder,
    with_repetition,
)
from ostinato.runtime.process.log_format import configure_logging
from ostinato.runtime.process.output_parts import OutputParts
from ostinato.runtime.process.parent_death import end_with_standard_input, remove_files
from ostinato.runtime.process.utility_calls import UtilityCalls
from ostinato.runtime.ranks.link_ends import RankLayout
from ostinato.runtime.ranks.rank_process import RankLog
from ostinato.runtime.ranks.rank_processes import RankProcesses
from ostinato.runtime.startup.bundles import prepare_kernels
from ostinato.runtime.types.outputs import FinishReason, Refusal, SequenceOutput
from ostinato.runtime.types.request import Request

if TYPE_CHECKING:
    from ostinato.runtime.engine.engine import Engine

__all__ = ("run_engine", "run_loop")

_LOG = logging.getLogger(__name__)
_BEAT_S = 0.5  # seconds between the heartbeats of an idle engine
# Number of idle heartbeats before the integrity check, which would delay a request. The check takes
# about a microsecond for each block of the KV cache, so a larger cache is not checked.
_BEATS_BEFORE_CHECK = 4
_MOST_BLOCKS_TO_CHECK = 40_000
_LONG_CALL_S = 60.0  # the watchdog allows this for a utility call; writing a trace takes long
# A step that computes prompts is announced to the client if it is predicted to take longer.
_LONG_STEP_S = 0.25
# Limits of the time for reading messages between two steps. Messages that are left are read after
# the next step.
_RECEIVE_S = 0.005
_MOST_RECEIVE_S = 0.01
# New objects after which garbage is collected while the engine is built.
_BUILD_THRESHOLD = 50_000
_STATS_S = 0.05  # the outputs of steps carry statistics at most this often, in seconds


class _Connection:
    """The ZeroMQ socket to the client.

    Args:
        address: the socket's address.
        clock_offset_s: `StartEngine.clock_offset_s`. Messages have the times of the client's clock.
            This class converts them from and to the times of this machine's clock.
    """

    def __init__(self, address: str, clock_offset_s: float = 0.0) -> None:
        self._clock_offset_s = clock_offset_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a slow client must not stop the engine
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._encoder = encoder()
        self._last = LastParts()  # the large parts that were received last

    def send(self, message: EngineMessage | RanksWanted) -> None:
        if self._clock_offset_s and isinstance(message, EngineOutputs):
            for output in message.outputs:
                output.shift_times(self._clock_offset_s)
        self._socket.send(self._encoder.encode(message), copy=True)

    def receive(self, timeout_s: float, step_s: float = 0.0) -> Iterator[ClientMessage]:
        """Yield the messages that have arrived; stop after 5 to 10 ms.

        Args:
            timeout_s: how long to wait for the first message.
            step_s: seconds of the last step. Reading may take half of that, but at least 5 and at
                most 10 ms.
        """
        if timeout_s and not self._socket.poll(int(timeout_s * 1000)):
            return
        end = time.monotonic() + min(max(_RECEIVE_S, step_s / 2), _MOST_RECEIVE_S)
        while True:
            try:
                head, *data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = attach_data(client_decoder.decode(head), data)
            decoded, self._last = with_repetition(message, self._last)
            if self._clock_offset_s and isinstance(decoded, AddRequest):
                request = decoded.request
                arrival = request.arrival_time - self._clock_offset_s
                decoded = AddRequest(msgspec.structs.replace(request, arrival_time=arrival))
            yield decoded
            if time.monotonic() > end:
                return

    def close(self) -> None:
        self._socket.close(linger=2000)
        self._context.term()


def run_loop(engine: Engine, connection: _Connection, calls: UtilityCalls) -> None:
    """Receive messages, run steps and send outputs until a `Shutdown` arrives."""

    def announce(request_ids: list[str], seconds: float) -> None:
        if request_ids or seconds >= _LONG_STEP_S:
            connection.send(StepStarted(request_ids, seconds))

    last_stats = step_s = 0.0
    idle_beats = 0
    parts = OutputParts()
    while True:
        outputs = []
        has_work = engine.has_work or engine.has_copies or len(parts) > 0
        idle_beats = 0 if has_work else idle_beats + 1
        for message in connection.receive(0.0 if has_work else _BEAT_S, step_s):
            idle_beats = 0
            if isinstance(message, AddRequest):
                outputs += _add(engine, message.request)
            elif isinstance(message, AbortRequests):
                ended = (engine.abort(request_id) for request_id in message.request_ids)
                outputs += [output for output in ended if output is not None]
            elif isinstance(message, GetState):
                connection.send(State(engine.inspect()))
            elif isinstance(message, UtilityCall):
                # A call can take long. The announcement keeps the watchdog from killing the engine.
                connection.send(StepStarted([], _LONG_CALL_S))
                connection.send(calls.answer(message))
            elif isinstance(message, LoadAdapter):
                if (refusal := calls.begin_adapter(message)) is not None:
                    connection.send(refusal)
            else:
                return
        if idle_beats == _BEATS_BEFORE_CHECK and engine.num_blocks <= _MOST_BLOCKS_TO_CHECK:
            engine.check_integrity()  # raises if the engine is damaged; then it is restarted
        begin = time.monotonic()
        outputs = parts.pass_on([*outputs, *engine.step(announce)])
        now = time.monotonic()
        step_s = now - begin
        for reply in calls.take_adapters():
            connection.send(reply)
        stats = None
        is_idle = not (engine.has_work or engine.has_copies)
        if is_idle or now - last_stats >= _STATS_S:
            stats, last_stats = engine.stats(), now
        progress = engine.take_progress()
        if outputs or progress or stats is not None:
            connection.send(EngineOutputs(outputs, stats, progress))


def _add(engine: Engine, request: Request) -> list[SequenceOutput]:
    """Queue a request. If the engine refuses it, returns its error output."""
    try:
        engine.add_request(request)
    except InvalidRequestError as error:
        refusal = Refusal(error.param, error.code, error.status)
        name = request.request_id
        return [SequenceOutput(name, [], FinishReason.error, error=str(error), refusal=refusal)]
    return []


class _Beginning:
    """Reads the configuration on a thread, and prepares the kernels that it asks for.

    Args:
        address: the address of the client's ZeroMQ socket, `ipc://PATH`; None = the first line of
            standard input.
    """

    def __init__(self, address: str | None) -> None:
        self._is_early = address is None
        self._address = address or ""
        self._start: StartEngine | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="configuration", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[str, StartEngine]:
        """The address and the configuration.

        Raises:
            StartupError: standard input ended before the configuration was complete.
        """
        self._thread.join()
        if self._start is None:
            raise StartupError("the engine process got no configuration on standard input")
        return self._address, self._start

    def check(self) -> None:
        """Raise the error of preparing the kernels, after `wait`.

        Raises:
            StartupError: see `prepare_kernels`.
        """
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        lines = _lines(2 if self._is_early else 1)
        if self._is_early and not lines:
            os._exit(1)  # the client ended before it had a configuration
        if lines and self._is_early:
            self._address = lines[0].decode().rstrip("\n")
        if len(lines) < 1 + self._is_early:
            remove_files(self._address)
            return
        start = msgspec.json.decode(lines[-1], type=StartEngine)
        configure_logging(start.log_level, start.log_format, start.name)
        end_with_standard_input(self._address)
        self._start = start
        try:
            prepare_kernels(start.config)
        except Exception as error:  # raised by `check`, where it can be sent to the client
            self._error = error


def _lines(count: int) -> list[bytes]:
    """The first lines of standard input; fewer if it ends before."""
    data = b""
    while data.count(b"\n") < count:
        read = os.read(0, 65536)
        if not read:
            break
        data += read
    *complete, _ = data.split(b"\n")
    return complete[:count]


def _start_ranks(start: StartEngine) -> RankProcesses | None:
    """Start the processes of the other ranks, which import torch while this process does."""
    parallel = start.config.parallel
    if parallel.num_ranks == 1:
        return None
    # At level info all ranks would log the same lines. So only this process logs them.
    level = "warning" if start.log_level == "info" else start.log_level
    log = RankLog(level, start.log_format, f"{start.name} ")
    layout = RankLayout(parallel.tensor, parallel.pipeline, parallel.machines_per_engine)
    return RankProcesses(layout, log, parallel.host, parallel.rank_timeout_s)


def _flight_recorder(num_steps: int, address: str) -> FlightRecorder | None:
    """Make the flight recorder. The client reads its file, beside the socket, after a crash.

    None if the recorder is off, or if the file cannot be made, which is logged.
    """
    if not num_steps:
        return None
    path = flight_path(address.removeprefix("ipc://"))
    try:
        return FlightRecorder(path, num_steps)
    except OSError as error:
        _LOG.warning(
            "the flight recorder is off: %s cannot be written: %s",
            path,
            error.strerror or error,
        )
        return None


def _import_engine() -> Callable[[], float]:
    """Import torch and the modules of the engine.

    Returns:
        A function that returns the seconds since this process was started, or raises the error of
        the import. The caller calls it when the client's address is known. Only then can the error
        be sent to the client.
    """
    failure: Exception | None = None
    try:
        with without_collections():
            import_torch()
            import ostinato.runtime.startup.build_engine  # noqa: F401 - used by `_build`
        gc.freeze()  # collections during the start skip the objects of modules
    except Exception as error:
        failure = error
    seconds = process_age_s()

    def result() -> float:
        if failure is not None:
            raise failure
        return seconds

    return result


def run_engine(address: str | None) -> int:
    """Build the engine, report each phase and run the loop.

    Args:
        address: the address of the client's ZeroMQ socket, `ipc://PATH`. None = it comes before the
            configuration, and torch is imported while both are awaited.

    Returns:
        The exit code.

    Raises:
        StartupError: standard input ended before the configuration was complete.
    """
    beginning = _Beginning(address)
    imported = _import_engine() if address is None else None
    address, start = beginning.wait()
    connection = _Connection(address, start.clock_offset_s)
    at_start = True
    engine: Engine | None = None
    try:
        beginning.check()
        ranks = _start_ranks(start)
        if ranks is not None and ranks.bridge is not None:
            bridge = ranks.bridge
            connection.send(RanksWanted(bridge.address(), bridge.token))
        if imported is None:
            imported = _import_engine()
        connection.send(Phase("imports", imported()))
        with _rare_collections():
            engine = _build(start, address, connection, ranks)
        connection.send(EngineReady(engine.model, engine.stats()))
        at_start = False
        # Objects of the start live as long as the process, so collections skip them.
        gc.collect()
        gc.freeze()
        run_loop(engine, connection, UtilityCalls(engine, start.profile_dir))
        engine.abort_all()
        engine.check_integrity()
    except StartupError as error:
        connection.send(EngineFailed(str(error), at_start=True))
        return 1
    except RankFailedError as error:  # the rank's own error is in the log
        connection.send(EngineFailed(str(error), at_start=at_start, reason=error.reason))
        return 1
    except Exception as error:  # the boundary of the process: the client reports why it ended
        _LOG.exception("the engine failed")
        connection.send(EngineFailed(f"{type(error).__name__}: {error}", at_start=at_start))
        return 1
    finally:
        if engine is not None:
            engine.close()
        gc.unfreeze()
        connection.close()
    return 0


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A context in which garbage is collected rarely.

    The build of an engine makes many objects that it keeps, such as the tokens and merges of a
    vocabulary. With the usual threshold of 700 objects, collections visit them again and again.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_BUILD_THRESHOLD, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _build(
    start: StartEngine, address: str, connection: _Connection, ranks: RankProcesses | None
) -> Engine:
    """Build the engine, and report each phase to the client. For errors see `build_engine`."""
    from ostinato.runtime.engine.step_observer import StepObserver
    from ostinato.runtime.startup.build_engine import build_engine

    def report(name: str, seconds: float | None) -> None:
        if seconds is not None:
            connection.send(Phase(name, seconds))

    return build_engine(
        start.config,
        report=report,
        observer=StepObserver(_flight_recorder(start.flight_recorder_steps, address)),
        ranks=ranks,
    )
