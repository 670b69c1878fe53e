"""`EngineHosts`: decides on which machines the engine processes of a server run.

    parallel.nodes=1        all run on this machine
    parallel.nodes=N        each of N machines runs an equal part of the engines, or an equal part
                            of the ranks of one engine; the other machines join with `run rank`
    parallel.executor=ray   they run where Ray places them

Imports no torch.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.sections.server_schema import ExecutorName, ServerConfig
from ostinato.runtime.early_start.early_engine import EarlyEngine
from ostinato.runtime.nodes.node_hub import NodeHub
from ostinato.runtime.nodes.ray_nodes import RayNodes
from ostinato.runtime.nodes.spanning_child import SpanningChild
from ostinato.runtime.process.engine_child import EngineChild, LocalChild
from ostinato.runtime.replicas.launcher import EngineLauncher
from ostinato.runtime.replicas.placement import place_replicas

__all__ = ("EngineHosts",)


class EngineHosts:
    """Starts the engine processes of all replicas, each on its machine.

    Args:
        config: the configuration of every replica's engine.
        server: the settings for logs and profiles.
        directory: the directory of the sockets' files.
        early: an engine process that has been started; it is ended if no replica can take it.
            None = there is none.

    Attributes:
        launchers: one for each replica. The first launchers start engines on this machine. Use them
            after `start`.

    Raises:
        StartupError: this machine does not have enough GPUs. With Ray: Ray is not installed, or its
            cluster cannot be reached or does not have the cores or GPUs that the engines need.
    """

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        directory: Path,
        early: EarlyEngine | None = None,
    ) -> None:
        parallel = config.parallel
        self._ray = RayNodes(config) if parallel.executor is ExecutorName.ray else None
        if self._ray is not None:
            config = self._ray.config
        num_places = 1 if self._ray is not None else parallel.engines_per_node
        num_parts = parallel.machines_per_engine
        num_here = 0 if self._ray is not None else num_places
        self._context = zmq.asyncio.Context()
        self._hub: NodeHub | None = None
        makers: list[tuple[EngineConfig, Callable[[Path], EngineChild]]] = []
        if num_here:
            for placement in place_replicas(config, num_here):
                gpus = placement.gpus
                if gpus is not None and early is not None:
                    early.close()  # it sees all GPUs
                child = functools.partial(LocalChild, self._context, gpus=gpus, early=early)
                makers.append((placement.config, child))
        elif early is not None:
            early.close()
        if num_here < parallel.data * num_parts:
            self._hub = NodeHub(parallel.host, num_places, asks=self._ray is None)
            makers += [(config, self._hub.child)] * (parallel.data - num_here)
            if num_parts > 1:
                makers = [
                    (one, functools.partial(_spanning, make, self._hub, num_parts))
                    for one, make in makers
                ]
        self.launchers = [
            EngineLauncher(
                "engine" if parallel.data == 1 else f"engine {number}",
                config,
                server,
                directory / f"engine-{number}",
                make_child,
            )
            for number, (config, make_child) in enumerate(makers)
        ]

    async def start(self) -> None:
        """Listen for other machines, and start the actors of Ray if Ray is used.

        Does nothing if all engines run on this machine.

        Raises:
            StartupError: `parallel.host` is not an address of this machine, or other jobs of the
                Ray cluster hold the cores or GPUs that the engines need.
        """
        if self._hub is None:
            return
        self._hub.start()
        if self._ray is not None:
            loop, refuse = asyncio.get_running_loop(), self._hub.refuse_waiting
            await asyncio.to_thread(
                self._ray.start,
                self._hub.address,
                self._hub.token,
                lambda reason: loop.call_soon_threadsafe(refuse, reason),
            )

    async def close(self) -> None:
        """Close connections and end Ray's actors. Safe to call twice.

        The engine processes on this machine must have ended.
        """
        if self._ray is not None:
            await asyncio.to_thread(self._ray.rest)
        if self._hub is not None:
            await self._hub.close()
        if self._ray is not None:
            await asyncio.to_thread(self._ray.close)
        if not self._context.closed:
            self._context.term()


def _spanning(
    make_child: Callable[[Path], EngineChild], hub: NodeHub, num_parts: int, path: Path
) -> EngineChild:
    """An engine process with ranks on several machines."""
    names = (f"{path.name}-part-{number}" for number in range(1, num_parts))
    hosts = [hub.child(path.with_name(name), is_rank_host=True) for name in names]
    return SpanningChild(make_child(path), hosts)
