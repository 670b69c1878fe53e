"""Lists the kernels of a step on a GPU that is absent: JSON, and a section of docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ostinato.benchmarks.gpu.without_device.expert_calls import expert_calls
from ostinato.benchmarks.gpu.without_device.fake_device import fake_device
from ostinato.benchmarks.gpu.without_device.kernels import OwnLaunch, inductor_resources
from ostinato.benchmarks.gpu.without_device.lowering import By
from ostinato.benchmarks.gpu.without_device.model_programs import ModelPrograms, lower_model
from ostinato.benchmarks.gpu.without_device.quantized_calls import quantized_calls
from ostinato.benchmarks.gpu.without_device.steps import (
    KERNEL_SECONDS,
    MATRIX_SHARE,
    MEMORY_SHARE,
    STEPS,
    CountedStep,
    Step,
    count_step,
    own_attention,
)
from ostinato.benchmarks.machine.described_device import DescribedDevice, described_device
from ostinato.benchmarks.machine.kernel_resources import Resources
from ostinato.models.layers.few_rows import MOST_EXPERT_ROWS, MOST_QUANTIZED_ROWS
from ostinato.ops.backends.triton_tiles import FIRST_OF_CLASS
from ostinato.ops.fused.fused_linear import most_rows

__all__ = ("MODELS", "describe_steps", "section_of")

# Goals of a decode step: launches of a layer, and its bytes / the least possible bytes.
_MOST_LAUNCHES, _MOST_BYTES = 7, 1.05

# Why some decode steps keep more launches; the numbers are of the first device.
_REASONS = """
Two kinds of decode steps keep more launches, because fewer would be slower:

- *Dense layers at 256 sequences, 9 launches.* Four are products of cuBLAS. It adds a residual and
  nothing else. The others are two norms, rotation with the write of K and V, attention, and the
  activation. With this project's products instead, the norms and the activation would belong to
  them. That saves two launches and one pass over the result of gate and up, 9 µs of a layer of
  Llama-8B. But for 128 and 256 rows these products took 1.3 to 4.1 times as long as those of cuBLAS
  on an H200 (`benchmarks/results/nvidia-h200/fused-linear-tiles-norm-in-kernel.json`), and the
  products take 161 µs: at least 48 µs would be lost.
- *Experts at more than 16 sequences, 8 launches.* For up to 16 rows, the programs of the output
  projection also compute parts of the router's logits, and the last of them chooses the experts
  (`ops/fused/triton_output_router.py`). These parts are 32 KB for each token of Qwen3-30B-A3B. With
  64 tokens, a group of eight programs has 256 KB for its last program to read, and so has the last
  of all. That takes longer than the 2 µs of a launch, and no other program works meanwhile.
"""

MODELS = ("llama-8b", "llama-8b, int4", "qwen3-30b-a3b", "qwen3-0.6b")
_RESOURCES = ("choices", "registers", "spill_bytes", "shared_bytes", "threads", "occupancy")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """A Triton kernel of a layer, as the device would run it."""

    name: str
    by: str
    num_choices: int  # configurations that Inductor times before it keeps one
    worst: Resources  # the choice with the most registers
    spill_bytes: int  # summed over all choices

    def row(self, device: DescribedDevice) -> dict[str, Any]:
        worst = self.worst
        resident = device.resident_programs(worst.registers, worst.shared_bytes, worst.num_threads)
        return {
            "kernel": self.name,
            "by": self.by,
            "choices": self.num_choices,
            "registers": worst.registers,
            "spill_bytes": self.spill_bytes,
            "shared_bytes": worst.shared_bytes,
            "threads": worst.num_threads,
            "occupancy": resident * worst.num_threads / device.threads_per_multiprocessor,
        }


def describe_steps(
    device_name: str, models: Iterable[str] = MODELS, steps: Iterable[Step] = STEPS
) -> dict[str, Any]:
    """Lower the models, compile their kernels, and count the launches and bytes of steps.

    This process can then describe no other device, because compilers remember the first one.

    Args:
        device_name: a file of benchmarks/machine/gpus/.
        models: names that `lower_model` takes.
        steps: the steps to describe.

    Returns:
        The input of `section_of`: plain numbers and texts.
    """
    device = described_device(device_name)
    record: dict[str, Any] = {"device": device.name, "models": {}}
    with fake_device(device):
        for model in models:
            programs = lower_model(model)
            counted = [
                count_step(programs, step, device, is_fused=is_fused)
                for step in steps
                for is_fused in _forms(programs, step)
            ]
            record["models"][model] = {
                "steps": [
                    _step_row(one, is_taken=one.is_fused == _takes_few_rows(programs, one.step))
                    for one in counted
                ],
                "kernels": [one.row(device) for one in _kernels(programs, steps, device)],
                "waits": sorted({wait for one in counted for wait in one.waits}),
                "copies": [*programs.layer.copies, *programs.last.copies],
            }
    return record


def _forms(programs: ModelPrograms, step: Step) -> tuple[bool, ...]:
    """The forms of layers to count: True = the form for few rows. Small steps have both forms."""
    return (True, False) if _takes_few_rows(programs, step) else (False,)


def _takes_few_rows(programs: ModelPrograms, step: Step) -> bool:
    return step.sizes.num_tokens <= programs.most_few_tokens


def _step_row(counted: CountedStep, *, is_taken: bool) -> dict[str, Any]:
    return {
        "step": counted.step.name,
        "is_fused": counted.is_fused,
        "is_taken": is_taken,
        "launches": len(counted.layer),
        **{str(by): counted.count(by) for by in By},
        "num_bytes": counted.num_bytes,
        "bytes_of_ideal": counted.num_bytes / counted.ideal_bytes,
        "copies_cache": counted.copies_cache,
        "layer_us": 1e6 * sum(launch.seconds for launch in counted.layer),
        "outside": counted.outside,
        "step_ms": 1e3 * counted.seconds,
        "layer": [asdict(launch) for launch in counted.layer],
    }


def _kernels(
    programs: ModelPrograms, steps: Iterable[Step], device: DescribedDevice
) -> list[_Kernel]:
    found: dict[str, _Kernel] = {}

    def add(name: str, launch: OwnLaunch) -> None:
        """Of launches with one name, as for steps of 8 and of 64 sequences, the worst is kept."""
        new = _kernel(name, By.own, [launch.resources])
        found[name] = max(found.get(name, new), new, key=_badness)

    for name, source in {**programs.layer.sources, **programs.last.sources}.items():
        choices = inductor_resources(name, source, device.arch)
        found[name] = _kernel(name, By.inductor, choices)
    for step in steps:
        if _forms(programs, step)[0]:
            for fused in programs.fused_launches(step.sizes, device.arch):
                if fused.kernel is not None:
                    constants = fused.kernel.constants
                    rows = constants.get("BLOCK_M", constants.get("ROWS", 1))
                    add(f"{fused.kernel.name}, {rows} rows, {fused.launch.name}", fused.kernel)
        for call in expert_calls(programs, step.sizes.num_tokens, device.arch):
            for launch in call.kernels:
                add(_name_of_experts(launch), launch)
        tokens = step.sizes.num_tokens
        for product in quantized_calls(programs, tokens, tokens, device.arch):
            for launch in product.kernels:
                add(_name_of_quantized(launch), launch)
        for launch in own_attention(programs, step, device.arch):
            add(_name_of_attention(launch, step), launch)
    return list(found.values())


def _badness(kernel: _Kernel) -> tuple[int, int]:
    return kernel.spill_bytes, kernel.worst.registers


def _name_of_attention(launch: OwnLaunch, step: Step) -> str:
    if launch.name != "attention_kernel":
        return launch.name
    if launch.constants["MIN_QUERY"] > 1:
        return f"{launch.name}, long"
    is_few = step.sizes.num_seqs < FIRST_OF_CLASS[1]
    return f"{launch.name}, {'few' if is_few else 'short'}"


def _name_of_experts(launch: OwnLaunch) -> str:
    constants = launch.constants
    if launch.name != "grouped_kernel":
        return launch.name
    return f"{launch.name}, {constants['BLOCK_M']} rows, {constants['N']} x {constants['K']}"


def _name_of_quantized(launch: OwnLaunch) -> str:
    constants = launch.constants
    if "K" not in constants:
        return launch.name
    rows = constants.get("ROWS", constants.get("BLOCK_M"))
    return f"{launch.name}, {rows} rows, {constants['N']} x {constants['K']}"


def _kernel(name: str, by: By, choices: list[Resources]) -> _Kernel:
    return _Kernel(
        name=name,
        by=str(by),
        num_choices=len(choices),
        worst=max(choices, key=lambda one: one.registers),
        spill_bytes=sum(one.spill_bytes for one in choices),
    )


def section_of(records: Mapping[str, dict[str, Any]], versions: str) -> str:
    """The section of docs/kernels.md about described devices; kernels are listed for the first.

    Args:
        records: the results of `describe_steps`, by the name of the device.
        versions: the versions of torch and Triton.
    """
    first, *others = records
    lines = [
        f"Lowered by {versions} with `python -m ostinato.benchmarks.gpu --without-device`. "
        "The engine's own compiler lowers the layers of a model in bfloat16 on fake CUDA tensors, "
        "and every Triton kernel is compiled for the device. Nothing runs. The [performance page]"
        "(performance.md#on-a-gpu) compares predicted times with those of an H200.",
        "",
        "*Launches* counts the kernels of one layer; *outside* counts those before and after all "
        "layers. *Of ideal* divides the bytes by the least possible ones: weights, the cache's "
        "entries, and the operands and results of each matrix product and of attention, once "
        "each. A decoding sequence has 2048 tokens in context; a mixed step has 64 decoding "
        "sequences and a prompt of 512 tokens. Tokens are routed to random experts; a step reads "
        "the expected number of different experts. The times are predictions: each launch takes "
        f"the longest of three times: its bytes at {MEMORY_SHARE:.0%} of the nominal memory rate, "
        f"its operations at {MATRIX_SHARE:.0%} of the nominal matrix rate, and "
        f"{KERNEL_SECONDS * 1e6:.0f} µs.",
        "",
        f"Steps of up to {most_rows(torch.bfloat16)} tokens run layers of fused kernels "
        f"(models/layers/few_rows.py). With quantised weights, steps of up to "
        f"{MOST_QUANTIZED_ROWS} tokens do, and with experts those of up to {MOST_EXPERT_ROWS}: of "
        "these, cuBLAS computes the two products before the experts in steps of more than "
        f"{most_rows(torch.bfloat16)} tokens. The rows *by Inductor* show the same step with the "
        "program that larger steps run. On an H200 the matrix kernels and cuBLAS take the same "
        "time for 64 rows, and cuBLAS is faster for 128. With `int4` the matrices of the layers "
        "have integers of 4 bits; embedding and head are not quantised.",
        "",
        f"### {records[first]['device']}",
        "",
        *_step_lines(records[first]),
        "",
        "Inductor compiles some kernels in several configurations (*choices*). A row may have "
        "several kernels: all of Inductor's of a model, or products that differ in the matrix. "
        "*Choices* and *spills* are sums over them. *Registers*, *shared KiB* and *threads* are "
        "the most that one of them takes, *occupancy* is the least.",
        "",
        *_kernel_lines(records[first]),
        "",
        *_wait_lines(records),
        _REASONS.rstrip(),
    ]
    if others:
        lines += [
            "",
            "### Predicted milliseconds of a step",
            "",
            "The table does not say whether weights and cache fit into the memory of a GPU.",
            "",
            *_device_lines(records),
        ]
    return "\n".join(lines) + "\n"


def _step_lines(record: dict[str, Any]) -> list[str]:
    lines = [
        "| model | step | launches | ours | Inductor | cuBLAS | torch | MB | of ideal | layer µs "
        "| outside | step ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, found in record["models"].items():
        for row in found["steps"]:
            cells = [
                model,
                row["step"] if row["is_taken"] else f"{row['step']}, by Inductor",
                row["launches"],
                *(row[str(by)] for by in (By.own, By.inductor, By.cublas, By.torch)),
                f"{row['num_bytes'] / 1e6:.1f}",
                f"{row['bytes_of_ideal']:.3f}",
                f"{row['layer_us']:.1f}",
                row["outside"],
                f"{row['step_ms']:.2f}",
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _kernel_lines(record: dict[str, Any]) -> list[str]:
    lines = [
        "| model | kernel | by | choices | registers | spills | shared KiB | threads | occupancy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, found in record["models"].items():
        for name, rows in _rows_of_kernels(found["kernels"]).items():
            cells = [
                model,
                name,
                rows[0]["by"],
                sum(row["choices"] for row in rows),
                max(row["registers"] for row in rows),
                sum(row["spill_bytes"] for row in rows),
                f"{max(row['shared_bytes'] for row in rows) / 1024:.1f}",
                max(row["threads"] for row in rows),
                f"{min(row['occupancy'] for row in rows):.0%}",
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _rows_of_kernels(kernels: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The kernels of a model that share a row of the table, by the text of its column *kernel*.

    All kernels of Inductor share one. So do kernels of one name and number of rows with the same
    resources, which differ in the matrix.
    """
    shared: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in kernels:
        if row["by"] == str(By.inductor):
            key: tuple[Any, ...] = (row["by"],)
        else:
            name = row["kernel"].partition(" rows, ")[0]
            key = (name, *(row[each] for each in _RESOURCES))
        shared.setdefault(key, []).append(row)
    found = {}
    for rows in shared.values():
        names = [row["kernel"] for row in rows]
        if rows[0]["by"] == str(By.inductor):
            text = f"{len(names)} kernels"
        else:
            rests = [name.partition(" rows, ")[2] for name in names[1:]]
            text = f"`{'`; `'.join([names[0], *rests])}`"
        found[text] = rows
    return found


def _wait_lines(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """Sentences about waits, copies of a cache, spills and the goals."""
    models = [found for record in records.values() for found in record["models"].values()]
    waits = sorted({wait for found in models for wait in found["waits"]})
    copies = any(row["copies_cache"] for found in models for row in found["steps"])
    return [
        "No program of a layer makes the host wait for the device."
        if not waits
        else f"Programs make the host wait for the device: {'; '.join(waits)}.",
        "No launch copies a cache." if not copies else "A launch copies a cache.",
        " ".join(_spills(records)),
        _goal_line(next(iter(records.values()))["models"]),
    ]


def _spills(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """A sentence for each kernel that spills on a device."""
    return [
        f"On {record['device']} `{row['kernel']}` of {model} spills {row['spill_bytes']} bytes."
        for record in records.values()
        for model, found in record["models"].items()
        for row in found["kernels"]
        if row["spill_bytes"]
    ] or ["No kernel spills registers."]


def _goal_line(models: Mapping[str, dict[str, Any]]) -> str:
    """Compares decode steps with the project's goals for them."""
    rows = [
        (f"{model}, {row['step']}", row["launches"], row["bytes_of_ideal"])
        for model, found in models.items()
        for row in found["steps"]
        if row["is_taken"] and row["step"].startswith("decode ")
    ]
    if not rows:
        return ""
    missed = [
        f"{name} has {launches} launches and moves {share:.3f} of the ideal bytes"
        for name, launches, share in rows
        if launches > _MOST_LAUNCHES or share > _MOST_BYTES
    ]
    return (
        f"The goals of a decode step are {_MOST_LAUNCHES} launches a layer and {_MOST_BYTES} of "
        f"the ideal bytes. {len(rows) - len(missed)} of {len(rows)} steps reach them. "
        + "; ".join(missed)
        + "." * bool(missed)
    ).rstrip()


def _device_lines(records: Mapping[str, dict[str, Any]]) -> list[str]:
    first = next(iter(records.values()))
    lines = [
        "| model | step | " + " | ".join(record["device"] for record in records.values()) + " |",
        "|---|---|" + "---|" * len(records),
    ]
    for model, found in first["models"].items():
        for index, row in enumerate(found["steps"]):
            if not row["is_taken"]:
                continue
            times = (
                f"{record['models'][model]['steps'][index]['step_ms']:.2f}"
                for record in records.values()
            )
            lines.append(f"| {model} | {row['step']} | " + " | ".join(times) + " |")
    return lines
