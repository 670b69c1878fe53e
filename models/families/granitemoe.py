"""Granite 3 with a mixture of experts (IBM 2024), such as granite-3.1-3b-a800m."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import read_decoder_config
from ostinato.models.config_json.moe_fields import every_layer, read_route
from ostinato.models.decoder import LLAMA_NAMES, Decoder
from ostinato.models.families.granite import with_multipliers
from ostinato.ops.moe.routing import Scoring

__all__ = ("GraniteMoeForCausalLM",)


class GraniteMoeForCausalLM(Decoder):
    """Granite with experts. A layer's experts are stored as two tensors.

    One has gate and up of all experts, the other has down of all experts.
    """

    # GGUF files store all matrices by themselves.
    gguf_layout = CheckpointLayout(
        renamed=LLAMA_NAMES,
        merged=(
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ),
    )
    checkpoint_layout = CheckpointLayout(
        renamed=(
            *LLAMA_NAMES,
            ("mlp.gate.", "block_sparse_moe.router.layer."),
            ("mlp.experts.gate_up_proj.", "block_sparse_moe.input_linear."),
            ("mlp.experts.down_proj.", "block_sparse_moe.output_linear."),
        ),
        merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
        stacked=("gate_up_proj", "down_proj"),
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = with_multipliers(read_decoder_config(hf_config, generation_config), hf_config)
        moe = MoESpec(
            route=read_route(hf_config, scoring=Scoring.top_softmax, renormalize=False),
            intermediate_size=config.intermediate_size,
            layers=every_layer(config.num_layers),
        )
        return replace(config, moe=moe)
