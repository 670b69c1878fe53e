"""When a replica starts its engine again, and how it describes the cause of an engine's end."""

from __future__ import annotations

import signal

import pytest

from ostinato.runtime.replicas.restarts import DeathReason, RestartPolicy, death_of


def test_the_first_restart_comes_at_once_and_the_wait_doubles() -> None:
    policy = RestartPolicy(max_restarts=9, window_s=1000.0, backoff_s=0.5)
    delays = [policy.next_delay(DeathReason.crash, float(now)) for now in range(9)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_the_limit_holds_within_the_window_only() -> None:
    policy = RestartPolicy(max_restarts=2, window_s=10.0, backoff_s=0.5)
    times = [0.0, 1.0, 2.0, 10.5, 11.5, 40.0]
    assert [policy.next_delay(DeathReason.crash, now) for now in times] == [
        0.0,
        0.5,
        None,
        0.5,
        0.5,
        0.0,
    ]


def test_zero_means_never() -> None:
    policy = RestartPolicy(max_restarts=0, window_s=10.0, backoff_s=0.5)
    assert policy.next_delay(DeathReason.killed, 0.0) is None
    assert policy.counts == {}


def test_restarts_are_counted_by_reason() -> None:
    policy = RestartPolicy(max_restarts=3, window_s=10.0, backoff_s=0.0)
    for reason in (DeathReason.killed, DeathReason.error, DeathReason.killed, DeathReason.hang):
        policy.next_delay(reason, 0.0)
    assert policy.counts == {"killed": 2, "error": 1}


@pytest.mark.parametrize(
    ("arguments", "reason", "text", "allowed"),
    [
        ((-signal.SIGKILL,), "killed", "SIGKILL", 2),
        ((-signal.SIGSEGV,), "crash", "SIGSEGV", 1),
        ((-99,), "crash", "signal 99", 1),
        ((3,), "exit", "code 3", 1),
        ((1, "ValueError: no"), "error", "ValueError: no", 1),
        ((-signal.SIGKILL, None, "no step for 60 s"), "hang", "no step for 60 s", 1),
    ],
)
def test_what_an_end_means(arguments: tuple, reason: str, text: str, allowed: int) -> None:
    death = death_of(*arguments)
    assert death.reason == reason
    assert text in death.text
    assert death.num_allowed_crashes == allowed
