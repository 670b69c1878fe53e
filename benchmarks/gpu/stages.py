"""The table of all GPU stages, and the stages that do not run the engine in this process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ostinato
from ostinato.benchmarks.gpu.engine_stages import (
    decode,
    offline,
    prefill,
    stage_config,
    startup_once,
)
from ostinato.benchmarks.gpu.vllm_stage import has_vllm, offline_in_vllm
from ostinato.benchmarks.machine.gpu_rates import measure_machine, time_calls
from ostinato.conf.environment import with_own_caches
from ostinato.conf.schema import DeviceName
from ostinato.graphs.recorder import CudaRecorder
from ostinato.graphs.sampling_graph import GraphSampler
from ostinato.ops.sampling.sample_rows import RowSampling, SamplePath
from ostinato.runtime.startup.plan.device import resolve_device

__all__ = ("LIMITS_S", "STAGES", "Stage", "StageFailedError", "default_stages", "limit_s", "start")


class Stage(NamedTuple):
    """A group of measurements that runs in a process of its own."""

    measure: Callable[[bool], dict[str, Any]]  # of `tiny`; tiny sizes run on any machine
    summary: str  # what it measures, for `--help`


_WIDE = ["scheduler.max_num_seqs=256", "model.max_model_len=4096"]
_LONG = ["scheduler.max_num_batched_tokens=8192", "model.max_model_len=16384"]


def _machine(tiny: bool) -> dict[str, Any]:
    device = resolve_device(DeviceName.auto)
    dtype = torch.float32 if tiny else torch.bfloat16
    return {
        "device": str(device),
        "dtype": str(dtype),
        **dataclasses.asdict(measure_machine(device, dtype, tiny=tiny)),
    }


def _tests(tiny: bool) -> dict[str, Any]:
    """Run tests/gpu except its slow tests. Without a GPU they are skipped and counted as skipped.

    Raises:
        FileNotFoundError: there is no checkout with tests/gpu.
        RuntimeError: pytest ended without a report, or with a status other than 0, 1 and 5.
        StageFailedError: a test failed.
    """
    root = Path(ostinato.__file__).resolve().parents[1]
    if not (root / "tests" / "gpu").is_dir():
        raise FileNotFoundError(f"{root}/tests/gpu does not exist; run this stage from a checkout")
    cases: list[ElementTree.Element] = []
    output = ""
    # Tests that read the free memory of the device run alone. The time limit of a test is long,
    # because building FlashInfer's kernels takes minutes.
    for kind, workers in (("not whole_device", 8), ("whole_device", 0)):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            marks = f"gpu and not slow and {kind}"
            command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-n", str(workers)]
            command += ["--dist", "load", "--timeout", "900", "-p", "no:cacheprovider"]
            command += [f"--junitxml={report}", "tests/gpu"]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            if not report.is_file() or done.returncode not in (0, 1, 5):
                end = done.stdout[-2000:] + done.stderr[-2000:]
                raise RuntimeError(f"pytest ended with {done.returncode}: {end}")
            cases += ElementTree.parse(report).getroot().iter("testcase")
            output += done.stdout[-8000:]
    bad = [case for case in cases if case.find("failure") is not None or _has_error(case)]
    skipped = [case for case in cases if case.find("skipped") is not None]
    result: dict[str, Any] = {
        "passed": len(cases) - len(bad) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{case.get('classname')}.{case.get('name')}" for case in bad],
        "slowest_s": sorted((float(case.get("time", 0)) for case in cases), reverse=True)[:3],
    }
    if bad:
        result["output"] = output
        raise StageFailedError("tests failed", result)
    return result


class StageFailedError(Exception):
    """A stage failed a check, but it has measurements."""

    def __init__(self, text: str, result: dict[str, Any]) -> None:
        super().__init__(text)
        self.result = result


def _has_error(case: ElementTree.Element) -> bool:
    return case.find("error") is not None


def _sampler(tiny: bool) -> dict[str, Any]:
    """Time a draw for every path and number of rows, captured where possible."""
    device = resolve_device(DeviceName.auto)
    sizes, vocab_size = ((1, 4), 1000) if tiny else ((1, 8, 64, 256), 151_936)
    logits = torch.randn(max(sizes), vocab_size, device=device) * 3
    recorder = CudaRecorder() if device.type == "cuda" else None
    token_sampler = GraphSampler(logits, recorder=recorder)
    token_sampler.capture()
    paths = {
        SamplePath.greedy: RowSampling(SamplePath.greedy, 1.0, vocab_size, 1.0, 0.0, 0.5),
        SamplePath.full: RowSampling(SamplePath.full, 1.0, vocab_size, 1.0, 0.0, 0.5),
        SamplePath.narrow: RowSampling(SamplePath.narrow, 1.0, 20, 0.95, 0.0, 0.5),
        SamplePath.wide: RowSampling(SamplePath.wide, 1.0, vocab_size, 0.9, 0.0, 0.5),
    }
    rows = []
    for size, (path, draw) in itertools.product(sizes, paths.items()):
        token_sampler.stage([draw] * size)
        seconds = time_calls(partial(token_sampler.run, logits[:size]), device)
        rows.append({"rows": size, "path": path.name, "us": seconds * 1e6})
    return {"vocab_size": vocab_size, "rows": rows}


def _startup(model: str, tiny: bool) -> dict[str, Any]:
    """Two starts in child processes: with empty caches, then with the caches of the first."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ostinato.benchmarks.gpu", "--start", model]
        command += ["--tiny"] * tiny
        environment = with_own_caches(Path(folder))
        environment["TRITON_CACHE_DIR"] = f"{folder}/triton"
        for name in ("cold", "warm"):
            begin = time.perf_counter()
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"the {name} start failed: {done.stderr[-2000:]}")
            process_s = time.perf_counter() - begin
            result[name] = json.loads(_last_line(done.stdout)) | {"process_s": process_s}
    return result


def _last_line(text: str) -> str:
    return re.split(r"\n", text.strip())[-1]


def start(model: str, tiny: bool) -> dict[str, Any]:
    """One start, for the start-up stage's processes."""
    return startup_once(stage_config(model, _WIDE, tiny=tiny))


def _of(
    measure: Callable[..., dict[str, Any]], model: str, overrides: list[str]
) -> Callable[[bool], dict[str, Any]]:
    return lambda tiny: measure(stage_config(model, overrides, tiny=tiny), tiny=tiny)


_DECODE = "steps of 1, 8, 64 and 256 sequences with 2,048 tokens each"
_OFFLINE = "256 requests at once, 100 to 1,024 tokens in and as many out"
_PREFILL = "prompts of 512, 2,048 and 8,192 tokens"
_STARTS = "two starts in new processes: with empty caches, and with those of the first"
LLAMA, QWEN = "llama-8b", "qwen3-0.6b"
# In running order: the machine's rates and the tests, then the other stages by importance.
STAGES: dict[str, Stage] = {
    "machine": Stage(_machine, "the rates of copies and of matrix products"),
    "tests": Stage(_tests, "tests/gpu without its slow tests"),
    f"decode-{LLAMA}": Stage(_of(decode, LLAMA, _WIDE), _DECODE),
    f"decode-{QWEN}": Stage(_of(decode, QWEN, _WIDE), _DECODE),
    f"offline-{QWEN}": Stage(_of(offline, QWEN, _WIDE), _OFFLINE),
    f"vllm-offline-{QWEN}": Stage(_of(offline_in_vllm, QWEN, _WIDE), f"vLLM: {_OFFLINE}"),
    f"prefill-{LLAMA}": Stage(_of(prefill, LLAMA, _LONG), _PREFILL),
    f"prefill-{QWEN}": Stage(_of(prefill, QWEN, _LONG), _PREFILL),
    "sampler": Stage(_sampler, "draws of 1 to 256 rows by each way of sampling"),
    f"decode-fp8-{LLAMA}": Stage(
        _of(decode, LLAMA, [*_WIDE, "cache.dtype=fp8_e4m3"]), f"a cache of 8 bits: {_DECODE}"
    ),
    f"startup-{QWEN}": Stage(partial(_startup, QWEN), _STARTS),
    f"startup-{LLAMA}": Stage(partial(_startup, LLAMA), _STARTS),
}


LIMITS_S = {"tests": 600.0, f"vllm-offline-{QWEN}": 600.0}
"""Seconds after which a stage is ended, for stages that build kernels for minutes."""
_USUAL_LIMIT_S = 300.0


def limit_s(stage: str) -> float:
    """The seconds after which a stage is ended, because it probably hangs."""
    return LIMITS_S.get(stage, _USUAL_LIMIT_S)


def default_stages() -> list[str]:
    """All stages, without those of vLLM if vLLM is not importable."""
    return [name for name in STAGES if has_vllm() or not name.startswith("vllm-")]
