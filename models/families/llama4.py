"""Llama 4 without images (Meta 2025): experts with scaled inputs, some layers without RoPE."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import interleaved_rope
from ostinato.models.config.block_spec import QKNorm
from ostinato.models.config.decoder_config import DecoderKeys, read_decoder_config
from ostinato.models.config.hf_fields import read_integer
from ostinato.models.config.model_config import HFConfig, ModelConfig, QueryTemperature
from ostinato.models.config.moe_fields import read_route
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.decoder import LLAMA_NAMES, Decoder
from ostinato.models.linear_layers import BuildOptions
from ostinato.models.step_tensors import DEFAULT_ROPE
from ostinato.ops.moe.routing import Scoring

__all__ = ("Llama4ForCausalLM",)

_KEYS = DecoderKeys(intermediate_size=("intermediate_size_mlp",), default_norm_eps=1e-5)
_THETA = 500_000.0  # if the config states none
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
    """Llama with one expert for each token and a shared expert. Some layers do not rotate."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        parameters = hf_config.get("rope_parameters") or {}
        stated = hf_config.get("rope_theta", parameters.get("rope_theta"))
        default = {} if stated is not None else {"rope_theta": _THETA}
        config = read_decoder_config(
            {**hf_config, **default, "layer_types": None}, generation_config, _KEYS
        )
        interval = int(hf_config.get("no_rope_layer_interval", 4))
        rotates = hf_config.get("no_rope_layers") or [
            (layer + 1) % interval for layer in range(config.num_layers)
        ]
        if len(rotates) < config.num_layers:
            raise ValueError(
                f"config.json: no_rope_layers has {len(rotates)} entries for "
                f"{config.num_layers} layers"
            )
        rope_kinds = tuple(DEFAULT_ROPE if one else None for one in rotates[: config.num_layers])
        temperature = None
        if hf_config.get("attn_temperature_tuning", True):
            temperature = QueryTemperature(
                scale=float(hf_config.get("attn_scale", 0.1)),
                floor=float(hf_config.get("floor_scale", 8192)),
            )
        has_norm = bool(hf_config.get("use_qk_norm", True))
        return replace(
            config,
            sliding_windows=_windows(hf_config, config, rope_kinds),
            rope_kinds=rope_kinds,
            query_temperature=temperature,
            moe=_experts(hf_config, config.num_layers),
            block=replace(config.block, qk_norm=QKNorm.unit if has_norm else QKNorm.none),
        )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        orders = tuple(
            (name, interleaved_rope(count, config.head_dim, config.head_dim))
            for name, count in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads))
        )
        self.checkpoint_layout = replace(_LAYOUT, row_orders=orders)


def _windows(
    hf_config: HFConfig, config: ModelConfig, rope_kinds: tuple[str | None, ...]
) -> tuple[int, ...]:
    """The windows of the layers, as `paged_attention` takes them: -C for chunks of C tokens."""
    by_type = {"chunked_attention", "full_attention"}
    kinds = hf_config.get("layer_types") or [
        "chunked_attention" if kind else "full_attention" for kind in rope_kinds
    ]
    if set(kinds) - by_type or len(kinds) != config.num_layers:
        raise ValueError(
            f"config.json: layer_types must have {' or '.join(sorted(by_type))} for each of the "
            f"{config.num_layers} layers, got {kinds}"
        )
    chunk = 0
    if hf_config.get("attention_chunk_size", 8192) is not None:
        chunk = read_integer(hf_config, "attention_chunk_size", default=8192)
    if chunk >= config.max_model_len:
        chunk = 0
    return tuple(-chunk if kind == "chunked_attention" else 0 for kind in kinds)


def _experts(hf_config: HFConfig, num_layers: int) -> MoESpec:
    step = read_integer(hf_config, "interleave_moe_layer_step", default=1)
    layers = hf_config.get("moe_layers")
    if layers is None:
        layers = range(step - 1, num_layers, step)
    if any(not 0 <= layer < num_layers for layer in layers):
        raise ValueError(
            f"config.json: moe_layers={list(layers)} must name layers 0 to {num_layers - 1}"
        )
    size = read_integer(hf_config, "intermediate_size")
    return MoESpec(
        route=read_route(hf_config, scoring=Scoring.sigmoid, renormalize=False),
        intermediate_size=size,
        layers=tuple(layer in layers for layer in range(num_layers)),
        scales_input=True,
        shared_size=size,
    )
