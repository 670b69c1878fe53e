"""The division of a kernel's work among threads (ops/native/core/division.h)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ostinato.ops.native import library
from ostinato.ops.native.build import find_compiler

CHECK = Path(__file__).with_name("division_check.cpp")
HEADERS = Path(library.__file__).parent


def test_each_part_has_one_worker_and_each_worker_enough_work(tmp_path: Path) -> None:
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{HEADERS}"]
    sources = [str(CHECK), str(HEADERS / "core/thread_pool.cpp")]
    command = [find_compiler(), *flags, *sources, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
