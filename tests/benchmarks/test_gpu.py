"""The GPU benchmark: its arithmetic, and a small run of each kind of stage without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.benchmarks.gpu import stages
from ostinato.benchmarks.gpu.__main__ import _run_apart, main
from ostinato.benchmarks.machine.roofline import Machine, ModelSizes, sizes_of
from ostinato.conf.compose import load_config
from ostinato.models.config.recurrent_spec import DeltaSpec
from ostinato.runtime.startup.plan.model_source import open_model
from tests.runtime.hybrid import SLOT_BYTES, hybrid_config

ROOT = Path(__file__).parents[2]


def sizes(model: str) -> ModelSizes:
    config = load_config([f"model={model}", "model.load_format=dummy", "device.name=cpu"])
    source = open_model(config)
    return sizes_of(source.config, torch.bfloat16, torch.bfloat16)


def test_sizes_of_the_models_that_are_measured() -> None:
    llama, qwen = sizes("llama-8b"), sizes("qwen3-0.6b")
    # 8,030,261,248 parameters with an embedding and a head of 128256 x 4096 each.
    assert llama.body_parameters == 8_030_261_248 - 2 * 525_336_576
    assert llama.head_parameters == 525_336_576
    assert llama.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    # 596,049,920 with one table of 151936 x 1024 for the embedding and the head.
    assert qwen.body_parameters == 596_049_920 - 155_582_464
    assert qwen.head_parameters == 155_582_464


def test_the_roofline_of_a_step() -> None:
    small = ModelSizes(
        body_parameters=1000,
        head_parameters=200,
        weight_bytes=2,
        kv_bytes_per_token=16,
        attention_size=8,
    )
    assert small.decode_bytes(3, 10) == 2400 + 480
    assert small.decode_flop(3, 10) == 3 * (2400 + 320)
    # For each of two prompts: 2 x 4 x 1000 for the body, 2 x 200 for the head, and 4 x 8 for each
    # of 1 + 2 + 3 + 4 keys.
    assert small.prefill_flop(2, 4) == 2 * (8000 + 400 + 320)
    machine = Machine(copy_bytes_s=100.0, matmul_flop_s=1000.0)
    assert machine.least_seconds(2880, 8160) == pytest.approx(28.8)
    assert machine.least_seconds(288, 8160) == pytest.approx(8.16)


def test_layers_with_a_window_read_less() -> None:
    windows = {0: 1, 3: 2, -4: 1}  # four layers
    small = ModelSizes(
        body_parameters=1000,
        head_parameters=200,
        weight_bytes=2,
        kv_bytes_per_token=16,
        attention_size=8,
        windows=windows,
    )

    def keys(window: int, position: int) -> range:
        first = max(0, position - window + 1) if window else 0
        return range(position // -window * -window if window < 0 else first, position + 1)

    for start, end in ((0, 1), (0, 11), (5, 6), (3, 9), (10, 11), (7, 13)):
        num_read = num_pairs = 0
        for window, count in windows.items():
            seen = [keys(window, position) for position in range(start, end)]
            num_read += count * len(set().union(*seen))
            num_pairs += count * sum(map(len, seen))
        # 4 bytes of keys and values in each layer; 4 operations for each of 2 numbers of a layer
        assert small.attention_work(start, end) == (4 * num_read, 4 * 2 * num_pairs)
    assert small.decode_bytes(2, 7) == 2400 + 2 * 4 * (7 + 2 * 3 + 3)
    gemma = sizes("gemma3-4b")
    assert gemma.windows == {1024: 29, 0: 5}
    weights = gemma.decode_bytes(1, 0)
    assert gemma.decode_bytes(1, 1000) - weights == 1000 * gemma.kv_bytes_per_token
    read = gemma.decode_bytes(1, 34_000) - weights
    assert read == (5 * 34_000 + 29 * 1024) * gemma.kv_bytes_per_token // 34


def test_recurrent_layers_read_and_write_their_states() -> None:
    source = open_model(hybrid_config("device.name=cpu").engine)  # one layer of 4 has attention
    found = sizes_of(source.config, torch.float32, torch.float32)
    assert (found.state_bytes, found.state_operations) == (3 * SLOT_BYTES, 0)
    assert (found.windows, found.attention_size) == ({0: 1}, 4 * 16)
    kv_bytes = 2 * 2 * 16 * 4  # two heads of 16 floats
    for context in (1, 100):
        step = found.decode_bytes(3, context) - found.decode_bytes(0, context)
        assert step == 3 * (context * kv_bytes + 2 * 3 * SLOT_BYTES)
    delta = DeltaSpec(
        layers=(True, False, True, True),
        num_k_heads=2,
        num_v_heads=4,
        k_dim=8,
        v_dim=16,
        conv_width=4,
    )
    config = dataclasses.replace(source.config, recurrent=delta)
    assert config.state_operations == 3 * 7 * 4 * 8 * 16
    found = dataclasses.replace(found, state_operations=config.state_operations)
    plain = dataclasses.replace(found, state_operations=0)
    assert found.decode_flop(2, 9) - plain.decode_flop(2, 9) == 2 * config.state_operations
    assert found.prefill_flop(2, 9) - plain.prefill_flop(2, 9) == 18 * config.state_operations


def test_a_stage_that_fails_is_recorded() -> None:
    found = _run_apart("no-such-stage", True, 120.0)
    assert (found["status"], found["error"]) == ("failed", "KeyError: 'no-such-stage'")
    assert "Traceback" in found["traceback"]


def test_a_stage_that_hangs_is_ended() -> None:
    found = _run_apart("machine", True, 0.2)
    assert (found["status"], found["error"]) == ("timeout", "not done after 0 s")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the command itself is run")
def test_a_stage_that_hangs_leaves_time_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stage is done within these limits. Each of them is ended at its own limit."""
    limits = {"machine": 0.1, "sampler": 0.2}
    monkeypatch.setattr(stages, "LIMITS_S", limits)
    output = tmp_path / "gpu.json"
    assert main(["--tiny", "--stages", "machine,sampler", "--output", str(output)]) == 1
    found = json.loads(output.read_text())["stages"]
    assert {name: stage["status"] for name, stage in found.items()} == dict.fromkeys(
        limits, "timeout"
    )


STAGES = [
    *("machine", "tests", "decode-llama-8b", "prefill-qwen3-0.6b", "offline-qwen3-0.6b"),
    *("sampler", "decode-fp8-llama-8b", "startup-qwen3-0.6b"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the command itself is run")
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_all_of_it_in_small(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    output.write_text(json.dumps({"conditions": {}, "stages": {"earlier": {"status": "ok"}}}))
    command = [sys.executable, "-m", "ostinato.benchmarks.gpu", "--tiny"]
    command += ["--stages", ",".join(STAGES), "--output", str(output)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads(output.read_text())
    assert done.returncode == 0, json.dumps(record["stages"], indent=1)[-6000:] + done.stderr
    assert list(record["stages"]) == ["earlier", *STAGES]
    found = {name: record["stages"][name].get("result") for name in STAGES}
    assert found["tests"]["failed"] == []
    assert found["tests"]["skipped"] > 60
    assert [row["batch"] for row in found["decode-llama-8b"]["rows"]] == [1, 2, 8]
    for row in found["decode-llama-8b"]["rows"]:
        assert row["tokens_per_step"] == row["batch"], "some steps are no decode steps"
        assert row["device_step_ms"] <= row["step_ms"]
    sizes = [found[name]["sizes"]["kv_bytes_per_token"] for name in STAGES if "decode" in name]
    assert sizes == [512, 128]  # float32 and 8 bits
    assert found["offline-qwen3-0.6b"]["late_compiles"] == []
    assert {row["path"] for row in found["sampler"]["rows"]} == {"greedy", "full", "narrow", "wide"}
    assert set(found["startup-qwen3-0.6b"]) == {"cold", "warm"}
    assert record["conditions"]["command"] == command[3:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu.json"
    assert main(["--output", str(output)]) == 2
    assert "no GPU is visible; --without-device" in capsys.readouterr().err
    assert not output.exists()


def test_no_time_left_is_recorded(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "ostinato.benchmarks.gpu", "--tiny", "--budget-s", "1"]
    done = subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=False)
    assert done.returncode == 1
    found = json.loads(output.read_text())["stages"]
    assert {stage["status"] for stage in found.values()} == {"not run"}
