"""Makes low-rank adapters of the bundled model with PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM

__all__ = ("make_adapter",)

_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, seed: int, rank: int = 8, **settings: object) -> Path:
    """Write an adapter with random values, which are as large as the model's own.

    Args:
        directory: gets the files.
        seed: of the random values.
        rank: the rank of every module's adapter.
        settings: keys of adapter_config.json to change afterwards.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(_MODEL, dtype=torch.float32)
    config = peft.LoraConfig(
        r=rank, lora_alpha=4 * rank, target_modules=list(_MODULES), init_lora_weights=False
    )
    peft.get_peft_model(model, config).save_pretrained(str(directory))
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return directory
