"""A client with one engine here and one on "another machine".

The other machine is a `run rank` process on this machine. It connects through a proxy, which
records all bytes and can stop passing them on.

tests/e2e/test_several_machines.py tests servers, and machines with networks of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator

import psutil
import pytest
import zmq
import zmq.asyncio

from ostinato import SamplingParams
from ostinato.conf.environment import choose_nccl_interface
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import StartupError
from ostinato.runtime.nodes import node_agent
from ostinato.runtime.nodes.node_agent import run_node
from ostinato.runtime.nodes.node_hub import NodeHub
from ostinato.runtime.nodes.node_messages import Join, Refused, encode, order_decoder, software
from ostinato.runtime.secure_connection import (
    interface_of,
    leader_keys,
    new_token,
    node_keys,
    own_address,
    reached_at,
)
from tests.runtime.tiny import tiny_config
from tests.waiting import until

LONG = SamplingParams(temperature=1.3, seed=7, max_tokens=200, ignore_eos=True)
PROMPTS = [[5 + index, 6, 7, 8] * (1 + index) for index in range(6)]


class Wire:
    """A TCP proxy between a machine and the server."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.is_cut = False
        self._target = ("", 0)
        self._server: asyncio.Server | None = None

    async def open(self, target: str) -> str:
        """Forward connections to `target`; returns the proxy's own address."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.seen += data
                while self.is_cut:
                    await asyncio.sleep(0.05)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


class Machine:
    """A `run rank` process, with `variables` added to its environment."""

    def __init__(self, address: str, token: str, **variables: str) -> None:
        self.address, self.token = address, token
        self._variables = variables
        self.directory = tempfile.mkdtemp(prefix="ost-")  # short, as socket paths must be
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert self.token.isalnum()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ostinato", "rank", self.address, "-"),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **self._variables, "TMPDIR": self.directory},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.token}\n".encode())

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()


class Site:
    """The client, the proxy and the machine."""

    def __init__(self) -> None:
        config = tiny_config(
            *("parallel.data=2", "parallel.nodes=2", "parallel.host=127.0.0.1"),
            *("parallel.router=least_load", "server.restart_backoff_s=0.01"),
            "server.max_restarts=50",
        )
        self.client = EngineClient(config)
        self.wire = Wire()

    async def start(self) -> None:
        await self.client.spawn()
        hub = self.hub
        self.machine = Machine(await self.wire.open(hub.address), hub.token)
        await self.machine.start()
        await self.client.wait_until_ready()

    @property
    def hub(self) -> NodeHub:
        hub = self.client._hosts._hub
        assert hub is not None
        return hub

    async def all_serve(self) -> None:
        await until(lambda: all(one.status.state == "serving" for one in self.client.replicas))

    async def tokens_of(
        self, name: str, prompt: list[int], begun: set[str] | None = None
    ) -> list[int]:
        tokens: list[int] = []
        async for output in self.client.generate(name, prompt, LONG):
            tokens += output.new_token_ids
            if begun is not None:
                begun.add(name)
        return tokens

    async def together(self, begun: set[str] | None = None) -> list[list[int]]:
        each = (self.tokens_of(f"{i}", p, begun) for i, p in enumerate(PROMPTS))
        return await asyncio.gather(*each)


Scenario = Callable[[Site], Awaitable[None]]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    """Runs scenarios with one site. Before and after each, both engines are `serving`."""

    async def run_one(scenario: Scenario) -> None:
        await asyncio.wait_for(scenario(site), 250)
        await site.all_serve()
        await until(lambda: site.client.num_unfinished == 0)

    with asyncio.Runner() as runner:
        site = Site()
        runner.run(site.start())
        yield lambda scenario: runner.run(run_one(scenario))
        process, directory = site.machine.process, site.machine.directory
        assert process is not None
        runner.run(site.client.close())
        assert runner.run(asyncio.wait_for(process.wait(), 240)) == 0
        assert os.listdir(directory) == []
        os.rmdir(directory)


def lives(pid: int | None) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_engines_on_both_machines_answer_and_nothing_can_be_read_on_the_way(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(site: Site) -> None:
        here, there = site.client.replicas
        assert here.status.node is None
        assert there.status.node == os.uname().nodename
        assert psutil.Process(there.pid).ppid() == site.machine.pid
        assert psutil.Process(here.pid).ppid() == os.getpid()
        alone = [await site.tokens_of(f"alone-{i}", p) for i, p in enumerate(PROMPTS)]
        computed = there.stats.num_output_tokens
        assert await site.together() == alone
        # After a pause of this process, requests may have ended before all were sent.
        assert there.stats.num_output_tokens - computed >= (LONG.max_tokens or 0)
        await until(lambda: there._engine is not None and there._engine.cpu_seconds > 0)
        seen = bytes(site.wire.seen)
        assert len(seen) > 10_000
        for word in (b"alone-0", b"LlamaForCausalLM", b"max_model_len", site.hub.token.encode()):
            assert word not in seen

    run(scenario)


def test_streams_of_a_killed_machine_go_on_here_and_another_one_takes_its_place(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(site: Site) -> None:
        expected = await site.together()
        _, there = site.client.replicas
        old = there.pid
        begun: set[str] = set()
        task = asyncio.create_task(site.together(begun))
        await until(lambda: len(begun) == 6)
        await site.machine.kill()
        await until(lambda: not there.is_alive)
        assert there.status.reason == (f"the connection to machine {os.uname().nodename} was lost")
        assert await task == expected
        await until(lambda: not lives(old))
        await until(lambda: not os.listdir(site.machine.directory))
        assert not there.is_alive
        assert site.hub.nodes == []
        await site.machine.start()
        await site.all_serve()
        assert await site.together() == expected

    run(scenario)


@pytest.mark.slow
def test_a_killed_engine_is_started_again_on_its_machine(run: Callable[[Scenario], None]) -> None:
    async def scenario(site: Site) -> None:
        expected = await site.together()
        _, there = site.client.replicas
        counts: list[tuple[int, int]] = []
        for _ in range(3):
            begun: set[str] = set()
            task = asyncio.create_task(site.together(begun))
            await until(lambda begun=begun: len(begun) == 6)
            os.kill(there.pid or 0, signal.SIGKILL)
            assert await task == expected
            await site.all_serve()
            counts.append((descriptors(site.machine.pid), descriptors(os.getpid())))
        assert len(set(counts)) == 1, "descriptors were left open"
        assert site.hub.nodes == [os.uname().nodename]
        assert there.restarts["killed"] >= 3

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "stopped"])
def test_a_machine_that_is_silent_is_lost_and_joins_again(
    run: Callable[[Scenario], None], how: str
) -> None:
    async def scenario(site: Site) -> None:
        expected = await site.together()
        _, there = site.client.replicas
        old, process = there.pid, psutil.Process(site.machine.pid)
        begun: set[str] = set()
        task = asyncio.create_task(site.together(begun))
        await until(lambda: len(begun) == 6)
        if how == "cut":
            site.wire.is_cut = True
        else:
            process.suspend()
        await until(lambda: not there.is_alive)
        assert await task == expected
        site.wire.is_cut = False
        process.resume()
        await until(lambda: not lives(old))
        await site.all_serve()
        assert there.pid != old
        assert site.machine.pid == process.pid
        assert await site.together() == expected

    run(scenario)


def test_a_machine_says_that_no_server_answers_and_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_agent, "_QUIET_S", 0.1)
    monkeypatch.setattr(node_agent, "_JOIN_S", 0.2)
    lines: list[str] = []
    with socket.socket() as closed:  # its port is taken, and refuses connections
        closed.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"no server has answered at {address} for 0 s"):
            asyncio.run(run_node(address, new_token(), "a", lines.append))
    assert lines == [
        f"no server has answered at {address} for 0 s; this machine tries to join it for 0 s more"
    ]


def test_a_server_listens_at_one_address_of_its_machine() -> None:
    async def scenario() -> None:
        hub = NodeHub("127.0.0.1", 1)
        hub.start()
        try:
            name, _, port = hub.address.removeprefix("tcp://").rpartition(":")
            assert name == "127.0.0.1"
            with socket.socket() as other:
                assert other.connect_ex(("127.0.0.2", int(port))) != 0
        finally:
            await hub.close()

    asyncio.run(scenario())


def test_a_server_that_listens_at_all_addresses_names_that_of_its_default_route() -> None:
    assert reached_at("0.0.0.0") == reached_at("::") == own_address()
    assert reached_at("") == own_address()
    assert reached_at("10.0.0.1") == "10.0.0.1"


def test_nccl_uses_the_interface_of_an_address_unless_the_user_has_chosen_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    choose_nccl_interface(interface_of("192.0.2.1"))  # no machine has this address
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    choose_nccl_interface(interface_of("127.0.0.1"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    choose_nccl_interface(interface_of("127.0.0.1"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_an_address_of_another_machine_is_refused() -> None:
    async def scenario() -> None:
        hub = NodeHub("192.0.2.1", 1)
        try:
            with pytest.raises(StartupError, match=r"cannot listen on parallel\.host='192.0.2.1'"):
                hub.start()
        finally:
            await hub.close()

    asyncio.run(scenario())


def test_a_wrong_token_is_refused_and_a_right_one_with_other_software_too() -> None:
    async def scenario() -> None:
        hub = NodeHub("127.0.0.1", 1)
        hub.start()
        try:
            with pytest.raises(StartupError, match="the token is that of another server"):
                await run_node(hub.address, new_token(), "a")
            with pytest.raises(StartupError, match="is not an address"):
                await run_node("10.0.0.1", hub.token, "a")
            ours = {**software(), "torch": "1.0"}
            answer = await first_answer(hub, Join("b", ours), leader=hub.token, node=hub.token)
            assert answer is not None
            order = order_decoder.decode(answer)
            assert isinstance(order, Refused)
            assert "machine b has torch 1.0, and the server" in order.reason
            assert hub.nodes == []
        finally:
            await hub.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("leader", "node"), [(True, False), (False, True), (None, None)])
def test_no_message_is_read_of_a_peer_without_both_keys(
    leader: bool | None, node: bool | None
) -> None:
    async def scenario() -> None:
        hub = NodeHub("127.0.0.1", 1)
        hub.start()
        try:
            tokens = [hub.token if known else new_token() for known in (leader, node)]
            keys = {} if leader is None else {"leader": tokens[0], "node": tokens[1]}
            assert await first_answer(hub, Join("c", software()), **keys) is None
            assert hub.nodes == []
        finally:
            await hub.close()

    asyncio.run(scenario())


async def first_answer(
    hub: NodeHub, join: Join, leader: str | None = None, node: str | None = None
) -> bytes | None:
    """The answer to a peer with the keys of these tokens; None if its connection is closed."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        if leader is not None and node is not None:
            keys = node_keys(node)
            peer.setsockopt(zmq.CURVE_SERVERKEY, leader_keys(leader).public)
            peer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            peer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        monitor = peer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        peer.connect(hub.address)
        await peer.send(encode(join))
        answer = asyncio.ensure_future(peer.recv())
        end = asyncio.ensure_future(monitor.recv_multipart())
        await asyncio.wait({answer, end}, timeout=240, return_when=asyncio.FIRST_COMPLETED)
        assert answer.done() or end.done()
        data = answer.result() if answer.done() else None
        answer.cancel()
        end.cancel()
        peer.disable_monitor()
        monitor.close()
        return data
