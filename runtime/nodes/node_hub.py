"""`NodeHub`: the machines that have joined a server, and the engines that they run for it.

The API process has one encrypted ZeroMQ socket for all machines. A machine joins with the address
and the token of the server (`run rank`, node_agent.py). Engines wait here for a machine with room.
A machine that joins when all engines are placed is a spare. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import struct
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from ostinato.runtime.errors import StartupError
from ostinato.runtime.nodes.node_messages import (
    Beat,
    Ended,
    FromEngine,
    Join,
    Kill,
    LeaderOrder,
    Leave,
    Refused,
    Spawn,
    Started,
    ToEngine,
    Welcome,
    encode,
    report_decoder,
    software,
)
from ostinato.runtime.nodes.remote_child import RemoteChild
from ostinato.runtime.secure_connection import SILENCE_S, listen, new_token

__all__ = ("NodeHub",)

_LOG = logging.getLogger(__name__)
_ENGINES = "engine waits", "engines wait"
_PARTS = "part of an engine waits", "parts of engines wait"
_LINGER_S = 1.0  # how long a server that ends waits until its last messages are sent


class _Node:
    """A machine that has joined."""

    def __init__(self, name: str, num_places: int) -> None:
        self.name = name
        self.free_places = list(range(num_places))
        self.engines: dict[int, tuple[RemoteChild, int]] = {}  # number -> engine, its place


class NodeHub:
    """Starts engine processes on other machines.

    Args:
        host: the address of this machine at which the hub listens and other machines reach it.
            Empty = the address of the default route. 0.0.0.0 or :: = the hub listens at all
            addresses, and `address` has the address of the default route.
        num_places: number of engines that each machine runs at the same time.
        asks: log a line that says how to add machines, if machines are missing.

    Attributes:
        address: `tcp://HOST:PORT`, from `start` on.
        token: the secret with which machines join.
    """

    address: str

    def __init__(self, host: str, num_places: int, *, asks: bool = True) -> None:
        self._host = host
        self._num_places = num_places
        self.token = new_token()
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._nodes: dict[bytes, _Node] = {}  # by the id of the machine's connection
        self._by_descriptor: dict[int, bytes] = {}
        self._waiting: deque[tuple[RemoteChild, bytes]] = deque()
        self._numbers = itertools.count()
        self._monitor: zmq.asyncio.Socket | None = None
        self._asks = asks
        self._is_asking = False  # `_ask` is about to log the line
        self._tasks: list[asyncio.Task[None]] = []
        self._software = software()

    @property
    def nodes(self) -> list[str]:
        """The names of the machines that have joined."""
        return [node.name for node in self._nodes.values()]

    def start(self) -> None:
        """Listen for machines, on a free port.

        Raises:
            StartupError: the address is not one of this machine.
        """
        self._authenticator.start()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.address = listen(
                self._socket, self._authenticator, self.token, self._host, SILENCE_S
            )
        except zmq.ZMQError as error:
            raise StartupError(
                f"cannot listen on parallel.host={self._host!r} ({error}): set it to an address of "
                "this machine that the others can reach"
            ) from error
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch(self._monitor)),
        ]

    def child(self, path: Path, *, is_rank_host: bool = False) -> RemoteChild:
        """An engine process that will run on one of the machines.

        Args:
            path: the flight recorder's file is written beside this path when the engine has ended.
            is_rank_host: the process has ranks of an engine whose first rank is on another machine.
        """
        return RemoteChild(next(self._numbers), path, self._place, is_rank_host=is_rank_host)

    def refuse_waiting(self, reason: str) -> None:
        """End the engines that wait for a machine, because none will come."""
        waiting, self._waiting = self._waiting, deque()
        for child, _ in waiting:
            child.lose(reason)

    async def close(self) -> None:
        """Tell the machines that the server ends. They kill the engines that still run there."""
        for peer in self._nodes:
            self._post(peer, Leave())
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        if self._socket.closed:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._authenticator.stop()
        self._socket.close(linger=int(_LINGER_S * 1000))
        await asyncio.to_thread(self._context.term)

    def _place(self, child: RemoteChild, start: bytes) -> None:
        self._waiting.append((child, start))
        self._assign()

    def _assign(self) -> None:
        """Start engines that wait, on machines with room."""
        while self._waiting and self._waiting[0][0].return_code is not None:
            self._waiting.popleft()  # the engine was killed while it waited
        free = ((peer, node) for peer, node in self._nodes.items() if node.free_places)
        for peer, node in free:
            while self._waiting and node.free_places:
                child, start = self._waiting.popleft()
                if child.return_code is not None:
                    continue
                place = node.free_places.pop(0)
                node.engines[child.number] = child, place

                def post(order: Kill | ToEngine, peer: bytes = peer) -> None:
                    self._post(peer, order)

                child.begin(node.name, post)
                order = Spawn(child.number, start, place, self._num_places, child.is_rank_host)
                self._post(peer, order)
        if self._waiting and self._asks and not self._is_asking:
            self._is_asking = True
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        """Log how to add the machines that are missing."""
        self._is_asking = False
        engines = len(self._waiting)
        machines = -(-engines // self._num_places)
        if engines:
            is_part = any(child.is_rank_host for child, _ in self._waiting)
            one, several = _PARTS if is_part else _ENGINES
            _LOG.warning(
                "%d %s for %s; run there: run rank %s %s",
                engines,
                one if engines == 1 else several,
                "another machine" if machines == 1 else f"{machines} more machines",
                self.address,
                self.token,
            )

    def _post(self, peer: bytes, order: LeaderOrder) -> None:
        # A ROUTER socket without limits sends at once. It drops messages to a peer that is gone.
        self._socket.send_multipart([peer, encode(order)])

    async def _receive(self) -> None:
        while True:
            peer, body = await self._socket.recv_multipart(copy=False)
            peer_id = bytes(peer.buffer)
            try:
                report = report_decoder.decode(body.buffer)
            except msgspec.DecodeError:
                _LOG.warning("a machine that runs another version sent a message and is refused")
                self._post(peer_id, Refused("the server runs another version of ostinato"))
                continue
            if isinstance(report, Join):
                self._join(peer_id, int(body.get(zmq.SRCFD)), report)
            else:
                self._take(peer_id, report)

    def _take(self, peer: bytes, report: Started | FromEngine | Ended | Beat) -> None:
        node = self._nodes.get(peer)
        if node is None:
            return  # the machine was lost, and will join again
        if isinstance(report, Beat):
            for child, _ in node.engines.values():
                child.take(report)
            return
        child, place = node.engines.get(report.engine, (None, 0))
        if child is None:
            return
        child.take(report)
        if child.return_code is not None:
            del node.engines[report.engine]
            node.free_places.append(place)
            self._assign()

    def _join(self, peer: bytes, descriptor: int, join: Join) -> None:
        for name, ours in self._software.items():
            theirs = join.software.get(name, "none")
            if theirs != ours:
                reason = (
                    f"machine {join.name} has {name} {theirs}, and the server {ours}; install the "
                    "same on both"
                )
                _LOG.error("%s", reason)
                self._post(peer, Refused(reason))
                return
        self._nodes[peer] = _Node(join.name, self._num_places)
        self._by_descriptor[descriptor] = peer
        self._post(peer, Welcome(time.monotonic()))
        _LOG.info("machine %s has joined", join.name)
        self._assign()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Notice connections that end."""
        while True:
            event = (await monitor.recv_multipart())[0]
            _, descriptor = struct.unpack("=Hi", event)
            peer = self._by_descriptor.pop(descriptor, None)
            node = self._nodes.pop(peer, None) if peer is not None else None
            if node is not None:
                _LOG.error("the connection to machine %s was lost", node.name)
                for child, _ in node.engines.values():
                    child.lose(f"the connection to machine {node.name} was lost")
