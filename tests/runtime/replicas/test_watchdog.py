"""The watchdog tells a frozen engine from a busy one and from a machine that was suspended."""

from __future__ import annotations

from ostinato.runtime.replicas.watchdog import HangLimits, Watchdog


def pass_time(watchdog: Watchdog, seconds: float, *, cpu_share: float = 0.0) -> None:
    for _ in range(round(seconds * 4)):
        watchdog.tick(0.25, cpu_share * 0.25)


def busy(watchdog: Watchdog, num_steps: int | None = None, *, has_outputs: bool = False) -> None:
    watchdog.on_message(num_steps, has_outputs=has_outputs, has_work=True)


def test_silence_adds_up_until_a_step_completes() -> None:
    watchdog = Watchdog()
    pass_time(watchdog, 10)
    assert (watchdog.seconds_stalled, watchdog.seconds_overdue) == (10.0, 10.0)
    busy(watchdog, 1)
    assert (watchdog.seconds_stalled, watchdog.seconds_overdue) == (0.0, 0.0)


def test_signs_of_life_without_a_step_are_no_progress() -> None:
    watchdog = Watchdog()
    busy(watchdog, 7)
    for _ in range(40):
        pass_time(watchdog, 0.5)
        busy(watchdog, 7)
    assert watchdog.seconds_overdue == 20.0
    busy(watchdog, has_outputs=True)
    assert watchdog.seconds_overdue == 0.0


def test_without_work_a_heartbeat_is_enough() -> None:
    watchdog = Watchdog()
    for _ in range(40):
        pass_time(watchdog, 0.5)
        watchdog.on_message(0, has_outputs=False, has_work=False)
    assert watchdog.seconds_stalled == 0.0


def test_an_announced_step_may_take_its_time() -> None:
    watchdog = Watchdog()
    watchdog.on_step_started(6.0)
    pass_time(watchdog, 29)
    assert (watchdog.seconds_stalled, watchdog.seconds_overdue) == (29.0, 0.0)
    pass_time(watchdog, 3)
    assert watchdog.seconds_overdue == 2.0


def test_a_second_of_computing_counts_a_fifth() -> None:
    watchdog = Watchdog()
    watchdog.on_step_started(1.0)
    pass_time(watchdog, 20, cpu_share=0.3)  # other processes use the core, too
    assert (watchdog.seconds_stalled, watchdog.seconds_overdue) == (20.0, 0.0)
    pass_time(watchdog, 20, cpu_share=2.0)
    assert round(watchdog.seconds_overdue, 6) == 3.0
    pass_time(watchdog, 4, cpu_share=0.01)  # threads that only look at the clock
    assert round(watchdog.seconds_overdue, 6) == 7.0
    busy(watchdog, 1)
    assert watchdog.seconds_overdue == 0.0


def test_with_overlap_the_step_after_is_announced_before_the_first_is_done() -> None:
    watchdog = Watchdog()
    watchdog.on_step_started(6.0)  # the second step
    busy(watchdog, 1)  # the first step is done
    pass_time(watchdog, 25)
    assert watchdog.seconds_overdue == 0.0
    busy(watchdog, 2)
    busy(watchdog, 3)
    pass_time(watchdog, 25)
    assert watchdog.seconds_overdue == 25.0


def test_time_in_which_the_machine_stood_still_does_not_count() -> None:
    watchdog = Watchdog()
    watchdog.tick(0.25, 0.0)
    watchdog.tick(3600.0, 0.0)
    assert watchdog.seconds_stalled == 1.25


def test_a_stopped_process_is_ended_sooner_than_one_that_hangs():
    watchdog, limits = Watchdog(), HangLimits(60.0, 1.0)
    for _ in range(4):
        watchdog.tick(0.25, 0.0, is_stopped=True)
    assert watchdog.why_killed(limits) is None
    watchdog.tick(0.25, 0.0)  # it goes on
    for _ in range(4):
        watchdog.tick(0.25, 0.0, is_stopped=True)
    assert watchdog.why_killed(limits) is None
    watchdog.tick(0.25, 0.0, is_stopped=True)
    reason = watchdog.why_killed(limits)
    assert reason is not None
    assert "it has been stopped for 1.2 s (SIGSTOP)" in reason
    assert "parallel.rank_timeout_s=1" in reason
    assert watchdog.why_killed(HangLimits(60.0, None)) is None
    assert "server.hang_timeout_s=2" in (watchdog.why_killed(HangLimits(2.0, None)) or "")
