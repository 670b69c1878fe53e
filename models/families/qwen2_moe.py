"""Qwen2 and Qwen1.5 with a mixture of experts (arXiv:2407.10671), such as Qwen1.5-MoE-A2.7B."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.block_spec import BlockSpec
from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import layer_types_where, switched_windows
from ostinato.models.config_json.moe_fields import read_route, sparse_layers
from ostinato.models.decoder import LLAMA_NAMES
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Qwen2MoeForCausalLM",)

_KEYS = DecoderKeys(windows=switched_windows)


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """Llama with biased query, key and value, experts, and a shared expert for all tokens."""

    checkpoint_layout = CheckpointLayout(
        renamed=(
            *LLAMA_NAMES,
            ("gated_expert.0.", "shared_expert."),
            ("shared_gate.", "shared_expert_gate."),
        ),
        merged=LlamaForCausalLM.checkpoint_layout.merged,
        ignored=LlamaForCausalLM.checkpoint_layout.ignored,
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        first = read_integer(hf_config, "max_window_layers", default=28, at_least=0)
        kinds = layer_types_where(hf_config, lambda layer: layer % 2 == 0 and layer < first)
        config = read_decoder_config({**hf_config, **kinds}, generation_config, _KEYS)
        moe = MoESpec(
            route=read_route(hf_config, renormalize=read_flag(hf_config, "norm_topk_prob", False)),
            intermediate_size=read_integer(hf_config, "moe_intermediate_size"),
            layers=sparse_layers(hf_config, config.num_layers),
            shared_size=read_integer(hf_config, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
        has_bias = read_flag(hf_config, "qkv_bias", True)
        return replace(config, moe=moe, block=BlockSpec(qkv_bias=has_bias))
