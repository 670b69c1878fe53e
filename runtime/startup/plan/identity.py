"""What the bits of an engine's results depend on besides the request.

`compute_identity` is part of the fingerprint that answers name. `block_identity` names the
directory of KV blocks on disk: blocks of another identity are never loaded, because they would give
wrong text.
"""

from __future__ import annotations

from pathlib import Path

import torch

import ostinato
from ostinato.conf.schema import LoadFormat
from ostinato.ops.native.build import content_key
from ostinato.ops.native.library import loaded_isa
from ostinato.runtime.startup.bundles import kernel_libraries
from ostinato.runtime.startup.plan.engine_plan import EnginePlan

__all__ = ("block_identity", "compute_identity", "identifying_files", "isa_of")


def isa_of(plan: EnginePlan) -> str:
    """The instruction set of the CPU kernels; empty = none are used."""
    return (loaded_isa() or "") if plan.is_cpu else ""


def compute_identity(plan: EnginePlan) -> dict[str, str]:
    """What logits, keys and values depend on besides the tokens and the weight files.

    For dummy weights, it also says which weights. The number of threads and the limits of steps do
    not count.
    """
    source, model, isa = plan.source, plan.config.model, isa_of(plan)
    identity = {
        "ostinato": ostinato.__version__,
        "torch": torch.__version__,
        "model": repr(source.config),
        "dtype": str(source.dtype),
        "cache dtype": str(source.cache_dtype),
        "weight methods": repr(source.weights),
        "attention": plan.backend,
        "experts": str(plan.experts),
        "images": repr(source.images),
        "audio": repr(source.audio),
        "sounds": repr(source.sounds),
    }
    if model.load_format is LoadFormat.dummy:
        identity["weights"] = f"dummy {model.seed}"
    if isa:
        libraries = kernel_libraries(plan.config)
        identity["kernels"] = " ".join(content_key(library, isa) for library in libraries)
    elif not plan.is_cpu:
        identity["device"] = torch.cuda.get_device_name(source.device)
    return identity


def block_identity(plan: EnginePlan) -> dict[str, str]:
    """What the contents of a KV block depend on besides its hash and the weight files."""
    shard, graphs = plan.source.shard, plan.config.graphs
    block_bytes, block_size = plan.kv_cache_spec.bytes_per_block, plan.config.cache.block_size
    identity = {
        **compute_identity(plan),
        "block": f"{block_bytes} bytes, {block_size} tokens",
        "groups": repr(plan.source.kv_groups),
        "graphs": f"{graphs.mode} {graphs.form}",
        "ranks": f"{shard.num_ranks} in {shard.stage.count} stages",
    }
    if "LongRopeScaling" in identity["model"]:  # the length of the context chooses its factors
        identity["context"] = str(plan.memory.max_model_len)
    return identity


def identifying_files(plan: EnginePlan) -> list[Path]:
    """The weight files that belong to `block_identity`; empty if it says which weights."""
    is_dummy = plan.config.model.load_format is LoadFormat.dummy
    return [] if is_dummy else plan.source.checkpoint.weight_files()
