"""Granite 4 (IBM 2025): Granite with Mamba-2 in some, most or no layers, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig, read_first, read_integer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.hybrid_layers import recurrent_layers
from ostinato.models.config_json.moe_fields import every_layer, read_route
from ostinato.models.config_json.state_space_fields import read_state_space
from ostinato.models.decoder import LLAMA_NAMES, Decoder
from ostinato.models.families.bamba import MAMBA_NAMES
from ostinato.models.families.granite import with_multipliers
from ostinato.ops.moe.routing import Scoring

__all__ = ("GraniteMoeHybridForCausalLM",)

_MAMBA = "linear_attention"
_NEWER = {"mamba": _MAMBA, "attention": "full_attention"}  # older kind of a layer -> newer name


class GraniteMoeHybridForCausalLM(Decoder):
    """Every layer has an MLP for all tokens, in some models beside experts.

    A layer's experts are stored as two tensors. One has gate and up of all experts, the other has
    down of all experts. Gate and up of the MLP are one matrix too.
    """

    # GGUF files store all matrices by themselves.
    gguf_layout = CheckpointLayout(
        renamed=(*LLAMA_NAMES, *MAMBA_NAMES, ("mlp.shared_expert.", "mlp.")),
        merged=(
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ),
    )
    checkpoint_layout = CheckpointLayout(
        renamed=(
            *LLAMA_NAMES,
            *MAMBA_NAMES,
            ("mlp.gate.", "block_sparse_moe.router.layer."),
            ("mlp.experts.gate_up_proj.", "block_sparse_moe.input_linear."),
            ("mlp.experts.down_proj.", "block_sparse_moe.output_linear."),
            ("mlp.shared_expert.", "mlp."),
            ("mlp.gate_up_proj.", "shared_mlp.input_linear."),
            ("mlp.down_proj.", "shared_mlp.output_linear."),
        ),
        merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
        stacked=("experts.gate_up_proj", "experts.down_proj"),
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        positions = hf_config.get("position_embedding_type")
        if positions not in (None, "nope", "rope"):
            raise ValueError(
                "config.json: position_embedding_type must be 'rope', 'nope' or null, got "
                f"{positions!r}"
            )
        has_rope = positions == "rope"
        config = read_decoder_config(hf_config, generation_config, DecoderKeys(has_rope=has_rope))
        all_recurrent = [_MAMBA] * config.num_layers
        kinds = read_first(hf_config, "layer_types", "layers_block_type", default=all_recurrent)
        if isinstance(kinds, list):
            kinds = [_NEWER.get(str(kind), kind) for kind in kinds]
        layers = recurrent_layers(kinds, _MAMBA, config.num_layers)
        recurrent = read_state_space(hf_config, layers, config.norm_eps)
        shared_size = read_integer(hf_config, "shared_intermediate_size", default=1024)
        moe = None
        if read_integer(hf_config, "num_local_experts", default=8, at_least=0):
            moe = MoESpec(
                route=read_route(hf_config, scoring=Scoring.top_softmax, renormalize=False),
                intermediate_size=config.intermediate_size,
                layers=every_layer(config.num_layers),
                shared_size=shared_size,
            )
        config = replace(
            config,
            intermediate_size=shared_size,
            has_positions=has_rope,
            recurrent=recurrent,
            moe=moe,
        )
        return with_multipliers(config, hf_config)
