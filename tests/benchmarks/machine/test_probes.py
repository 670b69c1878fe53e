"""Probes of the machine: bandwidth, other programs' load, peak memory and the commit."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from ostinato.benchmarks.machine.probes import (
    LoadMeter,
    PeakMemory,
    commit_of,
    cpu_seconds,
    read_bandwidth,
)


def test_bandwidth_is_plausible():
    assert 0.1 < read_bandwidth(torch.device("cpu")) < 2000  # GB/s of any CPU


def test_own_work_is_not_other_programs_work():
    meter = LoadMeter()
    data = np.ones(1 << 22)
    for _ in range(200):
        data.sum()
    assert 0.0 <= meter.stop() <= 1.0


def test_the_work_of_a_child_process_is_not_other_programs_work():
    """The child measures its own processor time, which other programs do not change."""
    meter = LoadMeter()
    _, _, before = meter._now()
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has worked, and still runs
        _, _, running = meter._now()
        child.communicate(b"\n")
    _, _, ended = meter._now()
    assert running - before >= 0.25
    assert ended >= running - 0.05


def test_cpu_seconds_have_a_process_its_living_child_and_its_ended_child():
    """Each of the three processes uses 0.3 s of processor time of its own."""
    work = "import subprocess, sys, time\nwhile time.process_time() < 0.3: pass\n"
    lasting = f"{work}print(flush=True)\ninput()"
    parent = (
        f"{work}subprocess.run([sys.executable, '-c', {work!r}], check=True)\n"
        f"subprocess.run([sys.executable, '-c', {lasting!r}], check=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seconds = cpu_seconds(psutil.Process(process.pid))
        process.communicate(b"\n")
    assert seconds >= 3 * 0.28  # the system counts in hundredths of a second


def write_fresh_memory(num_bytes: int) -> mmap.mmap:
    """Maps memory directly: an allocator could return memory that an earlier test freed."""
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for begin in range(0, num_bytes, mmap.PAGESIZE):
        pages[begin] = 1
    return pages


@pytest.fixture
def memory() -> PeakMemory:
    """Resets the peak first, so that memory of earlier tests does not count."""
    memory = PeakMemory()
    memory.forget_probe()
    if not memory.forgets:
        pytest.skip("this kernel does not let a process reset its peak")
    return memory


def test_peak_memory_holds_what_was_freed(memory: PeakMemory):
    before = memory.mib
    data = write_fresh_memory(128 << 20)
    memory.note()
    data.close()
    memory.forget_probe()
    assert memory.mib >= before + 100


def test_peak_memory_without_probes(memory: PeakMemory):
    before = memory.mib
    write_fresh_memory(128 << 20).close()
    memory.forget_probe()
    assert memory.mib < before + 100


def test_commit_and_its_changes(tmp_path: Path):
    def git(*arguments: str) -> None:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*command, *arguments], check=True, capture_output=True)

    assert commit_of(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    commit = commit_of(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"
