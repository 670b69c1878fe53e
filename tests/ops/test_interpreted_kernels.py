"""The Triton kernels without a GPU: runs their tests under Triton's interpreter.

The interpreter must be chosen before a kernel is decorated, so the tests are in modules that pytest
does not collect, and run in a process of their own. Most modules share a process, because importing
torch and Triton takes some seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

ROOT = Path(__file__).parents[2]
MODULES = {
    "attention": ("interpreted_triton_attention", "interpreted_flashinfer"),
    "others": (
        "fused/interpreted_fused",
        "fused/interpreted_fused_quantized",
        "fused/interpreted_experts",
        "fused/interpreted_layers",
        "gpu_quantized/interpreted_quantized",
        "adapters/interpreted_adapters",
        "logprobs/interpreted_row_logprobs",
        "moe/interpreted_moe_linear",
        "recurrent/interpreted_recurrent",
        "sampling/interpreted_unsorted_draw",
        "w8a8/interpreted_w8a8",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves here")
@pytest.mark.timeout(1200)  # half a minute of one core; a busy machine may give less than one
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
def test_under_the_interpreter(modules: tuple[str, ...], marks: str) -> None:
    """The tests with these marks pass, and none is skipped."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        # NumPy multiplies small tiles, for which more threads are slower.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks]
    files = [f"tests/ops/{module}.py" for module in modules]
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


def test_every_interpreted_module_is_run() -> None:
    folder = Path(__file__).parent
    found = {
        str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("interpreted_*.py")
    }
    assert found == {module for modules in MODULES.values() for module in modules}
