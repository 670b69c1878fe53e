"""Writes adapters of Llama-like models in PEFT's format, with random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ("ALL_TARGETS", "write_random_adapter")

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_random_adapter(
    directory: Path,
    model: Mapping[str, Any],
    *,
    seed: int = 0,
    rank: int = 8,
    targets: tuple[str, ...] = ALL_TARGETS,
    size: float = 0.5,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an adapter; returns its directory.

    Args:
        directory: made if it is missing.
        model: the model's config.json.
        seed: of the random numbers.
        rank: of all matrices.
        targets: the modules that have an adapter.
        size: the deviation of the numbers in B.
        dtype: of the stored tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    heads = model["num_attention_heads"]
    head_dim = model.get("head_dim") or hidden // heads
    kv_size = model.get("num_key_value_heads", heads) * head_dim
    shapes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            if name.rpartition(".")[2] not in targets:
                continue
            stem = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, columns, generator=generator) / columns**0.5
            b = torch.randn(rows, rank, generator=generator) * size / rank**0.5
            tensors[f"{stem}.lora_A.weight"] = a.to(dtype)
            tensors[f"{stem}.lora_B.weight"] = b.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
