"""What a GPU would run, counted without one: the descriptions of devices, and a lowered model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux x86-64 only")

from ostinato.benchmarks.gpu.without_device.steps import STEPS, Step
from ostinato.benchmarks.machine.described_device import described_device, described_devices

ALL = ["a100", "b200", "h100", "h200", "l40s", "rtx4090"]


def test_every_description_is_read() -> None:
    assert described_devices() == ALL
    devices = [described_device(name) for name in ALL]
    assert [device.arch for device in devices] == [80, 100, 90, 90, 89, 89]
    for device in devices:
        assert device.shared_per_program < device.shared_per_multiprocessor
        assert 1e11 < device.memory_bytes_s < device.bf16_flop_s / 50


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"device 'h999' is not one of a100, .*, rtx4090"):
        described_device("h999")


def test_resident_programs_are_limited_by_the_scarcest_resource() -> None:
    device = described_device("h200")
    assert device.resident_programs(255, 0, 128) == 2  # 65536 registers / (256 x 128)
    assert device.resident_programs(32, 0, 128) == 16  # 2048 threads
    assert device.resident_programs(32, 100 * 1024, 128) == 2  # 228 KiB
    assert device.resident_programs(16, 0, 32) == 32  # programs
    assert described_device("l40s").resident_programs(16, 0, 32) == 24


def test_shapes_of_steps() -> None:
    mixed = Step(name="mixed", seqs=((3, 1, 100), (1, 40, 60)))
    assert tuple(mixed.sizes) == (43, 4, 4)
    assert mixed.most_query_rows == 0
    assert [step.most_query_rows for step in STEPS] == [1, 1, 1, 1, 0, 0, 0]


def describe(device: str, folder: Path) -> dict[str, Any]:
    """Run the tiny form of the command: one layer of a model at two shapes."""
    output = folder / "steps.json"
    command = [sys.executable, "-m", "ostinato.benchmarks.gpu", "--described", device, "--tiny"]
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())["models"]["qwen3-0.6b"]


def check(found: dict[str, Any]) -> None:
    fused, decode, prefill = found["steps"]
    assert [row["step"] for row in found["steps"]] == ["decode 8", "decode 8", "prefill 512"]
    assert [row["is_taken"] for row in found["steps"]] == [True, False, True]
    # The launches: a norm, four matrix products, a kernel that rotates and writes, and attention.
    assert (fused["launches"], fused["ours"]) == (7, 7)
    # Inductor: two norms and the gate. Ours: rotation with writing, and attention. cuBLAS: four
    # matrix products.
    assert (decode["Inductor"], decode["ours"], decode["cuBLAS"], decode["torch"]) == (3, 2, 4, 0)
    assert prefill["launches"] == decode["launches"] + 1, "long query ranges have their own launch"
    weights = 2 * (4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072)
    cached = 8 * 2048 * 2 * 8 * 128 * 2
    for row in (fused, decode):
        assert weights + cached < row["num_bytes"] < 1.05 * (weights + cached)
        assert row["bytes_of_ideal"] < 1.05
    assert fused["step_ms"] < decode["step_ms"]
    assert found["waits"] == [] == found["copies"]
    assert not any(row["copies_cache"] for row in found["steps"])
    kernels = {row["kernel"]: row for row in found["kernels"]}
    assert {"rotary_write_kernel", "attention_kernel, short"} <= set(kernels)
    assert "fused_linear_kernel, 16 rows, norm, 6144 x 1024, silu" in kernels
    assert [name for name, row in kernels.items() if row["spill_bytes"]] == []
    assert all(0 < row["occupancy"] <= 1 for row in kernels.values())


@pytest.mark.slow  # half a minute
def test_a_layer_on_a_described_gpu(tmp_path: Path) -> None:
    """The engine's compiler lowers the layer; its Triton kernels are for capability 9.0."""
    check(describe("h200", tmp_path))


@pytest.mark.slow
def test_the_layer_of_a_head_on_a_described_gpu() -> None:
    """The layer of an EAGLE-3 head is compiled like any decoder layer.

    It has four products, attention and three kernels of Inductor.
    """
    command = [sys.executable, str(Path(__file__).with_name("head_layer.py")), "h200"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert Counter(found["by"]) == {"cuBLAS": 4, "ours": 1, "Inductor": 3}
    assert found["waits"] == [] == found["copies"]


@pytest.mark.slow
def test_adapters_are_added_in_place_by_one_op_for_each_matrix() -> None:
    """The layer without adapters has no such op."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu.lower_adapters"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["0", "False", "0", "4", "False", "0"]
