"""`run plan`: prints the memory plan of a configuration, without loading weights."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.conf.environment import expand_user
from ostinato.conf.schema import DeviceName, InstructionSetName, LoadFormat
from ostinato.models.sharding import shard_of_rank
from ostinato.runtime.machine_info import cpu_name, gpu_names
from ostinato.runtime.memory.memory_plan import MemoryPlan
from ostinato.runtime.ranks.rank_share import share_of_rank
from ostinato.runtime.replicas.placement import place_replicas
from ostinato.runtime.startup.bundles import planned_isa

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig
    from ostinato.runtime.startup.plan.engine_plan import EnginePlan
    from ostinato.runtime.startup.plan.model_source import ModelSource

__all__ = ("plan",)

_GIB = 1 << 30
_WIDTH = 80


def plan(config: RunConfig) -> int:
    """Print the memory of weights, activations, graphs and KV cache, and how many tokens fit.

    Raises:
        StartupError: the model does not exist, is not supported, or does not fit. Or the engine
            would refuse a setting at its start.
    """
    import torch

    from ostinato.runtime.startup.plan.engine_plan import finish_plan
    from ostinato.runtime.startup.plan.model_source import open_model
    from ostinato.runtime.startup.plan.planning import plan_engine

    # Only the model's configuration is needed, so no weights are downloaded.
    section = dataclasses.replace(config.model, load_format=LoadFormat.dummy)
    config = dataclasses.replace(config, model=section)
    elsewhere = config.plan.free_gib is not None and config.device.name is DeviceName.cuda
    parallel = config.parallel
    count, num_ranks = parallel.engines_per_node, parallel.num_ranks
    device = torch.device("cuda") if elsewhere else None
    shards = [shard_of_rank(rank, parallel.tensor, parallel.pipeline) for rank in range(num_ranks)]
    source = open_model(config, device, shard=shards[0])
    inputs = source.head_inputs
    others = [open_model(config, device, shard=each, head_inputs=inputs) for each in shards[1:]]
    sources = [source, *others]
    is_cpu = source.device.type == "cpu"
    free = None if config.plan.free_gib is None else int(config.plan.free_gib * _GIB)
    engine = config.engine
    if free is None:
        engine = place_replicas(engine, count)[0].config
    elif is_cpu:
        free //= count * parallel.ranks_per_machine
    of_rank = share_of_rank(engine, on_gpu=not is_cpu) if num_ranks > 1 and free is None else engine
    ranks = [plan_engine(of_rank, each, free_bytes=free) for each in sources]
    shares = list(map(min, zip(*(each.shares for each in ranks), strict=True)))
    ranks = [each.limited(*shares) for each in ranks]
    memory = ranks[0]
    of_rank = dataclasses.replace(of_rank, speculation=source.speculation)
    plans = [
        finish_plan(of_rank, each, planned, threads=1, is_here=not elsewhere)
        for each, planned in zip(sources, ranks, strict=True)
    ]
    tiers = _tiers(plans[0])
    if free is not None:
        where = f"{source.device.type} with {config.plan.free_gib:g} GiB free"
    else:
        where = cpu_name() if is_cpu else "; ".join(gpu_names())
    facts = {
        "model": config.model.name or config.model.path or "bundled demo model",
        "architecture": source.config.architecture,
        "dtype": str(source.dtype).removeprefix("torch."),
        "quantization": source.weights.quantization,
        "cache_dtype": str(source.cache_dtype).removeprefix("torch."),
        "device": where,
    }
    if count > 1:
        share = f"{num_ranks * memory.free_bytes / _GIB:.3f} GiB"
        if not is_cpu:
            share = "a GPU of its own" if num_ranks == 1 else f"{num_ranks} GPUs of its own"
        if is_cpu and engine.device.threads is not None:
            share += f" and {engine.device.threads} of the cores"
        facts["replicas"] = f"{count}, each with {share}; the table shows one"
    if num_ranks > 1:
        share = f"{memory.free_bytes / _GIB:.3f} GiB"
        share += f" and {of_rank.device.threads} of the cores" if free is None else ""
        facts["ranks"] = f"{num_ranks}, each with {share}; the table shows rank 0"
    if is_cpu and free is None:
        facts["isa"] = _level(config, source)
    if config.plan.json:
        by_rank = {"memory_by_rank": [_as_json(each) for each in ranks]} if num_ranks > 1 else {}
        values = facts | _as_json(memory) | {"tiers": tiers} | by_rank
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
    else:
        _print(facts, ranks, sources, tiers)
    return 0


def _tiers(plan: EnginePlan) -> dict[str, dict[str, int | str]]:
    """How much each slower tier of the KV cache holds, and where; empty = there is none."""
    cache = plan.config.cache
    tiers: dict[str, dict[str, int | str]] = {}
    if cache.host_gib:
        tiers["host"] = {"num_blocks": plan.num_host_places}
    if cache.disk_dir:
        directory = str(expand_user(cache.disk_dir).absolute())
        tiers["disk"] = {"num_blocks": plan.num_disk_places, "directory": directory}
    for tier in tiers.values():
        tier["num_tokens"] = int(tier["num_blocks"]) * cache.block_size
    return tiers


def _level(config: RunConfig, source: ModelSource) -> str:
    """The instruction set of the CPU kernels. If a timing chose it, the times too."""
    from ostinato.runtime.startup.isa_trial import describe_times, stored_trial

    trial = stored_trial(config, source)
    if trial is None or config.device.isa is not InstructionSetName.auto:
        return planned_isa(config.device)
    return describe_times(trial.isa, trial.microseconds)


def _as_json(memory: MemoryPlan) -> dict[str, object]:
    derived = {
        "num_tokens": memory.num_tokens,
        "num_full_sequences": round(memory.num_full_sequences, 2),
        "unplanned_bytes": memory.unplanned_bytes,
        "state_bytes": memory.state_bytes,
        "kv_bytes_per_token": memory.bytes_per_token,
        "kv_bytes_per_sequence": _sequence_bytes(memory),
        "groups": [group._asdict() for group in memory.groups],
    }
    return dataclasses.asdict(memory) | derived


def _sequence_bytes(memory: MemoryPlan) -> int:
    """Bytes of KV cache of a sequence of full length that decodes."""
    return memory.decoding_blocks(memory.max_model_len) * memory.bytes_per_block


def _peak_text(memory: MemoryPlan) -> str:
    """The memory of a sequence while its prompt is computed, if it is more than afterwards."""
    peak = memory.sequence_blocks(memory.max_model_len) * memory.bytes_per_block
    if peak == _sequence_bytes(memory):
        return ""
    return f", and up to {peak / _GIB:.3f} GiB while its prompt is computed"


def _print(
    facts: dict[str, str],
    ranks: list[MemoryPlan],
    sources: list[ModelSource],
    tiers: dict[str, dict[str, int | str]],
) -> None:
    console = Console(width=_WIDTH, highlight=False)
    memory = ranks[0]
    for name, fact in facts.items():
        console.print(f"{name:<13} {fact}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what it is")
    blocks = f"{memory.num_blocks} blocks, one is the null block"
    if len(memory.groups) == 1:
        blocks = blocks.replace(",", f" of {memory.block_size} tokens,")
    slots = f"{memory.num_states} slots, for recurrent layers"
    rows = [
        ("weights", memory.weights_bytes, "all parameters, in the form that the device holds"),
        ("activations", memory.activation_bytes, "estimated peak of the largest step"),
        ("graph pool", memory.graph_bytes, "captured CUDA graphs; none on a CPU"),
        *([("tier buffers", memory.tier_bytes, "for copies of KV blocks")] if tiers else []),
        ("KV cache", memory.kv_bytes, blocks),
        *([("states", memory.state_bytes, slots)] if memory.num_states else []),
        ("not planned", memory.unplanned_bytes, "left for other programs"),
    ]
    for name, size, meaning in rows:
        table.add_row(name, f"{size / _GIB:.3f}", f"{size / memory.free_bytes:.1%}", meaning)
    table.add_section()
    table.add_row("free now", f"{memory.free_bytes / _GIB:.3f}", "100.0%", "before loading")
    console.print(table)
    for rank, each in enumerate(ranks if len(ranks) > 1 else []):
        parts = (each.weights_bytes, each.activation_bytes, each.kv_bytes)
        weights, activations, cache = (f"{part / _GIB:.3f}" for part in parts)
        buffers = f", tier buffers {each.tier_bytes / _GIB:.3f}" if tiers else ""
        states = f", states {each.state_bytes / _GIB:.3f}" if each.num_states else ""
        total_bytes = sum(parts) + each.tier_bytes + each.state_bytes
        first, size, total = sources[rank].shard.layers(sources[rank].config.num_layers)
        layers = "" if size == total else f"; layers {first}-{first + size - 1}"
        console.print(
            f"{f'rank {rank}':<13} {total_bytes / _GIB:.3f} GiB: weights "
            f"{weights}, activations {activations}{buffers}, KV cache {cache}{states}{layers}",
            markup=False,
        )
    sequence_gib = _sequence_bytes(memory) / _GIB
    holds = {
        "one token": f"{memory.bytes_per_token / 1024:,.1f} KiB of KV cache",
        "one block": f"{memory.bytes_per_block / 1024:,.1f} KiB",
        **(
            {"one state": f"{memory.bytes_per_state / 1024:,.1f} KiB, of one sequence"}
            if memory.num_states
            else {}
        ),
        "one sequence": f"{sequence_gib:.3f} GiB, when it has {memory.max_model_len:,} tokens"
        + _peak_text(memory),
        "tokens": f"{memory.num_tokens:,} fit in the KV cache"
        + (f", in sequences of {memory.max_model_len:,}" if len(memory.groups) > 1 else ""),
        "sequences": f"{memory.num_full_sequences:,.1f} of {memory.max_model_len:,} tokens fit",
    }
    for name, fact in holds.items():
        console.print(f"{name:<13} {fact}", markup=False)
    for name, tier in tiers.items():
        text = f"{f'{name} tier':<13} {tier['num_blocks']:,} blocks, {tier['num_tokens']:,} tokens"
        if "directory" in tier:
            text += f", in {tier['directory']}"
        console.print(text, markup=False, soft_wrap=True)  # a long path stays whole
    console.print()
    for reason in memory.reasons:
        console.print(f"- {reason}", markup=False)
