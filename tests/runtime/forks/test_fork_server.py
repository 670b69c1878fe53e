"""Jobs in forks: answers, limits of time and memory, and what is left after an end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import psutil
import pytest

from ostinato.runtime.forks.fork_server import ForkServer, JobError, JobLimits
from ostinato.runtime.sandbox import Fault
from tests.waiting import until

LIMITS = JobLimits(memory_bytes=1 << 28)
CHILD = "tests.runtime.forks.fork_child"


def run(
    test: Callable[[ForkServer], Awaitable[None]], *, module: str = CHILD, first: bytes = b"hello"
) -> None:
    """Runs a test with a server of its own. Afterwards no process may be left."""

    async def main() -> None:
        server = ForkServer(module, lambda: first)
        try:
            await test(server)
        finally:
            pid = server.pid
            server.close()
        assert server.pid is None
        assert pid is None or not psutil.pid_exists(pid)

    asyncio.run(main())


async def sleeping(server: ForkServer) -> tuple[asyncio.Task[bytes], psutil.Process]:
    """A call with a job that takes ten minutes, and its fork, which is the only one."""
    await server.call(b"a", LIMITS)
    process = psutil.Process(server.pid)
    await until(lambda: not process.children())  # the first fork ends after its answer
    call = asyncio.create_task(server.call(b"sleep", LIMITS))
    await until(process.children)
    (fork,) = process.children()
    return call, fork


def test_each_job_has_a_process_of_its_own():
    async def test(server):
        assert server.pid is None  # none before the first job
        found = await asyncio.gather(*(server.call(b"a", LIMITS) for _ in range(5)))
        answers = [bytes(answer) for answer in found]
        pids = {answer.split()[2] for answer in answers}
        assert len(pids) == 5
        parents = {int(answer.split()[3]) for answer in answers}
        assert parents == {server.pid}
        # Each job finds the loaded data, and no job sees another job's changes.
        assert {tuple(answer.split()[:2]) for answer in answers} == {(b"1001", b"hello")}

    run(test)


def test_it_can_be_started_before_its_first_job():
    async def test(server):
        server.start()
        pid = server.pid
        server.start()  # does nothing while it runs
        assert server.pid == pid is not None
        assert (await server.call(b"a", LIMITS)).startswith(b"1001 hello")
        assert server.pid == pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: server._process.poll() is not None)
        server.start()
        assert server.pid != pid
        assert (await server.call(b"a", LIMITS)).startswith(b"1001 hello")

    run(test)


@pytest.mark.parametrize("is_killed", [False, True])
def test_it_can_be_launched_before_its_first_message_is_known(is_killed):
    async def main():
        known = {}
        server = ForkServer(CHILD, lambda: known["first"])
        try:
            server.launch()
            pid = server.pid
            server.launch()  # does nothing while it runs
            assert server.pid == pid is not None
            if is_killed:
                os.kill(pid, signal.SIGKILL)
                await until(lambda: server._process.poll() is not None)
            known["first"] = b"later"
            server.start()
            assert (server.pid != pid) is is_killed
            assert (await server.call(b"a", LIMITS)).startswith(b"1001 later")
        finally:
            server.close()

    asyncio.run(main())


SHARED = LIMITS._replace(is_shared=True)


def test_shared_jobs_follow_each_other_in_one_process(tmp_path):
    async def pid_of(server, limits=SHARED, job=b"a"):
        return int((await server.call(job, limits)).split()[2])

    async def test(server):
        first = await pid_of(server)
        assert await pid_of(server) == first
        assert await pid_of(server, LIMITS) != first  # not shared: a process of its own
        assert await pid_of(server) == first
        assert (await server.call(b"a", SHARED)).startswith(b"1004 hello")  # its fourth job
        # Each of six jobs goes on until all have begun, so no process can do two of them.
        meet = b"meet 6 " + bytes(tmp_path)
        at_once = await asyncio.gather(*(pid_of(server, job=meet) for _ in range(6)))
        assert len(set(at_once)) == 6
        forks = psutil.Process(server.pid).children()
        kept = await asyncio.gather(*(pid_of(server) for _ in range(4)))
        assert set(kept) < set(at_once)  # four have stayed
        server.close()
        _, alive = await asyncio.to_thread(psutil.wait_procs, forks, 240)
        assert not alive

    run(test)


@pytest.mark.parametrize(
    ("job", "text", "fault"),
    [
        (b"spin", "more than 0.2 s of processor time", Fault.job),
        (b"memory", "more than 256 MiB of memory", Fault.job),
        (b"raise", "ended with exit code 1", Fault.unknown),
    ],
)
def test_a_shared_job_without_an_answer_ends_its_process(job, text, fault):
    async def test(server):
        first = await server.call(b"a", SHARED)
        with pytest.raises(JobError, match=text) as caught:
            await server.call(job, SHARED)
        assert caught.value.reason.fault is fault
        second = await server.call(b"a", SHARED)
        assert second.split()[:2] == first.split()[:2]
        assert second.split()[2] != first.split()[2]

    run(test)


def test_a_shared_job_has_its_own_processor_time():
    async def test(server):
        for _ in range(3):  # each takes 0.6 s, and no part more than its limit
            assert await server.call(b"parts", SHARED) == b"done"

    run(test)


def test_forks_that_are_killed_while_they_wait_fail_no_job(tmp_path):
    async def test(server):
        # Each of four jobs goes on until all have begun, so each has a process of its own.
        meet = b"meet 4 " + bytes(tmp_path)
        await asyncio.gather(*(server.call(meet, SHARED) for _ in range(4)))
        forks = psutil.Process(server.pid).children()
        assert len(forks) == 4
        for fork in forks:
            fork.kill()
        for answer in await asyncio.gather(*(server.call(b"a", SHARED) for _ in forks)):
            assert int(answer.split()[2]) not in {fork.pid for fork in forks}
        with pytest.raises(JobError, match="ended with signal 9") as caught:
            await server.call(b"killed", SHARED)  # this job ends a new process as well
        assert caught.value.reason.fault is Fault.unknown

    run(test)


def test_when_all_processes_were_killed_the_second_try_starts_one(monkeypatch):
    """From the second call on, the error says that no process can be started."""

    async def test(server):
        await asyncio.gather(*(server.call(b"parts", SHARED) for _ in range(4)))
        process = psutil.Process(server.pid)
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        for one in (*process.children(), process):
            one.kill()
        with contextlib.suppress(JobError):  # the server's process may not have ended yet
            await server.call(b"a", SHARED)
        for _ in range(2):
            with pytest.raises(JobError, match="cannot be started") as caught:
                await server.call(b"a", SHARED)
            assert caught.value.reason.fault is Fault.start

    run(test)


def test_large_jobs_and_answers():
    async def test(server):
        job = b"j" * (20 << 20)
        assert await server.call(job, LIMITS) == str(len(job)).encode()
        assert await server.call(b"large", LIMITS) == b"y" * (20 << 20)

    run(test)


@pytest.mark.parametrize(
    ("job", "text", "part", "fault"),
    [
        (b"spin", "more than 0.2 s of processor time", "second part", Fault.job),
        (b"native", "more than 0.2 s of processor time", "native code", Fault.job),
        (b"memory", "more than 256 MiB of memory", "first part", Fault.job),
        (b"killed", "ended with signal 9", "first part", Fault.unknown),
        (b"raise", "ended with exit code 1", "first part", Fault.unknown),
        (b"deep", "ended with exit code 1", "first part", Fault.unknown),
    ],
)
def test_a_job_without_an_answer_ends_alone(job, text, part, fault, capfd):
    async def test(server):
        others = [asyncio.create_task(server.call(b"parts", LIMITS)) for _ in range(2)]
        with pytest.raises(JobError, match=text) as caught:
            await server.call(job, LIMITS)
        assert (caught.value.reason.fault, caught.value.part) == (fault, part)
        for other in others:
            assert await other == b"done"
        assert (await server.call(b"b", LIMITS)).startswith(b"1001 hello")

    run(test)
    assert ("a mistake in the fork" in capfd.readouterr().err) == (job == b"raise")


def test_a_cancelled_call_ends_its_job():
    async def test(server):
        call, fork = await sleeping(server)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(psutil.wait_procs, [fork], 240)
        assert not fork.is_running()
        assert (await server.call(b"b", LIMITS)).startswith(b"1001 hello")

    run(test)


def test_the_event_loop_goes_on_meanwhile():
    async def test(server):
        call, _ = await sleeping(server)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    run(test)


def test_a_job_may_give_way_to_other_processes():
    async def test(server):
        nice = await server.call(b"priority", LIMITS._replace(niceness=10))
        assert int(nice) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        assert int(await server.call(b"priority", LIMITS)) == os.getpriority(os.PRIO_PROCESS, 0)

    run(test)


def test_a_killed_server_process_is_started_again():
    async def test(server):
        call, fork = await sleeping(server)
        old = server.pid
        os.kill(old, signal.SIGKILL)
        fork.kill()
        with pytest.raises(JobError, match="ended") as caught:
            await call
        assert caught.value.reason.fault is Fault.unknown
        assert (await server.call(b"b", LIMITS)).startswith(b"1001 hello")
        assert server.pid != old

    run(test)


def test_a_server_process_that_can_not_start(monkeypatch, capfd):
    async def test(server):
        for _ in range(2):
            with pytest.raises(JobError) as caught:
                await server.call(b"a", LIMITS)
            assert caught.value.reason.fault is Fault.start

    async def without_forks(server):
        with pytest.raises(JobError, match="cannot be forked") as caught:
            await server.call(b"a", LIMITS)
        assert caught.value.reason.fault is Fault.start

    run(without_forks, first=b"alone")
    run(test, module="tests.runtime.no_such_module")
    run(test, first=b"fail")
    assert "it cannot begin" in capfd.readouterr().err
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    run(test)


def test_a_limit_of_the_system_is_not_the_jobs_fault():
    async def test(server):
        await server.call(b"a", LIMITS)
        process = psutil.Process(server.pid)
        limit = process.memory_info().vms + (200 << 20)
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        with pytest.raises(JobError, match=r"ran out of the \d+ MiB that the limit") as caught:
            await server.call(b"memory", LIMITS)
        assert caught.value.reason.fault is Fault.start
        # A job for which there is room ends by its own limit.
        with pytest.raises(JobError, match="more than 64 MiB of memory") as caught:
            await server.call(b"memory", LIMITS._replace(memory_bytes=64 << 20))
        assert caught.value.reason.fault is Fault.job
        assert (await server.call(b"b", LIMITS)).startswith(b"1001 hello")

    run(test)


def test_it_ends_with_its_parent(capfd):
    """The server's process and its fork end, and write nothing to the log."""

    async def test(server):
        call, fork = await sleeping(server)
        server._control.close()  # as when the parent's process ends
        server._control = None
        assert server._process.wait(240) == 0
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        # The process that adopts the fork, such as a container's first one, may not reap it.
        with contextlib.suppress(psutil.NoSuchProcess):
            await until(lambda: fork.status() == psutil.STATUS_ZOMBIE)

    run(test)
    assert capfd.readouterr().err == ""
