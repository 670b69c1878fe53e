"""The sandbox process: answers, limits, and clean-up after its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from ostinato.runtime import sandbox
from ostinato.runtime.file_limit import raise_file_limit
from ostinato.runtime.sandbox import Fault, Limits, SandboxError, SandboxProcess, call

LIMITS = Limits(cpu_s=1, wall_s=600.0, memory_bytes=1 << 30, answer_bytes=1 << 20)


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
    ("job", "text", "fault"),
    [
        (b"spin", "more than 1 s of processor time", Fault.job),
        (b"memory", "1024 MiB of memory", Fault.job),
        (b"long", "more than 1 MiB of text", Fault.job),
        (b"killed", "ended with signal 9", Fault.unknown),
        (b"raise", "ended with exit code 1", Fault.unknown),
    ],
)
def test_a_job_without_an_answer(process, job, text, fault):
    process.call(b"a")
    old = process.pid
    with pytest.raises(SandboxError, match=text) as caught:
        process.call(job)
    assert caught.value.reason.fault is fault
    assert not psutil.pid_exists(old)
    assert process.call(b"b").startswith(b"hello b")


def test_the_clock_is_the_last_resort():
    process = SandboxProcess("tests.runtime.sandbox_child", LIMITS)
    process.call(b"a")
    process._limits = LIMITS._replace(wall_s=1.0)  # its start may take longer
    with pytest.raises(SandboxError, match="no answer within 1 s") as caught:
        process.call(b"sleep")
    assert caught.value.reason.fault is Fault.unknown
    process.close()


def test_a_process_that_can_not_start(monkeypatch):
    def failed(module: str, text: str) -> None:
        process = SandboxProcess(module, LIMITS)
        with pytest.raises(SandboxError, match=text) as caught:
            process.call(b"a")
        assert caught.value.reason.fault is Fault.start
        assert process.pid is None

    failed("tests.runtime.no_such_module", "ended with exit code 1 at its start")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    failed("tests.runtime.sandbox_child", r"cannot be started \(No such file")


def test_a_server_with_a_limit_of_memory():
    """A child keeps a limit that it inherits. A job that needs more is not at fault."""
    script = """
import resource
from ostinato.runtime.sandbox import SandboxError
from tests.runtime.test_sandbox import LIMITS, SandboxProcess
resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
process = SandboxProcess("tests.runtime.sandbox_child", LIMITS)
assert process.call(b"a")
try:
    process.call(b"memory")
except SandboxError as error:
    print(*error.reason)
process.close()
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.stdout == "ran out of the 700 MiB that the server's processes may have start\n", run


def test_limits_are_per_job(process):
    """Processor time of earlier jobs does not count."""
    first = process.call(b"work")
    assert process.call(b"work") == process.call(b"work") == first  # by the same process


def test_a_caller_that_goes_away_kills_its_job(process, monkeypatch):
    async def leave() -> int:
        await call(process, b"a")
        pid = process.pid
        assert pid is not None
        sent = threading.Event()
        read = sandbox._read_frame

        def say_so_and_read(child: subprocess.Popen[bytes], deadline: float) -> bytes:
            sent.set()
            return read(child, deadline)

        monkeypatch.setattr(sandbox, "_read_frame", say_so_and_read)
        task = asyncio.create_task(call(process, b"sleep"))
        await asyncio.to_thread(sent.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await call(process, b"b")).startswith(b"hello b")
        return pid

    assert not psutil.pid_exists(asyncio.run(leave()))


@pytest.mark.parametrize("runs", [True, False])
def test_a_caller_that_goes_away_before_its_job_is_sent(process, monkeypatch, runs):
    """The child is killed before the thread sends the job. No later child may get the job."""
    begun, killed = threading.Event(), threading.Event()
    send, kill = process.call, process.kill

    def send_after_the_kill(job: bytes, abandoned: threading.Event) -> bytes:
        begun.set()
        killed.wait()
        return send(job, abandoned)

    def kill_and_say_so() -> None:
        kill()
        killed.set()

    async def leave() -> None:
        if runs:
            await call(process, b"a")
        monkeypatch.setattr(process, "call", send_after_the_kill)
        monkeypatch.setattr(process, "kill", kill_and_say_so)
        task = asyncio.create_task(call(process, b"sleep"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        assert (await call(process, b"b")).startswith(b"hello b")

    asyncio.run(leave())


def test_a_process_with_more_than_1024_open_files(process):
    """`select` takes no descriptor above 1023."""
    if raise_file_limit() < 1200:
        pytest.skip("the hard limit of open files is too low")
    with ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert process.call(b"a").startswith(b"hello a")
