"""Device times are summed after the device has passed a step, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ostinato.graphs.timing import ClockTimer, CudaTimer, make_timer


@dataclass
class Device:
    """A simulated device. An event passes when the device has done the work queued before it."""

    now: float = 0.0  # milliseconds of work that the host has queued
    done: float = -1.0  # milliseconds of it that the device has done
    num_events: int = 0

    def new_event(self) -> Event:
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, end_event: Event) -> float:
        assert end_event.query(), "the device has not reached the end event"
        return end_event.at - self.at


def step(device: Device, timer: CudaTimer, milliseconds: float) -> None:
    timer.begin()
    device.now += milliseconds
    timer.end()


def test_steps_count_when_the_device_has_passed_them() -> None:
    device = Device()
    timer = CudaTimer(device.new_event)
    step(device, timer, 5.0)
    device.now += 100.0  # between steps
    step(device, timer, 7.0)
    assert timer.seconds == 0.0
    device.done = 5.0
    assert timer.seconds == pytest.approx(0.005)
    device.done = device.now
    assert timer.seconds == pytest.approx(0.012)


def test_events_are_used_again() -> None:
    device = Device()
    timer = CudaTimer(device.new_event)
    for _ in range(50):
        step(device, timer, 1.0)
        device.done = device.now - 1.0  # one step is always in flight
    assert device.num_events == 4
    device.done = device.now
    assert timer.seconds == pytest.approx(0.050)


def test_a_cpu_is_timed_by_the_clock() -> None:
    times = iter([1.0, 1.5, 10.0, 10.25])
    timer = ClockTimer(lambda: next(times))
    for _ in range(2):
        timer.begin()
        timer.end()
    assert timer.seconds == 0.75
    assert isinstance(make_timer(torch.device("cpu")), ClockTimer)
