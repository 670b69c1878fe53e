"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in place of each MLP."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import listed_windows
from ostinato.models.config_json.moe_fields import every_layer, read_route
from ostinato.models.decoder import LLAMA_NAMES, Decoder

__all__ = ("MixtralForCausalLM",)

_KEYS = DecoderKeys(default_norm_eps=1e-5, rope_theta=1_000_000.0, windows=listed_windows)


class MixtralForCausalLM(Decoder):
    """A token's experts are those with the largest router logits; their weights add up to 1."""

    checkpoint_layout = CheckpointLayout(
        renamed=(
            *LLAMA_NAMES,
            ("mlp.gate.", "block_sparse_moe.gate."),
            ("mlp.experts.", "block_sparse_moe.experts."),
            ("down_proj.", "w2."),
        ),
        merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("w1", "w3"))),
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        moe = MoESpec(
            route=read_route(hf_config),
            intermediate_size=config.intermediate_size,
            layers=every_layer(config.num_layers),
        )
        return replace(config, moe=moe)
