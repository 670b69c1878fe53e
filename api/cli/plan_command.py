"""`run plan`: the memory ledger of a configuration, before anything is loaded or downloaded."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.conf.schema import DeviceName, LoadFormat
from ostinato.runtime.memory.memory_plan import MemoryPlan
from ostinato.runtime.startup.bundles import planned_isa
from ostinato.runtime.startup.machine_info import cpu_name, gpu_names

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig

__all__ = ("plan",)

_GIB = 1 << 30
_WIDTH = 80


def plan(config: RunConfig) -> int:
    """Print who would get how much memory, and how many tokens and sequences that holds.

    Raises:
        StartupError: the model is not there or not supported, or it does not fit.
    """
    import torch

    from ostinato.runtime.startup.planning import open_model, plan_engine

    # Nothing but the model's configuration is needed, so no weights are downloaded for this.
    section = dataclasses.replace(config.model, load_format=LoadFormat.dummy)
    config = dataclasses.replace(config, model=section)
    elsewhere = config.plan.free_gib is not None and config.device.name is DeviceName.cuda
    source = open_model(config, torch.device("cuda") if elsewhere else None)
    free = None if config.plan.free_gib is None else int(config.plan.free_gib * _GIB)
    ledger = plan_engine(config, source, free_bytes=free)
    if free is not None:
        device = f"{source.device.type} with {config.plan.free_gib:g} GiB free"
    else:
        device = cpu_name() if source.device.type == "cpu" else "; ".join(gpu_names())
    facts = {
        "model": config.model.name or config.model.path or "bundled demo model",
        "architecture": source.config.architecture,
        "dtype": str(source.dtype).removeprefix("torch."),
        "quantization": source.weights.quantization,
        "cache_dtype": str(source.cache_dtype).removeprefix("torch."),
        "device": device,
    }
    if source.device.type == "cpu" and free is None:
        facts["isa"] = planned_isa(config.device)
    if config.plan.json:
        sys.stdout.write(json.dumps(facts | _as_json(ledger), indent=2) + "\n")
    else:
        _print(facts, ledger)
    return 0


def _as_json(ledger: MemoryPlan) -> dict[str, object]:
    derived = {
        "num_tokens": ledger.num_tokens,
        "num_full_sequences": round(ledger.num_full_sequences, 2),
        "unplanned_bytes": ledger.unplanned_bytes,
        "kv_bytes_per_token": ledger.bytes_per_block // ledger.block_size,
    }
    return dataclasses.asdict(ledger) | derived


def _print(facts: dict[str, str], ledger: MemoryPlan) -> None:
    console = Console(width=_WIDTH, highlight=False)
    for name, fact in facts.items():
        console.print(f"{name:<13} {fact}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what it is")
    blocks = f"{ledger.num_blocks} blocks of {ledger.block_size} tokens, one is the null block"
    rows = [
        ("weights", ledger.weights_bytes, "all parameters, as they lie on the device"),
        ("activations", ledger.activation_bytes, "estimated peak of the largest step"),
        ("graph pool", ledger.graph_bytes, "captured CUDA graphs; none on a CPU"),
        ("KV cache", ledger.kv_bytes, blocks),
        ("left alone", ledger.unplanned_bytes, "not planned with"),
    ]
    for name, size, meaning in rows:
        table.add_row(name, f"{size / _GIB:.3f}", f"{size / ledger.free_bytes:.1%}", meaning)
    table.add_section()
    table.add_row("free now", f"{ledger.free_bytes / _GIB:.3f}", "100.0%", "before loading")
    console.print(table)
    per_token = ledger.bytes_per_block // ledger.block_size
    holds = {
        "one token": f"{per_token / 1024:,.1f} KiB of KV cache",
        "one block": f"{ledger.bytes_per_block / 1024:,.1f} KiB",
        "tokens": f"{ledger.num_tokens:,} fit in the KV cache",
        "sequences": f"{ledger.num_full_sequences:,.1f} of {ledger.max_model_len:,} tokens fit",
    }
    for name, fact in holds.items():
        console.print(f"{name:<13} {fact}", markup=False)
    console.print()
    for reason in ledger.reasons:
        console.print(f"- {reason}", markup=False)
