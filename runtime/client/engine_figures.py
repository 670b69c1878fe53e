"""`EngineFigures`: the state and the counters of all replicas of a model together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ostinato.runtime.replicas.replica import Replica
from ostinato.runtime.types.engine_info import EngineStats, sum_stats

__all__ = ("EngineFigures",)


class EngineFigures:
    """What `EngineClient` reports of its replicas.

    Attributes:
        replicas: the engine processes with their requests.
    """

    replicas: Sequence[Replica]

    @property
    def is_alive(self) -> bool:
        """Whether a replica runs and is ready."""
        return any(replica.is_alive for replica in self.replicas)

    @property
    def death_reason(self) -> str | None:
        """Why no replica runs and none will be started again, or None."""
        reasons = [replica.death_reason for replica in self.replicas]
        return None if None in reasons else reasons[0]

    @property
    def restart_reason(self) -> str | None:
        """Why the last engine ended, if no replica serves and an engine is starting; else None."""
        if self.is_alive:
            return None
        reasons = (replica.restart_reason for replica in self.replicas)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts so far by `DeathReason`, of all replicas."""
        return sum((Counter(replica.restarts) for replica in self.replicas), Counter[str]())

    @property
    def engine_pid(self) -> int | None:
        """Process id of the first replica's engine, or None if it has no process."""
        return self.replicas[0].pid

    @property
    def stats(self) -> EngineStats:
        """The newest counters, summed over the replicas."""
        return sum_stats([replica.stats for replica in self.replicas])

    @property
    def num_unfinished(self) -> int:
        """Engine requests that have not ended: one for each candidate, one for a beam search."""
        return sum(len(replica.requests) for replica in self.replicas)

    @property
    def num_queued(self) -> int:
        """Engine requests that wait for their first token."""
        return sum(replica.requests.num_queued for replica in self.replicas)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for their first token."""
        return sum(replica.requests.num_queued_tokens for replica in self.replicas)

    @property
    def seconds_since_step(self) -> float:
        """Seconds since any replica last completed a step or, without work, sent a heartbeat.

        Counts the replicas that take requests, if there are any.
        """
        return min(replica.seconds_since_step for replica in self._answering)

    @property
    def seconds_overdue(self) -> float:
        """The least `Replica.seconds_overdue`: silence beyond the predicted duration of a step.

        Counts the replicas that take requests, if there are any.
        """
        return min(replica.seconds_overdue for replica in self._answering)

    @property
    def _answering(self) -> Sequence[Replica]:
        """The replicas that take requests; if none does, the ones that run, or all."""
        running = [replica for replica in self.replicas if replica.is_alive]
        return [one for one in running if not one.is_drained] or running or self.replicas
