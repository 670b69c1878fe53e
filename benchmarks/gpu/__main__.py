"""Runs all GPU measurements; writes one JSON file.

    python -m ostinato.benchmarks.gpu --output results.json --budget-s 560
    python -m ostinato.benchmarks.gpu --stages decode-llama-8b,sampler --output results.json
    python -m ostinato.benchmarks.gpu --tiny          # on any machine, a minute: checks the stages
    python -m ostinato.benchmarks.gpu --without-device          # on any machine: what would run

The first two stages measure the machine's rates and run the GPU tests. Stages of decode and prefill
first measure the rates of memory and matrix products in their own process. They compare decode with
the roofline, and prefill with the rate of matrix products. Further stages measure the offline
workload (also with vLLM, if it is installed), the sampler, and starts. Every stage is a process of
its own. If one fails, this is recorded and the next one runs. A stage that is not done after its
limit (`limit_s` in stages.py) is ended, and the next one runs. A stage for which no time of the
budget is left does not run. The file keeps results of earlier commands for stages that do not run
again.

`--without-device` lowers and compiles the programs of models for described GPUs
(benchmarks/machine/gpus/), counts their launches and bytes, and predicts the times of steps.
Nothing runs. The result is the part `without_device` of the same file, and a section of
docs/kernels.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import ostinato
import ostinato.conf
from ostinato.benchmarks.machine.described_device import described_devices
from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.environment import environment_with
from ostinato.runtime.machine_info import gpu_names, package_versions

_PAGE = Path(ostinato.conf.__file__).parents[1] / "docs" / "kernels.md"
_TITLE = "## Layers and steps"
_FIRST = "h200"  # sorted before all others, because the page lists the first device's kernels
_LEAST_S = 5.0  # a stage is not started if less time is left


def main(arguments: list[str]) -> int:
    """Run the chosen stages, or with `--without-device` describe GPUs; returns the exit code.

    Returns:
        1 if a chosen stage failed or did not end in time, or has no result because no time was left
        for it; 2 if stages are to run, `--tiny` is off and no GPU is visible; else 0.
    """
    options = _parse(arguments)
    if options.start:
        from ostinato.benchmarks.gpu.stages import start

        print(json.dumps(start(options.start, options.tiny)))
        return 0
    if options.described:
        return _describe_here(options.described, options.tiny, Path(options.output))
    if options.stage:
        return _run_here(options.stage, options.tiny, Path(options.output))
    if not (options.tiny or options.without_device or torch.cuda.is_available()):
        print(
            "no GPU is visible; --without-device lists what a GPU would run, --tiny runs on a CPU",
            file=sys.stderr,
        )
        return 2
    output = Path(options.output)
    record = _read(output)
    record["conditions"] = _conditions(arguments)
    if options.without_device:
        record["without_device"] = _describe_apart(options.devices, options.tiny)
        write_json(record, output)
        return _write_page(record["without_device"], None if options.tiny else _PAGE)
    _run_stages(options, record)
    _print(record, options.stages)
    print(f"everything: {output}")
    return int(any(record["stages"][name]["status"] != "ok" for name in options.stages))


def _run_stages(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Run the chosen stages within the budget. The file is written after each of them."""
    from ostinato.benchmarks.gpu.stages import limit_s

    deadline = time.monotonic() + options.budget_s
    for name in options.stages:
        left = deadline - time.monotonic()
        if left < _LEAST_S:
            record["stages"].setdefault(name, {"status": "not run", "error": "no time was left"})
        else:
            print(f"{name} ...", flush=True)
            record["stages"][name] = _run_apart(name, options.tiny, min(left, limit_s(name)))
        write_json(record, Path(options.output))


def _parse(arguments: list[str]) -> argparse.Namespace:
    from ostinato.benchmarks.gpu.stages import STAGES, default_stages, limit_s

    lines = [
        f"  {name:<24} {stage.summary}; at most {limit_s(name):.0f} s"
        for name, stage in STAGES.items()
    ]
    parser = argparse.ArgumentParser(
        prog="python -m ostinato.benchmarks.gpu",
        epilog="stages, in running order:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stages", default=",".join(default_stages()), help="separated by commas")
    parser.add_argument("--budget-s", type=float, default=1800.0, help="seconds for all stages")
    parser.add_argument("--output", default="outputs/bench/gpu.json", help="the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a small model, for any machine")
    parser.add_argument(
        "--without-device",
        action="store_true",
        help="run nothing: compile for the GPUs of --devices and predict the times of steps",
    )
    parser.add_argument("--devices", default=",".join(described_devices()), help="described GPUs")
    parser.add_argument("--described", default="", help=argparse.SUPPRESS)
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    parser.add_argument("--start", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.stages = options.stages.split(",")
    options.devices = sorted(options.devices.split(","), key=lambda name: (name != _FIRST, name))
    if unknown := [name for name in options.devices if name not in described_devices()]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(described_devices())}")
    if unknown := [name for name in options.stages if name not in STAGES]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(STAGES)}")
    return options


def _describe_here(device: str, tiny: bool, output: Path) -> int:
    """Describe the steps on one device in this process."""
    from ostinato.benchmarks.gpu.without_device.step_table import MODELS, describe_steps
    from ostinato.benchmarks.gpu.without_device.steps import STEPS

    models, steps = (MODELS[-1:], STEPS[1:5:3]) if tiny else (MODELS, STEPS)
    output.write_text(json.dumps(describe_steps(device, models, steps)), encoding="utf-8")
    return 0


def _describe_apart(devices: list[str], tiny: bool) -> dict[str, Any]:
    """Describe each device in its own process, because compilers remember the first device.

    Raises:
        RuntimeError: a process failed; the end of its standard error is in the text.
    """
    found: dict[str, Any] = {}
    for device in devices:
        print(f"{device} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "steps.json"
            command = [sys.executable, "-m", "ostinato.benchmarks.gpu", "--described", device]
            command += ["--output", str(result), *["--tiny"] * tiny]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{device}: {done.stderr[-4000:]}")
            found[device] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _write_page(records: dict[str, Any], page: Path | None) -> int:
    """Print the tables, and put them into the page of kernels."""
    from ostinato.benchmarks.gpu.without_device.step_table import section_of
    from ostinato.benchmarks.micro.kernels.kernel_table import replace_section

    # The part of the version after "+" is left out: all builds of a version give the same tables.
    versions = {name: text.partition("+")[0] for name, text in package_versions().items()}
    section = section_of(records, f"torch {versions['torch']} and triton {versions['triton']}")
    print(section)
    if page is not None:
        text = page.read_text(encoding="utf-8")
        page.write_text(replace_section(text, _TITLE, section), encoding="utf-8")
    return 0


def _run_here(name: str, tiny: bool, output: Path) -> int:
    """Run a stage in this process; its result or its error is written to the file."""
    from ostinato.benchmarks.gpu.stages import STAGES, StageFailedError

    try:
        result: dict[str, Any] = {"status": "ok", "result": STAGES[name].measure(tiny)}
    except StageFailedError as error:
        result = {"status": "failed", "error": str(error), "result": error.result}
    except Exception as error:  # recorded, so that the other stages run
        text = f"{type(error).__name__}: {error}"
        result = {"status": "failed", "error": text, "traceback": traceback.format_exc()[-4000:]}
    output.write_text(json.dumps(result), encoding="utf-8")
    return 0


def _run_apart(name: str, tiny: bool, limit_s: float) -> dict[str, Any]:
    from ostinato.benchmarks.gpu.vllm_stage import VLLM_ENVIRONMENT

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "ostinato.benchmarks.gpu", "--stage", name]
        command += ["--output", str(result), *["--tiny"] * tiny]
        with log.open("wb") as stream:
            # A process group of its own, so that its children end with it.
            process = subprocess.Popen(
                command,
                env=environment_with(**VLLM_ENVIRONMENT if name.startswith("vllm-") else {}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found: dict[str, Any]
        if result.is_file():
            found = json.loads(result.read_text(encoding="utf-8"))
        elif code is None:
            found = {"status": "timeout", "error": f"not done after {limit_s:.0f} s"}
        else:
            found = {"status": "failed", "error": f"its process ended with {code}"}
        if found["status"] != "ok":
            found["log"] = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    found["seconds"] = round(time.monotonic() - begin, 1)
    return found


def _read(output: Path) -> dict[str, Any]:
    if output.is_file():
        return json.loads(output.read_text(encoding="utf-8"))
    return {"conditions": {}, "stages": {}}


def _conditions(arguments: list[str]) -> dict[str, Any]:
    return {
        **basic_conditions(),
        "command": arguments,
        "gpus": gpu_names(),
    }


def _print(record: dict[str, Any], names: list[str]) -> None:
    for name in names:
        stage = record["stages"][name]
        print(f"{name:<22} {stage['status']:<8} {stage.get('seconds', 0):>6} s", end="  ")
        print(stage.get("error") or _summary(stage["result"]))


def _summary(result: dict[str, Any]) -> str:
    rows = result.get("rows", [])
    if rows and "share_of_roofline" in rows[0]:
        return ", ".join(
            f"{row['batch']}: {row['tok_s']:.0f} tok/s {row['share_of_roofline']:.0%} "
            f"gap {row['host_gap']:.0%}"
            for row in rows
        )
    if rows and "mfu" in rows[0]:
        return ", ".join(f"{row['length']}: mfu {row['mfu']:.0%}" for row in rows)
    if rows:
        return ", ".join(f"{row['rows']} {row['path']} {row['us']:.0f} us" for row in rows)
    names = ("passed", "skipped", "output_tok_s", "copy_bytes_s", "matmul_flop_s")
    figures = [f"{name} {result[name]:.4g}" for name in names if name in result]
    figures += [
        f"{name} {result[name]['ready_s']:.1f} s" for name in ("cold", "warm") if name in result
    ]
    return ", ".join(figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
