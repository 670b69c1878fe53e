"""Builds FlashInfer's attention kernels for capability 9.0 and lists their resources; needs no GPU.

The modules are those that the flashinfer backend plans for a model in bfloat16 without windows and
soft caps: decode, and prefill by `fa2` and by `fa3`. FlashInfer takes `fa3` on Hopper. The program
needs FlashInfer, ninja and a CUDA toolkit with its stub of libcuda:

    export FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_EXTRA_LDFLAGS=-L$CUDA_HOME/lib64/stubs
    python -m ostinato.benchmarks.gpu.without_device.flashinfer_kernels --output FILE decode fa2

`fa3` takes eight minutes of one core, `fa2` two, `decode` half a minute.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton

from ostinato.benchmarks.machine.described_device import described_device
from ostinato.benchmarks.report.json_file import write_json
from ostinato.runtime.machine_info import package_versions

__all__ = ("main",)

_FUNCTION = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)")


def main(arguments: list[str]) -> int:
    """Build the named modules, print a line for each, and write the file."""
    parser = argparse.ArgumentParser(prog="flashinfer_kernels")
    parser.add_argument("modules", nargs="+", choices=["decode", "fa2", "fa3"])
    parser.add_argument("--head-dim", type=int, default=128, choices=[64, 128, 256])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    builders = _builders(options.head_dim)
    rows = [{"module": name, **_row(builders[name])} for name in options.modules]
    versions = package_versions() | {"flashinfer": import_module("flashinfer").__version__}
    record = {
        "device": described_device("h200").name,
        "head_dim": options.head_dim,
        "versions": versions,
        "modules": rows,
    }
    write_json(record, options.output)
    for row in rows:
        print(row)
    return 0


def _builders(head_dim: int) -> Mapping[str, Callable[[], Any]]:
    modules = import_module("flashinfer.jit.attention.modules")
    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16)
    # Neither a positional encoding, nor a window, nor a cap of logits.
    shape = (head_dim, head_dim, 0, False, False)

    def prefill(backend: str) -> Callable[[], Any]:
        return lambda: modules.gen_batch_prefill_module(backend, *types, torch.int32, *shape, False)

    return {
        "decode": lambda: modules.gen_batch_decode_module(*types, torch.int32, *shape),
        "fa2": prefill("fa2"),
        "fa3": prefill("fa3"),
    }


def _row(builder: Callable[[], Any]) -> dict[str, Any]:
    module = builder()
    module.build()
    library = Path(module.jit_library_path)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, "-res-usage", library], capture_output=True, text=True, check=True)
    found = [(int(registers), int(stack)) for _, registers, stack in _FUNCTION.findall(done.stdout)]
    return {
        "name": module.name,
        "library_bytes": library.stat().st_size,
        "kernels": len(found),
        "most_registers": max(registers for registers, _ in found),
        "with_stack": sum(stack > 0 for _, stack in found),
        "most_stack_bytes": max(stack for _, stack in found),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
