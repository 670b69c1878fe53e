"""Routing policies of a simulated fleet: which replica gets a request."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from ostinato.benchmarks.simulate.simulated_replica import Arrival
from ostinato.runtime.kv.block_pool import BlockHash, hash_blocks, hash_root

__all__ = ("ROUTERS", "LeastLoad", "PrefixAware", "RoundRobin", "Router", "make_router")


class Router(Protocol):
    """Chooses a replica for each request."""

    looks: bool  # whether it reads the replicas' loads, which must be up to date then

    def choose(self, arrival: Arrival) -> int:
        """The replica's number."""
        ...

    def note(self, replica: int, num_live: int) -> None:
        """Note that a replica now has `num_live` unfinished requests."""
        ...


class RoundRobin:
    """Chooses the replicas one after the other."""

    looks = False

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self, arrival: Arrival) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self._num_replicas
        return chosen

    def note(self, replica: int, num_live: int) -> None:
        """Does nothing, because loads are not read."""


class LeastLoad:
    """Chooses the replica with the fewest requests; of equals, the least recently chosen."""

    looks = True

    def __init__(self, num_replicas: int) -> None:
        # {load: replicas with this load, in the order in which they reached it}.
        self._by_load: list[OrderedDict[int, None]] = [OrderedDict.fromkeys(range(num_replicas))]
        self.loads = [0] * num_replicas

    def choose(self, arrival: Arrival) -> int:
        return next(iter(next(filter(None, self._by_load))))

    def note(self, replica: int, num_live: int) -> None:
        before, self.loads[replica] = self.loads[replica], num_live
        del self._by_load[before][replica]
        while len(self._by_load) <= num_live:
            self._by_load.append(OrderedDict())
        self._by_load[num_live][replica] = None


class PrefixAware:
    """Chooses the replica that got the longest common prefix, unless it is much busier.

    The router remembers the replica of each block of a prompt, up to `_MEMORY` blocks for each
    replica. It does not see the replicas' caches. It chooses the least loaded replica if no block
    is known, or if the known replica has more than twice the least load plus `_SLACK` requests.
    """

    looks = True
    _MEMORY = 1 << 16
    _SLACK = 4

    def __init__(self, num_replicas: int, block_size: int) -> None:
        self._least = LeastLoad(num_replicas)
        self._block_size = block_size
        self._sent: OrderedDict[BlockHash, int] = OrderedDict()  # block -> its last replica
        self._most = self._MEMORY * num_replicas

    def choose(self, arrival: Arrival) -> int:
        size = self._block_size
        whole = len(arrival.prompt) // size * size
        hashes = hash_blocks(hash_root(""), arrival.prompt[:whole], size)
        sent, loads = self._sent, self._least.loads
        chosen: int | None = None
        for block_hash in hashes:
            known = sent.get(block_hash)
            if known is None:
                break
            chosen = known
        least = self._least.choose(arrival)
        if chosen is None or loads[chosen] > 2 * loads[least] + self._SLACK:
            chosen = least
        for block_hash in hashes:
            sent[block_hash] = chosen
            sent.move_to_end(block_hash)
        while len(sent) > self._most:
            sent.popitem(last=False)
        return chosen

    def note(self, replica: int, num_live: int) -> None:
        self._least.note(replica, num_live)


ROUTERS = ("round_robin", "least_load", "prefix_aware")


def make_router(name: str, num_replicas: int, block_size: int) -> Router:
    """The router with this name.

    Raises:
        ValueError: there is no such router; the text lists them.
    """
    if name == "round_robin":
        return RoundRobin(num_replicas)
    if name == "least_load":
        return LeastLoad(num_replicas)
    if name == "prefix_aware":
        return PrefixAware(num_replicas, block_size)
    raise ValueError(f"simulate.router must be one of {', '.join(ROUTERS)}, got {name!r}")
