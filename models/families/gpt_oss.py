"""gpt-oss (arXiv:2508.10925): attention sinks, windows in every other block, clamped gates."""

from __future__ import annotations

from dataclasses import replace

import torch

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig, read_flag, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import layer_types_every, listed_windows
from ostinato.models.config_json.moe_fields import every_layer, read_route
from ostinato.models.decoder import LLAMA_NAMES, Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.ops.moe.routing import Scoring

__all__ = ("GptOssForCausalLM",)

_KEYS = DecoderKeys(default_norm_eps=1e-5, rope_theta=150_000.0, windows=listed_windows)
# The rotary embedding of a config.json that states none.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MUST_BE = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_LAYOUT = CheckpointLayout(
    renamed=(
        *LLAMA_NAMES,
        ("mlp.gate.", "mlp.router."),
        *(
            (f"{name}.{kind}", f"{name}_{kind}")
            for name in ("gate_up_proj", "down_proj")
            for kind in ("blocks", "scales")
        ),
        ("gate_up_proj.weight", "gate_up_proj"),
        ("gate_up_proj.bias", "gate_up_proj_bias"),
        ("down_proj.weight", "down_proj"),
        ("down_proj.bias", "down_proj_bias"),
    ),
    merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
    transposed=("gate_up_proj", "down_proj"),
    stacked=("gate_up_proj", "down_proj"),
    ignored=(r"rotary_emb\.inv_freq$",),
)


class GptOssForCausalLM(Decoder):
    """A decoder with biases in attention, router and experts.

    In a stored matrix of an expert, gate rows and up rows alternate.
    """

    # GGUF files store the gate rows before the up rows, as in other families.
    gguf_layout = CheckpointLayout(
        renamed=(*LLAMA_NAMES, ("mlp.gate.", "mlp.router.")),
        merged=(*_LAYOUT.merged, ("gate_up_proj", ("gate_proj", "up_proj"))),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        stated = {"sliding_window": 128, **hf_config, **layer_types_every(hf_config, 2)}
        if not (stated.get("rope_scaling") or stated.get("rope_parameters")):
            stated["rope_scaling"] = _YARN
        config = read_decoder_config(stated, generation_config, _KEYS)
        has_bias = read_flag(hf_config, "attention_bias", True)
        moe = MoESpec(
            route=read_route(hf_config, scoring=Scoring.top_softmax, renormalize=False),
            intermediate_size=config.intermediate_size,
            layers=every_layer(config.num_layers),
            has_bias=True,
        )
        block = replace(config.block, has_sinks=True, qkv_bias=has_bias, out_bias=has_bias)
        return replace(config, activation="swigluoai", moe=moe, block=block)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        in_turns = torch.arange(2 * config.intermediate_size).view(-1, 2).t().reshape(-1)
        self.checkpoint_layout = replace(_LAYOUT, row_orders=(("gate_up_proj", in_turns),))
