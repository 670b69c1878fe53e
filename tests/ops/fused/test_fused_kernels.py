"""The fused kernels on a machine without a GPU: their interpreted tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")
ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves here")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_under_the_interpreter(marks: str) -> None:
    """The interpreted tests with these marks, in a process where no kernel is decorated yet."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        # NumPy multiplies small tiles, for which more threads are slower.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks]
    files = [f"tests/ops/fused/interpreted_{name}.py" for name in ("fused", "experts")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
