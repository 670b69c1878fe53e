"""All replicas of a server: routes requests to them, moves requests, drains and reloads replicas.

When an engine dies, its requests go on in the other replicas at once, with the tokens that they
have. A request that is suspected to kill engines (in_flight.py) stays with its replica. So one
request cannot end all engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from ostinato.conf.sections.server_schema import ParallelConfig, ServerConfig
from ostinato.runtime.errors import EngineDeadError, InvalidRequestError, StartupError
from ostinato.runtime.replicas.launcher import EngineLauncher
from ostinato.runtime.replicas.replica import Replica
from ostinato.runtime.replicas.router import make_router
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.request import Request

__all__ = ("ReplicaSet",)

_POLL_S = 0.02


class ReplicaSet:
    """The replicas of one model behind a router.

    Args:
        launchers: one for each replica; starts the replica's engine processes.
        server: the section `server` of the configuration.
        parallel: the section `parallel` of the configuration.
        block_size: tokens of a block of the KV cache.

    Attributes:
        replicas: in the order of their numbers.
    """

    def __init__(
        self,
        launchers: Sequence[EngineLauncher],
        server: ServerConfig,
        parallel: ParallelConfig,
        block_size: int,
    ) -> None:
        stop_limit_s = parallel.rank_timeout_s if parallel.num_ranks > 1 else None
        self.replicas = [
            Replica(number, launcher, server, self._on_change, stop_limit_s)
            for number, launcher in enumerate(launchers)
        ]
        self._router = make_router(parallel.router.value, parallel.data, block_size)
        self._reloads = asyncio.Lock()

    def replica_for(self, request: Request) -> Replica:
        """Choose the replica for a request.

        The caller sends this replica all requests of the same prompt (`n` completions). If all
        engines have ended and are not started again, the replica is a dead one.
        """
        left = self._open() or [one for one in self.replicas if one.death_reason is None]
        return self._choose(request, left or self.replicas)

    async def remove(self, request_ids: Iterable[str]) -> None:
        """Forget requests, and abort the ones that an engine works on."""
        request_ids = list(request_ids)
        for replica in self.replicas:
            if any(name in replica.requests for name in request_ids):
                await replica.remove(request_ids)

    async def drain(self, number: int, timeout_s: float) -> int:
        """Take a replica out of service.

        The router sends the replica no more requests. The replica finishes the requests that it
        has. After the timeout the unfinished ones, except suspects, go on in the other replicas.

        Args:
            number: the number of the replica.
            timeout_s: seconds that its requests may still take.

        Returns:
            How many requests went to other replicas.

        Raises:
            InvalidRequestError: there is no such replica, or no other replica takes requests.
        """
        replica = self._get(number)
        if all(other is replica for other in self._open()):
            raise InvalidRequestError(
                f"{replica.name} cannot be drained: no other engine takes requests",
                code="call_refused",
                status=409,
            )
        replica.is_drained = True
        end = time.monotonic() + timeout_s
        while len(replica.requests) and time.monotonic() < end and replica.is_drained:
            await asyncio.sleep(_POLL_S)
        return await self._move_from(replica) if replica.is_drained else 0

    def resume(self, number: int) -> None:
        """Let the router send requests to a replica again.

        Raises:
            InvalidRequestError: there is no such replica.
        """
        self._get(number).is_drained = False

    async def reload(self, timeout_s: float) -> None:
        """Let one replica after the other read the weights again, in a new engine process.

        Each replica is drained first, if another replica takes requests meanwhile. A single replica
        keeps its requests, which go on in the new process.

        Args:
            timeout_s: seconds that the requests of a replica may take before they move.

        Raises:
            InvalidRequestError: a reload is running already, or a replica could not load the
                weights. The replicas after it keep the weights that they have.
        """
        if self._reloads.locked():
            raise InvalidRequestError(
                "the weights are being reloaded: try again when the reload has ended",
                code="call_refused",
                status=409,
            )
        async with self._reloads:
            for replica in self.replicas:
                was_drained = replica.is_drained
                if any(other is not replica for other in self._open()):
                    await self.drain(replica.number, timeout_s)
                try:
                    await replica.reload()
                except (StartupError, EngineDeadError) as error:
                    raise InvalidRequestError(
                        f"{replica.name} of {len(self.replicas)} could not load the weights: "
                        f"{error}",
                        code="reload_failed",
                        status=409,
                    ) from error
                finally:
                    replica.is_drained = was_drained

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        """Load an adapter into every engine that lacks it; returns when all have ended the load.

        An engine that has ended and is not started again does not count, unless all have.

        Raises:
            InvalidRequestError: an engine cannot load it. It may be in other engines.
            EngineDeadError: no engine runs, or one ended each time it loaded the adapter.
        """
        loads = (replica.adapters.load(adapter) for replica in self.replicas)
        results = await asyncio.gather(*loads, return_exceptions=True)
        failed = [
            (replica, error)
            for replica, error in zip(self.replicas, results, strict=True)
            if error is not None and (replica.death_reason is None or None not in results)
        ]
        # An engine that refuses the adapter says more than one that ended.
        for replica, error in sorted(failed, key=lambda one: isinstance(one[1], EngineDeadError)):
            if isinstance(error, InvalidRequestError) and len(self.replicas) > 1:
                raise InvalidRequestError(
                    f"{replica.name}: {error}", param=error.param, code=error.code
                ) from error
            raise error

    def forget_adapter(self, adapter: ServedAdapter) -> None:
        """Do not load an adapter into further engines. No request uses it any more."""
        for replica in self.replicas:
            replica.adapters.forget(adapter)

    def _get(self, number: int) -> Replica:
        if not 0 <= number < len(self.replicas):
            raise InvalidRequestError(
                f"there is no engine {number}; this server has engines 0 to "
                f"{len(self.replicas) - 1}",
                code="not_found",
                status=404,
            )
        return self.replicas[number]

    def _open(self) -> list[Replica]:
        """The replicas that take requests: those that serve, or if none serves, those that restart.

        A drained or dead replica takes no requests.
        """
        left = [one for one in self.replicas if one.death_reason is None and not one.is_drained]
        return [one for one in left if one.is_alive] or left

    def _choose(self, request: Request, among: Sequence[Replica]) -> Replica:
        if len(among) == 1:
            return among[0]
        for replica in self.replicas:
            self._router.note(replica.number, len(replica.requests))
        numbers = {replica.number for replica in among}
        chosen = self._router.choose(
            request.prompt_token_ids, request.cache_salt, numbers, request.all_cache_keys
        )
        return self.replicas[chosen]

    async def _on_change(self, replica: Replica) -> None:
        """Move requests away from engines that do not serve.

        Called when an engine has ended, serves again, or is not started again.
        """
        if replica.is_alive:
            self._router.forget(replica.number)
        for other in self.replicas:
            if not other.is_alive:
                await self._move_from(other)

    async def _move_from(self, replica: Replica) -> int:
        """Let other replicas go on with a replica's requests, except suspects; returns how many."""
        # If the engine is not started again, its requests can also go to a restarting replica.
        targets = [
            one
            for one in self._open()
            if one is not replica and (one.is_alive or replica.death_reason is not None)
        ]
        if not targets:
            return 0
        released = await replica.release()
        chosen: set[int] = set()
        for one in released:
            target = self._choose(one.request, targets)
            target.requests.adopt(one)
            chosen.add(target.number)
        for number in chosen:
            await self.replicas[number].submit_held()
        return len(released)
