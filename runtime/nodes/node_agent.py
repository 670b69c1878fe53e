"""`run rank`: offers this machine to a server on another machine, and runs engines for the server.

The process joins the server with the server's address and token. It starts the engine processes
that the server asks for, and passes their messages on. All messages go through one encrypted
connection, which this side opens. If the connection ends, the process kills the engines and joins
the server again. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ostinato.runtime.directories import ensure_cache, make_socket_directory
from ostinato.runtime.engine.flight_recorder import flight_path
from ostinato.runtime.errors import EngineDeadError, StartupError
from ostinato.runtime.nodes.node_messages import (
    Beat,
    Ended,
    FromEngine,
    Join,
    Kill,
    LeaderOrder,
    Leave,
    NodeReport,
    Refused,
    Spawn,
    Started,
    ToEngine,
    Welcome,
    encode,
    order_decoder,
    software,
)
from ostinato.runtime.process.engine_child import LocalChild
from ostinato.runtime.process.ipc import EngineFailed, StartEngine, encoder
from ostinato.runtime.ranks.bridge_messages import StartRankHost
from ostinato.runtime.replicas.placement import Placement, place_replicas
from ostinato.runtime.replicas.watchdog import TICK_S
from ostinato.runtime.secure_connection import SILENCE_S, configure_client, own_address

__all__ = ("run_node",)

RANK_HOST_MODULE = "ostinato.runtime.process.rank_host_main"

_LOG = logging.getLogger(__name__)
_JOIN_S = 60.0  # how long to wait for the server's answer
_QUIET_S = 3.0  # after this part of _JOIN_S, a line says that the server has not answered
_AGAIN_S = 0.5  # between two attempts to join
_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


async def run_node(
    address: str, token: str, name: str, say: Callable[[str], object] = lambda line: None
) -> None:
    """Run engines for a server until the server ends.

    Args:
        address: the server's address, `tcp://HOST:PORT`.
        token: the server's token.
        name: the name of this machine, which the server shows.
        say: called with a line for the user when this machine waits for the server, has joined it
            or has lost it, and when the server has ended.

    Raises:
        StartupError: the address or the token is wrong, the server refuses this machine, or the
            server has not answered for a minute. The message is one line that says why.
    """
    ensure_cache()
    directory = make_socket_directory()
    lost_at: float | None = None
    try:
        while True:
            session = _Session(address, token, name, directory.path)
            try:
                await session.join(say)
                say(f"machine {name} has joined {address}")
                if await session.run():
                    say(f"the server at {address} has ended")
                    return
                say(f"the connection to {address} was lost; its engines here are ended")
                lost_at = time.monotonic()
            except _ClosedError:  # after a loss, the network can need some time
                if lost_at is None or time.monotonic() - lost_at > _JOIN_S:
                    raise
            finally:
                await session.close()
            await asyncio.sleep(_AGAIN_S)
    finally:
        directory.remove()


async def _first_of(
    answer: asyncio.Future[bytes], failure: asyncio.Future[list[bytes]], timeout_s: float
) -> None:
    """Wait until one of the two futures is done, or the time is over."""
    both = {answer, failure}
    await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


class _ClosedError(StartupError):
    """The other side closed the connection before it answered."""


class _Engine:
    """An engine process that runs for the server."""

    def __init__(self, child: LocalChild) -> None:
        self.child = child
        self.task: asyncio.Task[None] | None = None


class _Session:
    """One connection to the server, and the engines that run for the server."""

    def __init__(self, address: str, token: str, name: str, directory: Path) -> None:
        self._address = address
        self._server_host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._name = name
        self._directory = directory
        self._engines: dict[int, _Engine] = {}
        self._placements: list[Placement] = []
        self._clock_offset_s = 0.0  # the server's clock minus that of this machine
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_client(self._socket, token, SILENCE_S)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKE)

    async def join(self, say: Callable[[str], object]) -> None:
        """Connect and wait until the server has answered.

        Args:
            say: see `run_node`.

        Raises:
            StartupError: see `run_node`.
        """
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            raise StartupError(
                f"{self._address} is not an address: give tcp://HOST:PORT, as the server prints it"
            ) from error
        self._post(Join(self._name, software()))
        answer = asyncio.ensure_future(self._socket.recv())
        failure = asyncio.ensure_future(self._monitor.recv_multipart())
        try:
            quiet_s = min(_QUIET_S, _JOIN_S)
            await _first_of(answer, failure, quiet_s)
            if not (answer.done() or failure.done()):
                say(
                    f"no server has answered at {self._address} for {quiet_s:.0f} s; "
                    f"this machine tries to join it for {_JOIN_S - quiet_s:.0f} s more"
                )
                await _first_of(answer, failure, _JOIN_S - quiet_s)
            if answer.done():
                order = order_decoder.decode(answer.result())
            elif failure.done():
                raise _ClosedError(
                    f"{self._address} closed the connection: the token is that of another server, "
                    "or no server of ostinato listens there"
                )
            else:
                raise StartupError(
                    f"no server has answered at {self._address} for {_JOIN_S:.0f} s; check the "
                    "address, and that a firewall lets this machine connect to it"
                )
        finally:
            for future in (answer, failure):
                future.cancel()
        if isinstance(order, Refused):
            raise StartupError(order.reason)
        assert isinstance(order, Welcome), f"{order} came first"
        self._clock_offset_s = order.clock - time.monotonic()

    async def run(self) -> bool:
        """Do what the server asks for, until the connection ends.

        Returns:
            True if the server has ended, False if the connection was lost.
        """
        lost = asyncio.create_task(self._wait_for_loss())
        served = asyncio.create_task(self._serve())
        beats = asyncio.create_task(self._beat())
        try:
            await asyncio.wait({lost, served}, return_when=asyncio.FIRST_COMPLETED)
            if served.done():
                served.result()
            return served.done()
        finally:
            for task in (lost, served, beats):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def close(self) -> None:
        """Kill the engines and close the connection."""
        for engine in self._engines.values():
            if engine.task is not None:
                engine.task.cancel()
            engine.child.kill()
        for engine in list(self._engines.values()):
            await engine.child.wait()
            engine.child.close()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=0)
        self._context.term()

    def _post(self, report: NodeReport) -> None:
        self._socket.send(encode(report))  # never waits, because the queue has no limit

    async def _wait_for_loss(self) -> None:
        await self._monitor.recv_multipart()

    async def _serve(self) -> None:
        while True:
            order: LeaderOrder = order_decoder.decode(await self._socket.recv())
            if isinstance(order, Spawn):
                await self._spawn(order)
            elif isinstance(order, ToEngine | Kill):
                engine = self._engines.get(order.engine)
                if engine is None:
                    continue  # it has ended
                if isinstance(order, Kill):
                    engine.child.kill()
                else:
                    with contextlib.suppress(EngineDeadError):
                        await engine.child.send(order.parts)
            elif isinstance(order, Leave):
                return

    async def _spawn(self, order: Spawn) -> None:
        kind = StartRankHost if order.is_rank_host else StartEngine
        start: StartEngine | StartRankHost = msgspec.json.decode(order.start, type=kind)
        child: LocalChild | None = None
        try:
            # Divide the machine once, before the first engine takes a part of the free memory.
            if not self._placements:
                self._placements = place_replicas(start.config, order.num_places)
            device = self._placements[order.place].config.device
            # A restarted engine must use the instruction set of the first start.
            device = replace(device, isa=start.config.device.isa)
            # The address at which other machines reach the ranks of an engine.
            parallel = replace(start.config.parallel, host=own_address(self._server_host))
            config = replace(start.config, device=device, parallel=parallel)
            start = msgspec.structs.replace(start, config=config)
            if isinstance(start, StartEngine):
                offset_s = self._clock_offset_s
                start = msgspec.structs.replace(start, clock_offset_s=offset_s)
            path = self._directory / f"engine-{order.engine}"
            gpus = self._placements[order.place].gpus
            module = RANK_HOST_MODULE if order.is_rank_host else None
            child = LocalChild(self._context, path, gpus, module)
            await child.spawn(msgspec.json.encode(start))
        except (OSError, zmq.ZMQError, StartupError) as error:
            if child is not None:
                child.close()
            failed = EngineFailed(f"the process cannot be started: {error}", at_start=True)
            self._post(FromEngine(order.engine, encoder().encode(failed)))
            self._post(Ended(order.engine, 1, b""))
            return
        assert child.pid is not None, "spawned"
        self._post(Started(order.engine, child.pid))
        engine = self._engines[order.engine] = _Engine(child)
        engine.task = asyncio.create_task(self._pass_on(order.engine, child))

    async def _pass_on(self, number: int, child: LocalChild) -> None:
        """Send an engine's messages to the server until it has ended."""
        while (data := await child.receive()) is not None:
            self._post(FromEngine(number, data))
        await child.wait()
        flight = b""
        with contextlib.suppress(OSError):
            flight = flight_path(child.path).read_bytes()
        del self._engines[number]
        child.close()
        self._post(Ended(number, child.return_code or 0, flight))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(TICK_S / 2)
            if self._engines:
                used = {number: one.child.cpu_seconds for number, one in self._engines.items()}
                stopped = [number for number, one in self._engines.items() if one.child.is_stopped]
                self._post(Beat(used, stopped))
