"""The figures of several replicas together, of which some take no requests."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.runtime.client.engine_figures import EngineFigures


@dataclass
class ScriptedReplica:
    """Has the properties of a `Replica` that say since when it is silent."""

    seconds_since_step: float
    is_alive: bool = True
    is_drained: bool = False

    @property
    def seconds_overdue(self) -> float:
        return self.seconds_since_step / 2


def silence(*replicas: ScriptedReplica) -> tuple[float, float]:
    figures = EngineFigures()
    figures.replicas = replicas  # type: ignore[assignment]
    return figures.seconds_since_step, figures.seconds_overdue


def test_replicas_without_requests_do_not_hide_a_silent_one() -> None:
    silent = ScriptedReplica(40)
    assert silence(silent, ScriptedReplica(2)) == (2, 1)
    assert silence(silent, ScriptedReplica(0, is_alive=False)) == (40, 20)
    assert silence(silent, ScriptedReplica(0, is_drained=True)) == (40, 20)
    assert silence(silent, ScriptedReplica(0, is_drained=True, is_alive=False)) == (40, 20)


def test_without_a_replica_that_takes_requests() -> None:
    drained = ScriptedReplica(3, is_drained=True)
    assert silence(drained, ScriptedReplica(0, is_alive=False)) == (3, 1.5)
    assert silence(ScriptedReplica(9, is_alive=False)) == (9, 4.5)
