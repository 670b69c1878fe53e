"""`RayNodes`: Ray actors that run engines for a server (`parallel.executor=ray`).

Ray chooses the machine of each engine, starts an actor there and reports its end. The actor does
what `run rank` does on a machine without Ray (node_agent.py). Messages of engines use the encrypted
connection of `run rank`, so no step passes through Ray. An engine whose ranks are divided among
several machines has an actor on each. Ray is an optional dependency and is imported at first use.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import DeviceName
from ostinato.runtime.errors import StartupError
from ostinato.runtime.nodes.node_agent import run_node

__all__ = ("Demand", "RayNodes", "RayShare", "count_parts", "count_room", "share_cluster")

_LOG = logging.getLogger(__name__)
_GIB = 1 << 30
_PLACE_S = 60.0  # how long to wait while other jobs hold the cores or GPUs that engines need
_POLL_S = 0.5
_LEAVE_S = 3.0  # how long an actor gets to end after its server has ended
_AGAIN_S = 1.0  # between the end of an actor and the start of the next one


Demand = Mapping[str, float]
"""Resources of Ray by name: `CPU`, `GPU`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayShare:
    """The part of a cluster that every engine gets."""

    demand: Demand
    config: EngineConfig  # with the engine's part of a machine


def count_room(nodes: Sequence[Demand], demand: Demand) -> int:
    """How many engines, or parts of engines, fit on machines on which nothing else runs.

    Args:
        nodes: the resources of each machine.
        demand: the resources of an engine, or of its ranks on one machine; all are positive.
    """
    return sum(min(int(node.get(name, 0) // demand[name]) for name in demand) for node in nodes)


def count_parts(config: EngineConfig) -> int:
    """The places that all engines need: one for each machine of each engine."""
    return config.parallel.data * config.parallel.machines_per_engine


def share_cluster(config: EngineConfig, nodes: Sequence[Demand]) -> RayShare:
    """The resources that every engine asks Ray for.

    On each of its machines, an engine on CPUs gets `device.threads` cores. If this is not set, it
    gets a core for each of its ranks there. An engine on GPUs gets a GPU and a core for each rank.

    Args:
        config: the configuration of every engine.
        nodes: the resources of each machine of the cluster.

    Raises:
        StartupError: the engines do not fit; the message names what the cluster has.
    """
    parallel, device = config.parallel, config.device
    has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    if device.name is DeviceName.cuda or (device.name is DeviceName.auto and has_gpus):
        demand: Demand = {"CPU": parallel.ranks_per_machine, "GPU": parallel.ranks_per_machine}
    else:
        threads = device.threads or parallel.ranks_per_machine
        demand = {"CPU": threads}
        device = replace(device, threads=threads)
    room, parts = count_room(nodes, demand), count_parts(config)
    if room < parts:
        there = "; ".join(_amounts(node) for node in nodes) or "no machine"
        raise StartupError(
            f"parallel.executor=ray: {parts} x ({_amounts(demand)}) is needed, each on "
            f"one machine, and the cluster has room for {room} of them: {there}; lower "
            "parallel.data or device.threads, or add machines"
        )
    if "GPU" not in demand and device.memory_gib is None:
        fitting = [node for node in nodes if count_room([node], demand)]
        together = min(parts, max(count_room([node], demand) for node in fitting))
        least = min(node.get("memory", 0) for node in fitting)
        if least:
            device = replace(device, memory_gib=least / _GIB / together)
    return RayShare(demand=demand, config=replace(config, device=device))


def _amounts(resources: Demand) -> str:
    return ", ".join(
        f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU") if name in resources
    )


class RayNodes:
    """The actors of one server: one for each machine of each engine.

    The constructor connects to the cluster.

    Args:
        config: the configuration of every engine. `parallel.data` is the number of engines.

    Attributes:
        config: the configuration of every engine, with its part of a machine.

    Raises:
        StartupError: Ray is not installed, or the cluster cannot be reached or is too small.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._count = count_parts(config)
        self._group: Any = None  # the placement group
        self._actors: dict[Any, tuple[int, Any]] = {}  # by Ray's reference to the actor's run
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._ray = _import("ray")
        self._is_own = not self._ray.is_initialized()  # False = this process was connected before
        if self._is_own:
            _connect(self._ray, config.parallel.ray_address)
        try:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            share = share_cluster(config, nodes)
        except StartupError:
            self.close()
            raise
        self.config = share.config
        self._demand = dict(share.demand)

    def start(self, address: str, token: str, refuse: Callable[[str], object]) -> None:
        """Start the actors, which join the server. Blocks until Ray has placed them.

        Args:
            address: the address of the server's `NodeHub`.
            token: the token of the server's `NodeHub`.
            refuse: called by another thread with the reason when an actor cannot join.

        Raises:
            StartupError: other jobs hold the cores or GPUs that the engines need.
        """
        groups = _import("ray.util.placement_group")
        self._group = groups.placement_group([self._demand] * self._count, strategy="SPREAD")
        if not self._group.wait(timeout_seconds=_PLACE_S):
            free = _amounts(self._ray.available_resources())
            raise StartupError(
                f"parallel.executor=ray: {self._count} x ({_amounts(self._demand)}) is needed, and "
                f"other jobs of the cluster left only {free} for {_PLACE_S:.0f} s; end these jobs, "
                "or lower parallel.data or device.threads"
            )
        for place in range(self._count):
            self._start_actor(place, address, token)
        self._thread = threading.Thread(
            target=self._watch, args=(address, token, refuse), name="watch-ray", daemon=True
        )
        self._thread.start()

    def rest(self) -> None:
        """Start no further actors."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the actors and leave the cluster. Safe to call twice."""
        if not self._ray.is_initialized():
            return
        if self._group is not None:
            if runs := list(self._actors):
                self._ray.wait(runs, num_returns=len(runs), timeout=_LEAVE_S)
            for _, actor in self._actors.values():
                self._ray.kill(actor)
            self._actors.clear()
            _import("ray.util.placement_group").remove_placement_group(self._group)
            self._group = None
        if self._is_own:
            self._ray.shutdown()

    def _start_actor(self, place: int, address: str, token: str) -> None:
        strategies = _import("ray.util.scheduling_strategies")
        actor_class = self._ray.remote(_NodeActor).options(
            num_cpus=self._demand["CPU"],
            num_gpus=self._demand.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=place
            ),
        )
        actor = actor_class.remote()
        self._actors[actor.run.remote(address, token)] = place, actor

    def _watch(self, address: str, token: str, refuse: Callable[[str], object]) -> None:
        """Start another actor for each actor that ends. Runs on a thread."""
        errors = _import("ray.exceptions")
        while not self._ends.is_set():
            ended, _ = self._ray.wait(list(self._actors), num_returns=1, timeout=_POLL_S)
            for run in ended:
                try:
                    self._ray.get(run)
                except errors.RayTaskError as error:
                    refuse(f"an actor of Ray cannot join: {error.cause}")
                except errors.RayError as error:
                    _LOG.error("an actor of Ray has ended: %s", str(error).splitlines()[0])
                if self._ends.wait(_AGAIN_S):
                    return
                place, actor = self._actors.pop(run)
                self._ray.kill(actor)
                self._start_actor(place, address, token)


class _NodeActor:
    """The process that Ray places. It runs engines for the server until the server ends."""

    def run(self, address: str, token: str) -> None:
        """Call `run_node` with the name of Ray's node."""
        node = _import("ray").get_runtime_context().get_node_id()
        asyncio.run(run_node(address, token, f"{socket.gethostname()}/{node[:8]}"))


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise StartupError(
            f"parallel.executor=ray needs the package {error.name}, which is not installed: "
            'pip install "ostinato[ray]"'
        ) from error


def _connect(ray: Any, address: str) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or None)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartupError(
            f"the Ray cluster {address or 'of this machine'} cannot be reached: {error}; check "
            "parallel.ray_address"
        ) from error
    # Ray's handler of SIGTERM ends the process at once. A server finishes its requests first.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
