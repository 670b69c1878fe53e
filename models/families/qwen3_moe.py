"""Qwen3 with a mixture of experts (arXiv:2505.09388), such as Qwen3-30B-A3B."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.block_spec import QKNorm
from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import switched_windows
from ostinato.models.config_json.moe_fields import read_route, sparse_layers
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Qwen3MoeForCausalLM",)

_KEYS = DecoderKeys(windows=switched_windows)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Llama with normalised queries and keys, and with experts in most or all blocks."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        # All layers have the window, whatever these keys of Qwen3 say.
        stated = {**hf_config, "layer_types": None, "max_window_layers": 0}
        config = read_decoder_config(stated, generation_config, _KEYS)
        moe = MoESpec(
            route=read_route(hf_config, renormalize=read_flag(hf_config, "norm_topk_prob", False)),
            intermediate_size=read_integer(hf_config, "moe_intermediate_size"),
            layers=sparse_layers(hf_config, config.num_layers),
        )
        return replace(config, moe=moe, block=replace(config.block, qk_norm=QKNorm.head))
