"""Routing policies: they choose the replica of a request, in `run serve` and `run simulate`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from ostinato.runtime.kv.block_pool import BlockHash, hash_blocks, hash_root

__all__ = ("ROUTERS", "LeastLoad", "PrefixAware", "RoundRobin", "Router", "make_router")


class Router(Protocol):
    """Chooses a replica for each request."""

    reads_loads: bool  # whether `note` must be called with the replicas' loads before `choose`

    def choose(
        self,
        prompt: Sequence[int],
        salt: str = "",
        among: Collection[int] | None = None,
        cache_keys: Sequence[str] = (),
    ) -> int:
        """The number of the replica for a request.

        Args:
            prompt: token ids.
            salt: the request's cache salt; prefixes are compared within one salt.
            among: the replicas that take requests, at least one; None = all.
            cache_keys: `Request.cache_keys`; prefixes are compared only if these are equal.
        """
        ...

    def note(self, replica: int, num_live: int) -> None:
        """Note that a replica now has `num_live` unfinished requests."""
        ...

    def forget(self, replica: int) -> None:
        """Note that a replica's prefix cache is empty, because its engine was started again."""
        ...


class RoundRobin:
    """Chooses the replicas one after the other."""

    reads_loads = False

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(
        self,
        prompt: Sequence[int],
        salt: str = "",
        among: Collection[int] | None = None,
        cache_keys: Sequence[str] = (),
    ) -> int:
        while True:
            chosen = self._next
            self._next = (chosen + 1) % self._num_replicas
            if among is None or chosen in among:
                return chosen

    def note(self, replica: int, num_live: int) -> None:
        """Does nothing, because loads are not read."""

    def forget(self, replica: int) -> None:
        """Does nothing, because prefixes are not read."""


class LeastLoad:
    """Chooses the replica with the fewest requests.

    If several have equally few, it chooses the replica that has had this number for longest.
    """

    reads_loads = True

    def __init__(self, num_replicas: int) -> None:
        # The item at index n holds the replicas with n requests, in the order in which they got
        # this number.
        self._by_load: list[OrderedDict[int, None]] = [OrderedDict.fromkeys(range(num_replicas))]
        self.loads = [0] * num_replicas

    def choose(
        self,
        prompt: Sequence[int],
        salt: str = "",
        among: Collection[int] | None = None,
        cache_keys: Sequence[str] = (),
    ) -> int:
        replicas = (replica for same in self._by_load for replica in same)
        return next(replica for replica in replicas if among is None or replica in among)

    def note(self, replica: int, num_live: int) -> None:
        before, self.loads[replica] = self.loads[replica], num_live
        if before == num_live:
            return
        del self._by_load[before][replica]
        while len(self._by_load) <= num_live:
            self._by_load.append(OrderedDict())
        self._by_load[num_live][replica] = None

    def forget(self, replica: int) -> None:
        """Does nothing, because prefixes are not read."""


class PrefixAware:
    """Chooses the replica that got the longest beginning of the prompt, unless it is much busier.

    The router does not see the replicas' caches. It remembers the last replica to which it sent
    each block of a prompt, up to `_MEMORY` blocks times the number of replicas. It chooses the
    least loaded replica in two cases: it remembers no replica that takes requests for the beginning
    of the prompt, or the remembered replica has more requests than twice the least load plus
    `_SLACK`.
    """

    reads_loads = True
    _MEMORY = 1 << 16
    _SLACK = 4
    # Blocks of a prompt that are compared. Hashing takes about a microsecond a block, in the API
    # process. Prompts that differ only after these blocks are equal for the router.
    _LONGEST = 1024

    def __init__(self, num_replicas: int, block_size: int) -> None:
        self._least = LeastLoad(num_replicas)
        self._block_size = block_size
        self._sent: OrderedDict[BlockHash, int] = OrderedDict()  # block -> last replica that got it
        self._most = self._MEMORY * num_replicas

    def choose(
        self,
        prompt: Sequence[int],
        salt: str = "",
        among: Collection[int] | None = None,
        cache_keys: Sequence[str] = (),
    ) -> int:
        size = self._block_size
        whole = min(len(prompt) // size, self._LONGEST) * size
        hashes = hash_blocks(hash_root(salt, cache_keys), prompt[:whole], size)
        sent, loads = self._sent, self._least.loads
        chosen: int | None = None
        for block_hash in hashes:
            known = sent.get(block_hash)
            if known is None:
                break
            if among is None or known in among:
                chosen = known
        least = self._least.choose(prompt, salt, among)
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

    def forget(self, replica: int) -> None:
        for block_hash in [key for key, known in self._sent.items() if known == replica]:
            del self._sent[block_hash]


ROUTERS = ("round_robin", "least_load", "prefix_aware")


def make_router(name: str, num_replicas: int, block_size: int) -> Router:
    """The router with this name, one of `ROUTERS`.

    Args:
        name: one of `ROUTERS`.
        num_replicas: replicas to choose from.
        block_size: tokens of a block of the prefix cache.
    """
    if name == "round_robin":
        return RoundRobin(num_replicas)
    if name == "least_load":
        return LeastLoad(num_replicas)
    assert name == "prefix_aware", f"there is no router {name!r}"
    return PrefixAware(num_replicas, block_size)
