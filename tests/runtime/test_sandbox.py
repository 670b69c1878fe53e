"""A process that can be killed: answers, limits, and what is left after an end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from ostinato.runtime.file_limit import raise_file_limit
from ostinato.runtime.sandbox import Limits, SandboxError, SandboxProcess, call

LIMITS = Limits(cpu_s=1, wall_s=60.0, memory_bytes=1 << 30, answer_bytes=1 << 20)


@pytest.fixture
def process() -> Iterator[SandboxProcess]:
    process = SandboxProcess("tests.runtime.sandbox_child", LIMITS, b"hello ")
    yield process
    process.close()
    assert process.pid is None


def test_one_process_answers_many_jobs(process):
    assert process.pid is None  # none before the first job
    answers = {process.call(b"a") for _ in range(3)}
    assert answers == {b"hello a" + str(process.pid).encode()}


def test_a_large_job(process):
    job = b"j" * (3 << 18)
    assert process.call(job).startswith(b"hello " + job)


def test_prints_are_no_answers(process):
    assert process.call(b"print") == b"printed"
    assert process.call(b"a").startswith(b"hello a")


@pytest.mark.parametrize(
    ("job", "text", "is_certain"),
    [
        (b"spin", "more than 1 s of processor time", True),
        (b"memory", "1024 MiB of memory", True),
        (b"long", "more than 1 MiB of text", True),
        (b"killed", "ended with code -9", False),
    ],
)
def test_a_job_without_an_answer(process, job, text, is_certain):
    process.call(b"a")
    old = process.pid
    with pytest.raises(SandboxError, match=text) as caught:
        process.call(job)
    assert caught.value.reason.is_certain == is_certain
    assert not psutil.pid_exists(old)
    assert process.call(b"b").startswith(b"hello b")


def test_the_clock_is_the_last_resort():
    process = SandboxProcess("tests.runtime.sandbox_child", LIMITS._replace(wall_s=3.0))
    with pytest.raises(SandboxError, match="more than 3 s") as caught:
        process.call(b"sleep")
    assert not caught.value.reason.is_certain
    process.close()


def test_limits_are_per_job(process):
    """Processor time of earlier jobs does not count."""
    first = process.call(b"work")
    assert process.call(b"work") == process.call(b"work") == first  # by the same process


def test_a_caller_that_goes_away_kills_its_job(process):
    async def leave() -> int:
        await call(process, b"a")
        pid = process.pid
        task = asyncio.create_task(call(process, b"sleep"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await call(process, b"b")).startswith(b"hello b")
        assert pid is not None
        return pid

    assert not psutil.pid_exists(asyncio.run(leave()))


def test_a_process_with_more_than_1024_open_files(process):
    """select takes no descriptor above 1023."""
    if raise_file_limit() < 1200:
        pytest.skip("the hard limit of open files is too low")
    with ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert process.call(b"a").startswith(b"hello a")
