"""`run compile compile.gpu=...` without that GPU; another process uses the bundle's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.tiny import MODEL

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

SMALL = {**MODEL, "head_dim": 64, "hidden_size": 128, "dtype": "bfloat16"}

# Unpacks the kernels of a bundle, and runs the command again with a compiler that always fails. So
# every kernel must be among the unpacked ones.
ADOPTING = """
import sys
from pathlib import Path
import triton.backends.nvidia.compiler as compiler
from ostinato.graphs.kernel_archive import unpack_triton_kernels

def refuse(*arguments, **options):
    raise SystemExit("a kernel is compiled")

archive, cache = map(Path, sys.argv[1:3])
assert unpack_triton_kernels(archive.read_bytes(), cache) > 0
compiler.CUDABackend.make_cubin = refuse

from ostinato.benchmarks.gpu.without_device import described_bundle
from contextlib import contextmanager

@contextmanager
def adopted():
    yield cache

described_bundle._kernel_folder = adopted
from ostinato.commands import run
sys.exit(run(sys.argv[3:]))
"""


def arguments(folder: Path, *more: str) -> list[str]:
    model = folder.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SMALL))
    return [
        "compile",
        "compile.gpu=h200",
        "model.load_format=dummy",
        f"model.path={model}",
        "scheduler.max_num_seqs=4",
        "scheduler.max_num_batched_tokens=256",
        f"graphs.bundle_dir={folder}",
        *more,
    ]


def bundle_in(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bundle_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    first, second, cache = (tmp_path / name for name in ("first", "second", "cache"))
    command = [sys.executable, "-m", "ostinato", *arguments(first)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "NVIDIA H200 (sm_90)" in done.stdout
    bundle = bundle_in(first)
    assert "NVIDIA-H200" in bundle.name
    files = {path.name for path in bundle.iterdir()}
    (archive,) = [name for name in files if name.startswith("triton-")]
    # The bundle leaves out Inductor's programs, which only one build of torch can load.
    assert files == {"manifest.json", archive, "layer-0-few-rows", "layer-1-few-rows"}

    again = [sys.executable, "-c", ADOPTING, str(bundle / archive), str(cache), *arguments(second)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(again, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert bundle_in(second).name == bundle.name
    assert (bundle_in(second) / archive).read_bytes() == (bundle / archive).read_bytes()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["compile.gpu=h999"], "compile.gpu: device 'h999' is not one of a100"),
        (["device.name=cpu"], "compile.gpu=h200 is for a GPU, and device.name=cpu; leave one out"),
    ],
)
def test_wrong_machines_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], reason: str
) -> None:
    from ostinato.commands import run

    assert run(arguments(tmp_path / "bundles", *more)) != 0
    assert reason in capsys.readouterr().err
