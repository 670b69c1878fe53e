"""Command R and R7B (Cohere): attention and MLP share a layer norm without bias; scaled logits.

In the second generation most layers have a window, and only these layers have RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import interleaved_queries_and_keys
from ostinato.models.config.block_spec import BlockSpec, NormKind, Residual
from ostinato.models.config.hf_fields import (
    HFConfig,
    read_integer,
    read_number,
    refuse_other_values,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import layer_types_every, listed_windows
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import DEFAULT_ROPE

__all__ = ("Cohere2ForCausalLM", "CohereForCausalLM")

_KEYS = DecoderKeys(
    norm_eps="layer_norm_eps", default_norm_eps=1e-5, is_tied=True, rope_theta=500_000.0
)
_SECOND_KEYS = replace(_KEYS, rope_theta=10_000.0)
_LAYOUT = CheckpointLayout(
    renamed=(("attention_norm.", "input_layernorm."), ("final_norm.", "norm.")),
    merged=(
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ),
    ignored=(r"rotary_emb\.inv_freq$",),
)


class CohereForCausalLM(Decoder):
    """A decoder with parallel residual and interleaved rotary pairs."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return _read(hf_config, generation_config, _KEYS)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        orders = interleaved_queries_and_keys(config)
        self.checkpoint_layout = replace(_LAYOUT, row_orders=orders)


class Cohere2ForCausalLM(CohereForCausalLM):
    """The second generation: layers without a window have no rotary embedding."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        pattern = read_integer(hf_config, "sliding_window_pattern", default=4)
        stated = {"sliding_window": 4096, **hf_config, **layer_types_every(hf_config, pattern)}
        config = _read(stated, generation_config, _SECOND_KEYS)
        windows = listed_windows(stated, config.num_layers)
        kinds = tuple(DEFAULT_ROPE if window else None for window in windows)
        return replace(config, sliding_windows=windows, rope_kinds=kinds)


def _read(
    hf_config: HFConfig, generation_config: HFConfig | None, keys: DecoderKeys
) -> ModelConfig:
    refuse_other_values(hf_config, {"use_qk_norm": False})
    config = read_decoder_config(hf_config, generation_config, keys)
    block = BlockSpec(
        norm=NormKind.layer_without_bias,
        residual=Residual.parallel_one_norm,
        qkv_bias=config.block.qkv_bias,
        out_bias=config.block.out_bias,
    )
    logit_scale = read_number(hf_config, "logit_scale", 0.0625, above=0)
    return replace(config, block=block, logit_scale=logit_scale)
