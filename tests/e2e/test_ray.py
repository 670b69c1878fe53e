"""Engines that Ray places on a cluster of two nodes of this machine, and Ray Serve.

Ray's own processes take seconds to start on an idle machine, and minutes on a busy one. So the
timeouts here are minutes long, and the cluster keeps a node that answers late.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ostinato.conf.compose import load_config
from ostinato.runtime.errors import StartupError
from ostinato.runtime.nodes.ray_nodes import RayNodes
from tests.e2e.json_requests import COMPLETIONS
from tests.e2e.machines import lives
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.streams import Streams, body
from tests.waiting import wait_until

ray: Any = pytest.importorskip("ray", reason="the extra ostinato[ray] is not installed")
cluster_utils: Any = pytest.importorskip("ray.cluster_utils")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Settings of the cluster: a silent node counts as alive for minutes, and low memory ends no
# process.
_PATIENT = {
    "health_check_initial_delay_ms": 600_000,
    "health_check_period_ms": 60_000,
    "health_check_timeout_ms": 600_000,
    "memory_monitor_refresh_ms": 0,
}
_STORE_BYTES = 80 << 20  # nearly the least that Ray allows


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with two cores each."""
    os.makedirs("/tmp/ray", exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray Serve kills its HTTP proxy if that is not ready within 5 s, and starts another one.
        # On a busy machine this goes on for minutes.
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "600")
        patch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "600")
        one = started_cluster()
        yield one
        one.shutdown()


def started_cluster() -> Any:
    """Start the cluster, in up to three attempts.

    An attempt may fail: Ray gives a node's processes 30 s to start, and another program may take
    the ports that Ray has chosen for them.
    """
    reasons: list[str] = []
    for _ in range(3):
        one = cluster_utils.Cluster()
        try:
            head = {"include_dashboard": False, "_system_config": _PATIENT}
            for extra in (head, {}):
                one.add_node(wait=False, num_cpus=2, object_store_memory=_STORE_BYTES, **extra)
            one.wait_for_nodes(timeout=300)
        except Exception as error:
            reasons.append(repr(error))
            one.shutdown()
        except BaseException:  # the test's timeout, or Ctrl-C: the processes must not remain
            one.shutdown()
            raise
        else:
            return one
    pytest.fail(f"Ray does not start on this machine: {'; '.join(reasons)}")


def serve(cluster: Any, *overrides: str) -> ServerProcess:
    return ServerProcess(
        *("parallel.executor=ray", f"parallel.ray_address={cluster.address}"),
        *("server.restart_backoff_s=0.01", "server.max_restarts=50", "parallel.host=127.0.0.1"),
        *("device.threads=null", *overrides),
    )


def engines(server: ServerProcess) -> list[dict[str, Any]]:
    return HTTP.get(f"{server.url}/health").json()["engines"]


def actor_of(engine: dict[str, Any]) -> psutil.Process:
    """The process of the actor that has started an engine."""
    parent = psutil.Process(engine["pid"]).parent()
    assert parent is not None
    return parent


def test_an_engine_of_two_ranks_is_placed_and_is_started_again_with_its_actor(cluster: Any) -> None:
    with serve(cluster, "parallel.tensor=2") as server:
        (before,) = engines(server)
        assert [one["rank"] for one in before["ranks"]] == [0, 1]
        assert psutil.Process(before["ranks"][1]["pid"]).ppid() == before["pid"]
        streams = [(COMPLETIONS, body(number)) for number in range(4)]
        expected = asyncio.run(Streams(server.url, streams).run())

        async def scenario() -> list[list[Any]]:
            running = Streams(server.url, streams)
            task = asyncio.create_task(running.run())
            while running.num_lines < 4 * 20:
                await asyncio.sleep(0.01)
            actor_of(before).kill()
            while any(lives(one["pid"]) for one in before["ranks"]):
                await asyncio.sleep(0.01)
            return await task

        assert asyncio.run(scenario()) == expected
        wait_until(lambda: engines(server)[0]["state"] == "serving")
        (after,) = engines(server)
        assert after["pid"] != before["pid"]
        server.signal(signal.SIGTERM)
        assert server.wait(600) == 0, "".join(server.output[-40:])
        wait_until(lambda: not lives(after["pid"]))


def test_engines_are_on_different_machines(cluster: Any) -> None:
    with serve(cluster, "parallel.data=2", "parallel.tensor=2") as server:
        nodes = [one["node"] for one in engines(server)]
        assert len(set(nodes)) == 2
        pids = [rank["pid"] for one in engines(server) for rank in one["ranks"]]
        server.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(lives, pids)))


def test_ranks_of_an_engine_are_on_different_machines(cluster: Any) -> None:
    with serve(cluster, "parallel.tensor=2", "parallel.nodes=2") as server:
        (before,) = engines(server)
        assert [one["machine"] for one in before["ranks"]] == [0, 1]
        streams = [(COMPLETIONS, body(number)) for number in range(4)]
        expected = asyncio.run(Streams(server.url, streams).run())
        os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: engines(server)[0]["num_restarts"])
        wait_until(lambda: engines(server)[0]["state"] == "serving")
        assert asyncio.run(Streams(server.url, streams).run()) == expected
        server.signal(signal.SIGTERM)
        assert server.wait(600) == 0, "".join(server.output[-40:])


def test_what_the_cluster_cannot_place_is_refused(cluster: Any) -> None:
    config = load_config(
        [
            *("parallel.executor=ray", "parallel.tensor=4"),
            f"parallel.ray_address={cluster.address}",
        ]
    )
    with pytest.raises(StartupError, match="the cluster has room for 0 of them: CPU 2; CPU 2"):
        RayNodes(config.engine)
    assert not ray.is_initialized()


_SERVE = """
import sys
import ray
from ray import serve
from ostinato.api.server.ray_app import build

address, port, *words = sys.argv[1:]
ray.init(address=address)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(build(dict(word.split("=", 1) for word in words)))
print("it serves", flush=True)
sys.stdin.read()
serve.shutdown()
"""


def free_port() -> int:
    """A free port below the range from which the system takes the port of a bind to port 0."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    for port in range(first - 1 - os.getpid() % 5000, 1024, -1):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("every port is taken")


def test_ray_serve_runs_the_api(cluster: Any) -> None:
    port = free_port()
    words = ["graphs.mode=eager", "cache.memory_gib=0.05", "model.max_model_len=512"]
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, cluster.address, str(port), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                if "it serves" in line:
                    break
            url = f"http://127.0.0.1:{port}/v1/completions"
            reply = HTTP.post(url, json={"prompt": "Once", "max_tokens": 20}, timeout=600)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["text"]
            with HTTP.stream("POST", url, json=body(1), timeout=600) as stream:
                lines = [one for one in stream.iter_lines() if one.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            engines = [
                one.pid
                for one in psutil.process_iter(["cmdline"])
                if "ostinato.runtime.process.engine_main" in (one.info["cmdline"] or [])
                and any("ray::" in word for each in one.parents()[:1] for word in each.cmdline())
            ]
        finally:
            process.stdin.close()
            process.wait(600)
    assert engines
    wait_until(lambda: not any(map(lives, engines)))
