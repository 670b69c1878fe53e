"""What `/live`, `/ready` and `/health` say, from the signs that the engine gives.

A frozen engine gives none; one in a long step has said how long that should take. The table is in
docs/reliability.md.
"""

from __future__ import annotations

from typing import Protocol

from ostinato.api.base.errors import UnavailableError
from ostinato.conf.server_schema import ServerConfig

__all__ = ("EngineSigns", "death", "engine_problem", "liveness_problem", "unreadiness")


class EngineSigns(Protocol):
    """What is known of the engine at any moment."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def death_reason(self) -> str | None: ...

    @property
    def restart_reason(self) -> str | None: ...

    @property
    def seconds_since_step(self) -> float: ...

    @property
    def seconds_overdue(self) -> float: ...


def death(engine: EngineSigns) -> UnavailableError | None:
    """That the engine does not run and will not; None when it does, or is started again."""
    if engine.death_reason is None:
        return None
    return UnavailableError(f"the engine does not run: {engine.death_reason}", code="engine_dead")


def engine_problem(engine: EngineSigns, server: ServerConfig) -> str | None:
    """Why the engine does not work now, or None."""
    if engine.restart_reason is not None:
        return f"the engine is started again: {engine.restart_reason}"
    if engine.death_reason is not None:
        return f"the engine does not run: {engine.death_reason}"
    return _silence(engine, server)


def liveness_problem(engine: EngineSigns, server: ServerConfig) -> str | None:
    """Why this process should be ended and started anew, or None.

    An engine that is started again is no reason: ending this process would lose what waits for it.
    """
    if engine.death_reason is not None:
        return f"the engine does not run: {engine.death_reason}"
    if engine.restart_reason is not None or not engine.num_unfinished:
        return None
    return _silence(engine, server)


def unreadiness(engine: EngineSigns, server: ServerConfig) -> UnavailableError | None:
    """Why a request that is admitted would have to wait for the engine to come back, or None."""
    if engine.restart_reason is not None:
        text = f"the engine is started again: {engine.restart_reason}"
        return UnavailableError(text, code="restarting")
    silence = _silence(engine, server)
    return None if silence is None else UnavailableError(silence, code="engine_silent")


def _silence(engine: EngineSigns, server: ServerConfig) -> str | None:
    limit = server.health_timeout_s
    if engine.seconds_overdue <= limit:
        return None
    return (
        f"no step and no idle beat of the engine for {engine.seconds_since_step:.0f} s, more than"
        f" server.health_timeout_s={limit:g} beyond what a step should take;"
        f" {engine.num_unfinished} sequences wait"
    )
