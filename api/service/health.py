"""Health of the engine, for `/live`, `/ready` and `/health`.

The engine reports every step, idle heartbeats, and the predicted time of a long step. An engine
that is silent for much longer than predicted counts as hung. docs/reliability.md has the table of
answers.
"""

from __future__ import annotations

from typing import Protocol

from ostinato.api.base.errors import UnavailableError
from ostinato.conf.sections.server_schema import ServerConfig

__all__ = ("EngineSigns", "death", "engine_problem", "liveness_problem", "unreadiness")


class EngineSigns(Protocol):
    """The engine's state, as its client reports it."""

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
    """The error for an engine that is not started again; None = it runs or is being restarted."""
    if engine.death_reason is None:
        return None
    return UnavailableError(f"the engine does not run: {engine.death_reason}", code="engine_dead")


def engine_problem(engine: EngineSigns, server: ServerConfig) -> str | None:
    """Why the engine does not work; None = it works."""
    if engine.restart_reason is not None:
        return f"the engine is started again: {engine.restart_reason}"
    if engine.death_reason is not None:
        return f"the engine does not run: {engine.death_reason}"
    return _silence(engine, server)


def liveness_problem(engine: EngineSigns, server: ServerConfig) -> str | None:
    """Why a supervisor should restart this process; None = there is no reason.

    A restart of the engine is not a reason. Restarting this process too would lose the waiting
    requests.
    """
    if engine.death_reason is not None:
        return f"the engine does not run: {engine.death_reason}"
    if engine.restart_reason is not None or not engine.num_unfinished:
        return None
    return _silence(engine, server)


def unreadiness(engine: EngineSigns, server: ServerConfig) -> UnavailableError | None:
    """Why an admitted request would wait for the engine to recover; None = it would not wait."""
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
        f"no step and no heartbeat of the engine for {engine.seconds_since_step:.0f} s, which"
        f" exceeds the predicted time of its step by more than server.health_timeout_s={limit:g};"
        f" unfinished sequences: {engine.num_unfinished}"
    )
