"""Frozen is told from busy, and from a machine that stood still."""

from __future__ import annotations

from ostinato.runtime.client.watchdog import Watch


def pass_time(watch: Watch, seconds: float, *, cpu_share: float = 0.0) -> None:
    for _ in range(round(seconds * 4)):
        watch.tick(0.25, cpu_share * 0.25)


def busy(watch: Watch, num_steps: int | None = None, *, has_outputs: bool = False) -> None:
    watch.heard(num_steps, has_outputs=has_outputs, has_work=True)


def test_silence_adds_up_until_a_step_completes() -> None:
    watch = Watch()
    pass_time(watch, 10)
    assert (watch.silence_s, watch.overdue_s) == (10.0, 10.0)
    busy(watch, 1)
    assert (watch.silence_s, watch.overdue_s) == (0.0, 0.0)


def test_signs_of_life_without_a_step_are_no_progress() -> None:
    watch = Watch()
    busy(watch, 7)
    for _ in range(40):
        pass_time(watch, 0.5)
        busy(watch, 7)
    assert watch.overdue_s == 20.0
    busy(watch, has_outputs=True)
    assert watch.overdue_s == 0.0


def test_without_work_a_beat_is_enough() -> None:
    watch = Watch()
    for _ in range(40):
        pass_time(watch, 0.5)
        watch.heard(0, has_outputs=False, has_work=False)
    assert watch.silence_s == 0.0


def test_an_announced_step_may_take_its_time() -> None:
    watch = Watch()
    watch.step_begins(6.0)
    pass_time(watch, 29)
    assert (watch.silence_s, watch.overdue_s) == (29.0, 0.0)
    pass_time(watch, 3)
    assert watch.overdue_s == 2.0


def test_a_second_of_computing_counts_a_fifth() -> None:
    watch = Watch()
    watch.step_begins(1.0)
    pass_time(watch, 20, cpu_share=0.3)  # of a core that others use too
    assert (watch.silence_s, watch.overdue_s) == (20.0, 0.0)
    pass_time(watch, 20, cpu_share=2.0)
    assert round(watch.overdue_s, 6) == 3.0
    pass_time(watch, 4, cpu_share=0.01)  # threads that only look at the clock
    assert round(watch.overdue_s, 6) == 7.0
    busy(watch, 1)
    assert watch.overdue_s == 0.0


def test_with_overlap_the_step_after_is_announced_before_the_first_is_done() -> None:
    watch = Watch()
    watch.step_begins(6.0)
    busy(watch, 1)  # the one before it
    pass_time(watch, 25)
    assert watch.overdue_s == 0.0
    busy(watch, 2)
    busy(watch, 3)
    pass_time(watch, 25)
    assert watch.overdue_s == 25.0


def test_a_machine_that_stood_still_blames_nobody() -> None:
    watch = Watch()
    watch.tick(0.25, 0.0)
    watch.tick(3600.0, 0.0)
    assert watch.silence_s == 1.25
