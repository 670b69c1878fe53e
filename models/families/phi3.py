"""Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905): Llama whose merged matrices are stored merged."""

from __future__ import annotations

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.decoder_config import read_decoder_config
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.decoder import LLAMA_NAMES
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Phi3ForCausalLM",)


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama; `qkv_proj` and `gate_up_proj` are loaded whole, and a part of each head may rotate."""

    checkpoint_layout = CheckpointLayout(renamed=LLAMA_NAMES, ignored=(r"rotary_emb\.inv_freq$",))

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config)
        if config.rope is None or config.rope.scaling is not None:
            # Early files say `yarn` and `su` and mean longrope.
            raise ValueError(
                "config.json: rope_scaling is not supported for Phi-3; use a checkpoint of the "
                "shorter context, or set model.config.rope_scaling=null"
            )
        return config
