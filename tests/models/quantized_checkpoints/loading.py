"""Loads a checkpoint as the engine does, on a CPU, without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from ostinato.conf.schema import HeadQuantization, ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard

CPU = torch.device("cpu")


def matrices(model: CausalLM) -> dict[str, LinearBase]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LinearBase)}


def load(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard: Shard = WHOLE,
    quantization_head: HeadQuantization = HeadQuantization.auto,
) -> tuple[CausalLM, ModelConfig]:
    section = ModelSection(path=str(directory), quantization_head=quantization_head)
    checkpoint = open_checkpoint(section)
    config = read_model_config(checkpoint)
    model = build_model(
        config,
        dtype=dtype,
        device=CPU,
        attention_backend="reference",
        weights=choose_weights(section, checkpoint, pack=True, device=CPU, dtype=dtype),
        shard=shard,
    )
    load_weights(model, checkpoint)
    assert isinstance(model, CausalLM)
    return model, config
