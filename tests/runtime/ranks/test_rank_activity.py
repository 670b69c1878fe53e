"""The rule that recognises ranks that hang, and the reading of what a process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ostinato.runtime.ranks.rank_activity import Activity, HangRule, read_activity
from tests.waiting import wait_until

WAITS = Activity(is_stopped=False, has_work=False, cpu_s=1.0)
STOPPED = Activity(is_stopped=True, has_work=False, cpu_s=1.0)
WORKS = Activity(is_stopped=False, has_work=True, cpu_s=1.0)


def ticks(rule: HangRule, step: int | None, *activities: Activity, seconds: float = 0.9) -> object:
    """The rule's result after `seconds` in which the activities do not change."""
    found = None
    for _ in range(round(seconds * 10)):
        found = found or rule.tick(0.1, step, dict(enumerate(activities)))
    return found


def test_a_stopped_rank_hangs_after_the_limit_and_only_within_a_step() -> None:
    assert ticks(HangRule(1.0), None, WORKS, STOPPED, seconds=60) is None
    rule = HangRule(1.0)
    assert ticks(rule, 1, WORKS, STOPPED) is None
    assert ticks(rule, 1, WORKS, WORKS) is None
    assert ticks(rule, 1, WORKS, STOPPED) is None, "the time must begin anew"
    assert ticks(rule, 1, WORKS, STOPPED, seconds=0.4) == (
        1,
        "it has been stopped for 1.1 s (SIGSTOP)",
    )


def test_ranks_that_all_wait_hang_and_one_that_works_or_waits_for_a_processor_does_not() -> None:
    assert ticks(HangRule(1.0), 1, WAITS, WORKS, seconds=60) is None
    rule = HangRule(1.0)
    assert ticks(rule, 1, WAITS, WAITS) is None
    assert ticks(rule, 2, WAITS, WAITS) is None, "a new step must begin the time anew"
    rank, text = ticks(rule, 2, WAITS, WAITS, seconds=0.4) or (0, "")  # type: ignore[misc]
    assert rank is None
    assert "no rank has done anything for 1." in text


def test_ranks_that_use_a_processor_between_the_looks_do_not_hang() -> None:
    rule = HangRule(1.0)
    for tick in range(600):
        busy = WAITS._replace(cpu_s=tick * 0.02)
        assert rule.tick(0.1, 1, {0: WAITS, 1: busy}) is None


def test_time_between_two_far_looks_counts_little() -> None:
    """The machine was suspended between two looks, or all processes of the engine were stopped."""
    rule = HangRule(1.0)
    assert rule.tick(0.1, 1, {0: WAITS, 1: STOPPED}) is None
    assert rule.tick(3600, 1, {0: WAITS, 1: STOPPED}) is None


def test_the_activity_of_a_process_is_that_of_all_its_threads() -> None:
    code = (
        "import sys, threading, time\n"
        "def spin():\n"
        "    while True: pass\n"
        "sys.stdin.readline()\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None

        def now() -> Activity:
            activity = read_activity(process.pid)
            assert activity is not None
            return activity

        wait_until(lambda: not now().has_work)
        before = now().cpu_s
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait_until(lambda: now().has_work)
        wait_until(lambda: now().cpu_s > before + 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: now().is_stopped and not now().has_work)
        process.kill()
    assert read_activity(process.pid) is None
