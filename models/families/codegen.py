"""CodeGen (arXiv:2203.13474): GPT-J with queries, values and keys in one matrix of four parts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ostinato.models.checkpoints.row_orders import interleaved_rope
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.families.gptj import GPTJForCausalLM
from ostinato.models.layers.linear_layers import BuildOptions

__all__ = ("CodeGenForCausalLM",)

_PARTS = 4  # one for each device of its training; each part has whole heads


class CodeGenForCausalLM(GPTJForCausalLM):
    """GPT-J with one stored matrix for queries, values and keys."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = super().read_config(hf_config, generation_config)
        if config.num_heads % _PARTS:
            raise ValueError(
                f"config.json: n_head must be a multiple of {_PARTS}, got {config.num_heads}"
            )
        return config

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        assert config.rope is not None, "read_config gives one"
        order = _qkv_order(config.num_heads, config.head_dim, config.rope.rotary_dim)
        self.checkpoint_layout = replace(
            self.checkpoint_layout, merged=(), row_orders=(("qkv_proj", order),)
        )


def _qkv_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """The rows of queries, keys and values, which are stored as [parts, (queries, values, keys)].

    See models/checkpoints/row_orders.py.
    """
    rows = torch.arange(3 * num_heads * head_dim).view(_PARTS, 3, -1)
    queries, values, keys = (rows[:, side].reshape(-1) for side in range(3))
    rotated = interleaved_rope(num_heads, head_dim, rotary_dim)
    return torch.cat([queries[rotated], keys[rotated], values])
