"""OLMoE (arXiv:2409.02060): experts in every block; norms over all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.block_spec import QKNorm
from ostinato.models.config.hf_fields import HFConfig, read_flag, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.moe_fields import every_layer, read_route
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("OlmoeForCausalLM",)

_KEYS = DecoderKeys(default_norm_eps=1e-5)


class OlmoeForCausalLM(LlamaForCausalLM):
    """Llama with a norm over all heads, and with experts."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, {"clip_qkv": None})
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        moe = MoESpec(
            route=read_route(hf_config, renormalize=read_flag(hf_config, "norm_topk_prob", False)),
            intermediate_size=config.intermediate_size,
            layers=every_layer(config.num_layers),
        )
        return replace(config, moe=moe, block=replace(config.block, qk_norm=QKNorm.full))
