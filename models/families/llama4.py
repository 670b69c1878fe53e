"""Llama 4 without images (Meta 2025): experts with scaled inputs, some layers without RoPE."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import interleaved_queries_and_keys
from ostinato.models.config.block_spec import QKNorm
from ostinato.models.config.hf_fields import HFConfig, read_flag, read_integer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import read_chunked_windows
from ostinato.models.config_json.moe_fields import interleaved_layers, read_route
from ostinato.models.config_json.rope_fields import read_query_temperature, read_rope_kinds
from ostinato.models.decoder import LLAMA_NAMES, Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.ops.moe.routing import Scoring
from ostinato.ops.rope import LongRopeScaling, Rope, YarnScaling

__all__ = ("Llama4ForCausalLM",)

_KEYS = DecoderKeys(
    intermediate_size=("intermediate_size_mlp",), default_norm_eps=1e-5, rope_theta=500_000.0
)
_LAYOUT = CheckpointLayout(
    renamed=(
        *LLAMA_NAMES,
        ("mlp.gate.", "mlp.router."),
        ("experts.gate_up_proj.weight", "experts.gate_up_proj"),
        ("experts.down_proj.weight", "experts.down_proj"),
        ("mlp.", "feed_forward."),
    ),
    merged=(
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ),
    transposed=("experts.gate_up_proj", "experts.down_proj"),
    stacked=("experts.gate_up_proj", "experts.down_proj"),
    ignored=(r"rotary_emb\.inv_freq$",),
)


class Llama4ForCausalLM(Decoder):
    """Llama with a shared expert for all tokens, and routed experts: one for each token in known
    models. Some layers have no RoPE.
    """

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        rope_kinds = read_rope_kinds(hf_config, config.num_layers)
        expert_size = read_integer(hf_config, "intermediate_size")
        moe = MoESpec(
            route=read_route(hf_config, scoring=Scoring.sigmoid, renormalize=False),
            intermediate_size=expert_size,
            layers=interleaved_layers(hf_config, config.num_layers),
            scales_input=True,
            shared_size=expert_size,
        )
        has_norm = read_flag(hf_config, "use_qk_norm", True)
        return replace(
            config,
            sliding_windows=read_chunked_windows(hf_config, config.max_model_len, rope_kinds),
            rope_kinds=rope_kinds,
            query_temperature=read_query_temperature(hf_config),
            moe=moe,
            block=replace(config.block, qk_norm=QKNorm.unit if has_norm else QKNorm.none),
            rope=_without_factor(config.rope) if has_norm else config.rope,
        )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        orders = interleaved_queries_and_keys(config)
        self.checkpoint_layout = replace(_LAYOUT, row_orders=orders)


def _without_factor(rope: Rope | None) -> Rope | None:
    """The rotary embedding of heads with a norm.

    transformers normalises each head after its rotation, so a factor on cosines and sines has no
    effect. Here the norm is before the rotation, and the factor would be kept.
    """
    if rope is None or not isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        return rope
    return replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
