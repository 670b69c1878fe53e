"""Threads that share kernels' work in small steps (ops/native/crew.h), and the kernels on them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.ops.backends.cpu import BACKEND as CPU
from ostinato.ops.linear import pack_linear_weight, packed_linear
from ostinato.ops.native import library
from ostinato.ops.native.build import find_compiler
from tests.ops.attention_steps import Shape, check
from tests.ops.kernel_checks import linear_problem

CHECK = Path(__file__).with_name("crew_check.cpp")
HEADERS = Path(library.__file__).parent


@pytest.mark.parametrize("sanitizer", [None, "thread"])
def test_the_crew_by_itself(tmp_path: Path, sanitizer: str | None) -> None:
    program = tmp_path / "check"
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{HEADERS}"]
    flags += [f"-fsanitize={sanitizer}", "-g"] if sanitizer else []
    command = [find_compiler(), *flags, str(CHECK), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if sanitizer and built.returncode:
        pytest.skip("this compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    words = [str(program), *([sanitizer] if sanitizer else [])]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture
def hold_back(set_threads: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Kernels get so many threads, all other loops one: what the engine does around small steps."""
    library.load("core")
    set_threads(1)
    yield library.set_threads
    library.set_threads(0)


def product(rows: int) -> Tensor:
    x, weight, bias = linear_problem(rows, 650, 770, torch.bfloat16)
    return packed_linear(x, pack_linear_weight(weight), bias, 650)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_kernels_give_the_same_bits(hold_back: Callable[[int], None], num_threads: int) -> None:
    lengths = [(1, 3000), (40, 1500), (1, 5)]
    shape = Shape(num_heads=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    hold_back(1)
    alone = [product(1), product(40), check(CPU, lengths, shape)]
    hold_back(num_threads)
    together = [product(1), product(40), check(CPU, lengths, shape)]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_several_callers_at_once(hold_back: Callable[[int], None]) -> None:
    hold_back(2)
    expected = product(40)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(product, [40] * 200):
            assert torch.equal(result, expected)
