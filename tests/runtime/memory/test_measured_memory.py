"""Memory measured on a fake device, and graph memory compared with a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ostinato.conf.schema import DeviceConfig
from ostinato.conf.sections.cache_schema import CacheConfig
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.memory.footprint import GraphFootprint, MeasuredMemory
from ostinato.runtime.memory.measured_memory import compare_with_plan, measure
from ostinato.runtime.memory.memory_plan import MemoryPlan, plan_memory
from tests.runtime.memory.test_memory_plan import SMALL

MIB = 1 << 20


@dataclass
class Device:
    """Reports `free_bytes`. A measured step loads libraries, which take `library_bytes` of them."""

    free_bytes: int
    library_bytes: int = 0

    def free(self) -> int:
        return self.free_bytes

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        self.free_bytes -= self.library_bytes
        return 70 * MIB


def test_libraries_that_the_first_step_loads_count_as_used() -> None:
    steps: list[str] = []
    found = measure(
        Device(900 * MIB, library_bytes=40 * MIB),
        lambda: steps.append("largest"),
        free_before=1000 * MIB,
    )
    assert found == MeasuredMemory(used_bytes=140 * MIB, step_bytes=70 * MIB)
    assert steps == ["largest"]


def test_other_programs_that_gave_memory_back_are_not_negative_use() -> None:
    found = measure(Device(1200 * MIB), lambda: None, free_before=1000 * MIB)
    assert found.used_bytes == 0


@pytest.fixture
def plan() -> MemoryPlan:
    return plan_memory(
        SMALL,
        free_bytes=4096 * MIB,
        is_cpu=False,
        device=DeviceConfig(),
        cache=CacheConfig(),
        scheduler=StepLimits(64, 2048),
        graphs=GraphFootprint(num_graphs=5, max_tokens=256),
    )


def test_a_plan_that_was_right(plan: MemoryPlan) -> None:
    text = compare_with_plan(plan, free_before_capture=500 * MIB, free_now=480 * MIB)
    assert text == "captured graphs took 20 MiB, 21 were planned; 480 MiB are free"


def test_too_little_left_for_uncaptured_steps_is_reported(plan: MemoryPlan) -> None:
    text = compare_with_plan(plan, free_before_capture=500 * MIB, free_now=2 * MIB)
    assert text.startswith("captured graphs took 498 MiB, 21 were planned; 2 MiB are free, 3 less")
    assert text.endswith("lower device.memory_fraction or cache.memory_gib")
