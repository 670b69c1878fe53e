"""The kernels' thread pool (ops/native/core/thread_pool.h), and the kernels on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.ops.backends.cpu import BACKEND as CPU
from ostinato.ops.linear.packed_linear import pack_linear_weight, packed_linear
from ostinato.ops.native import library
from ostinato.ops.native.build import find_compiler
from tests.ops.attention_steps import Shape, check
from tests.ops.kernel_checks import linear_problem

CHECK = Path(__file__).with_name("thread_pool_check.cpp")
HEADERS = Path(library.__file__).parent


@pytest.mark.parametrize("sanitizer", [None, "thread"])
def test_the_pool_by_itself(tmp_path: Path, sanitizer: str | None) -> None:
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{HEADERS}"]
    flags += [f"-fsanitize={sanitizer}", "-g"] if sanitizer else []
    sources = [str(CHECK), str(HEADERS / "core/thread_pool.cpp")]
    command = [find_compiler(), *flags, *sources, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if sanitizer and built.returncode:
        pytest.skip("this compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    words = [str(program), *([sanitizer] if sanitizer else [])]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture
def pool_threads(set_threads: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Sets the pool threads of this thread's kernel calls. The loops of torch use one thread."""
    library.load("core")
    set_threads(1)
    yield library.set_pool_threads
    library.set_pool_threads(0)


def product(rows: int) -> Tensor:
    x, weight, bias = linear_problem(rows, 650, 770, torch.bfloat16)
    return packed_linear(x, pack_linear_weight(weight), bias, 650)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_kernels_give_the_same_bits(pool_threads: Callable[[int], None], num_threads: int) -> None:
    lengths = [(1, 3000), (40, 1500), (1, 5)]
    shape = Shape(num_heads=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    pool_threads(1)
    alone = [product(1), product(40), check(CPU, lengths, shape)]
    pool_threads(num_threads)
    together = [product(1), product(40), check(CPU, lengths, shape)]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_several_callers_at_once(pool_threads: Callable[[int], None]) -> None:
    pool_threads(2)
    expected = product(40)

    def on_the_pool(rows: int) -> Tensor:
        library.set_pool_threads(2)
        return product(rows)

    with ThreadPoolExecutor(4) as callers:
        for result in callers.map(on_the_pool, [40] * 200):
            assert torch.equal(result, expected)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to count threads")
def test_a_choice_holds_for_the_thread_that_made_it() -> None:
    code = (
        "import os, sys, threading, torch\n"
        "from ostinato.ops.linear.packed_linear import pack_linear_weight, packed_linear\n"
        "from ostinato.ops.native.library import load, set_pool_threads\n"
        "load('core')\n"
        "torch.set_num_threads(1)\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "x, weight = torch.ones(40, 770), pack_linear_weight(torch.ones(650, 770))\n"
        "before = count()\n"
        "def caller(threads):\n"
        "    set_pool_threads(threads)\n"
        "    chosen.wait()\n"
        "    if threads == 0:\n"
        "        packed_linear(x, weight, None, 650)\n"
        "        counts.append(count() - before)\n"
        "    barrier.wait()\n"
        "    if threads == 3:\n"
        "        packed_linear(x, weight, None, 650)\n"
        "        counts.append(count() - before)\n"
        "    barrier.wait()\n"
        "counts, chosen, barrier = [], threading.Barrier(2), threading.Barrier(2)\n"
        "callers = [threading.Thread(target=caller, args=(n,)) for n in (0, 3)]\n"
        "[c.start() for c in callers]; [c.join() for c in callers]\n"
        "print(*counts)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    with_torchs, with_the_pool = map(int, ran.stdout.split())
    assert with_torchs == 2  # the two callers
    assert with_the_pool == 2 + 2
