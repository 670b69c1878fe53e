"""A model's hyperparameters under one set of names, read from a Hugging Face config.json.

What a config.json asks for is either honoured or refused by its key; nothing is ignored that would
change the model's output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.conf.schema import CacheDType, DType
from ostinato.models.base import KVCacheSpec
from ostinato.models.config.model_kind import DECODER, ModelKind
from ostinato.ops.activation import ACTIVATIONS
from ostinato.ops.attention import AttentionSpec
from ostinato.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

__all__ = (
    "HFConfig",
    "ModelConfig",
    "architecture_of",
    "read_activation",
    "read_integer",
    "read_rope",
    "read_sliding_windows",
    "resolve_cache_dtype",
    "resolve_dtype",
    "stated_dtype",
)

HFConfig = Mapping[str, Any]
"""A config.json as parsed."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Keys that would change the output if they were ignored, with the only value that is served.
_MUST_BE = {
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "is_encoder_decoder": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a model class needs to know to build itself; hashable."""

    architecture: str  # the checkpoint's class name: a key of models/registry.py
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens of context that the model states, rotary scaling included
    norm_eps: float
    activation: str  # a key of ops.activation.ACTIVATIONS
    tie_word_embeddings: bool
    attention_bias: bool  # as the config states it; architectures that always have one ignore it
    mlp_bias: bool
    rope: Rope | None  # None = learned absolute positions
    sliding_windows: tuple[int, ...]  # per layer; tokens a row sees, itself included; 0 = all
    dtype: torch.dtype  # the checkpoint's own
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    kind: ModelKind = DECODER
    num_segments: int = 0  # kinds of segments that an encoder tells apart; 0 = none
    num_labels: int = 0  # of a classification head; 0 = there is none

    @classmethod
    def from_hf(cls, hf_config: HFConfig, generation_config: HFConfig | None = None) -> ModelConfig:
        """Read a config.json.

        Args:
            hf_config: the parsed config.json.
            generation_config: the parsed generation_config.json; its end-of-sequence ids win.

        Raises:
            ValueError: a key is missing, or has a value that is not supported; the text names it.
        """
        _refuse_unsupported(hf_config)
        hidden_size = read_integer(hf_config, "hidden_size", "n_embd")
        num_layers = read_integer(hf_config, "num_hidden_layers", "n_layer")
        num_heads = read_integer(hf_config, "num_attention_heads", "n_head")
        num_kv_heads = read_integer(hf_config, "num_key_value_heads", default=num_heads)
        head_dim = read_integer(hf_config, "head_dim", default=_quotient(hidden_size, num_heads))
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={num_heads} is not a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        learned_positions = "n_positions" in hf_config
        max_positions = read_integer(hf_config, "max_position_embeddings", "n_positions")
        rope = None if learned_positions else read_rope(hf_config, head_dim, max_positions)
        return cls(
            architecture=architecture_of(hf_config),
            vocab_size=read_integer(hf_config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_integer(
                hf_config,
                "intermediate_size",
                "n_inner",
                default=4 * hidden_size if learned_positions else None,
            ),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=_stretched(rope, max_positions),
            norm_eps=_norm_eps(hf_config),
            activation=(
                read_activation(hf_config, "activation_function", "gelu_new")
                if learned_positions
                else read_activation(hf_config, "hidden_act", "silu")
            ),
            tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", learned_positions)),
            attention_bias=bool(hf_config.get("attention_bias", False)),
            mlp_bias=bool(hf_config.get("mlp_bias", False)),
            rope=rope,
            sliding_windows=read_sliding_windows(hf_config, num_layers),
            dtype=stated_dtype(hf_config),
            eos_token_ids=_token_ids(generation_config or {}, "eos_token_id")
            or _token_ids(hf_config, "eos_token_id"),
            bos_token_id=hf_config.get("bos_token_id"),
        )

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """The shape of this model's KV cache.

        Args:
            block_size: tokens per block.
            dtype: of keys and values.
        """
        return KVCacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads if self.kind.needs_kv_cache else 0,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def attention_spec(
        self,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cache_dtype: torch.dtype | None = None,
    ) -> AttentionSpec:
        """What this model asks of an attention backend (of its sliding layers, when some slide).

        Args:
            block_size: tokens per block.
            dtype: of queries, keys and values.
            device: where they are.
            cache_dtype: of the KV cache; None = `dtype`.
        """
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
            sliding_window=max(self.sliding_windows, default=0),
            cache_dtype=cache_dtype or dtype,
        )


def architecture_of(hf_config: HFConfig) -> str:
    """The class name under `architectures`.

    Raises:
        ValueError: there is none.
    """
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list | tuple) or not architectures:
        raise ValueError(
            f"config.json: architectures must name the model's class, got {architectures!r}; "
            'set it with model.config.architectures=["LlamaForCausalLM"] or the like'
        )
    return str(architectures[0])


def resolve_dtype(choice: DType, config: ModelConfig) -> torch.dtype:
    """The dtype of weights and activations: the chosen one, or for `auto` the checkpoint's own."""
    return config.dtype if choice is DType.auto else _DTYPES[choice.value]


def resolve_cache_dtype(choice: CacheDType, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values in the cache; `auto` is the activations'."""
    return dtype if choice is CacheDType.auto else torch.float8_e4m3fn


def read_rope(hf_config: HFConfig, head_dim: int, max_positions: int) -> Rope:
    """The rotary embedding, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: its type is unknown, or one of its parameters is missing.
    """
    parameters = _rope_parameters(hf_config)
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported; "
            f"supported are {', '.join(_ROPE_TYPES)}"
        )
    fraction = (
        parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor")) or 1.0
    )
    rotary_dim = int(head_dim * fraction)
    if kind == "default" and parameters.get("factor", 1) != 1:
        raise ValueError(f"config.json: rope factor={parameters['factor']!r} without a rope_type")
    if rotary_dim % 2:
        raise ValueError(f"config.json: the rotary part of a head must be even, got {rotary_dim}")

    def number(key: str, default: float | None = None) -> float:
        value = parameters.get(key)
        if value is None:
            value = default
        try:
            return float(value)  # pyright: ignore[reportArgumentType] - checked by trying
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"config.json: rope_type={kind!r} needs a number {key}, got {value!r}"
            ) from error

    original = hf_config.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings", max_positions
    )
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=number("factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position=int(original),
        )
    elif kind == "yarn":
        factor = number("factor", default=max_positions / original)
        scaling = YarnScaling(
            factor=factor,
            original_max_position=int(original),
            attention_factor=number(
                "attention_factor", default=_yarn_attention(parameters, factor)
            ),
            beta_fast=number("beta_fast", default=32.0),
            beta_slow=number("beta_slow", default=1.0),
            truncate=bool(parameters.get("truncate", True)),
        )
    return Rope(rotary_dim=rotary_dim, theta=number("rope_theta"), scaling=scaling)


def _rope_parameters(hf_config: HFConfig) -> dict[str, Any]:
    """Both forms as one; where both state a key, they must agree."""
    older = _typed(hf_config.get("rope_scaling"))
    if hf_config.get("rope_theta") is not None:
        older["rope_theta"] = hf_config["rope_theta"]
    newer = _typed(hf_config.get("rope_parameters"))
    for key in older.keys() & newer.keys():
        if older[key] != newer[key]:
            raise ValueError(
                f"config.json: rope_parameters has {key}={newer[key]!r}, but rope_scaling and "
                f"rope_theta say {older[key]!r}; set model.config.rope_parameters alone"
            )
    nested = [key for key, value in newer.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"config.json: rope_parameters by layer type ({nested}) is not supported")
    return {"rope_theta": 10_000.0, **older, **newer}


def _typed(parameters: HFConfig | None) -> dict[str, Any]:
    """Without nulls, and with its type under rope_type, which was called `type` first."""
    stated = {key: value for key, value in (parameters or {}).items() if value is not None}
    if stated:
        stated.setdefault("rope_type", stated.pop("type", "default"))
    return stated


def _yarn_attention(parameters: HFConfig, factor: float) -> float:
    """YaRN's factor on cosines and sines when the config does not state it (section 3.4)."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if one and all_dims:
        return magnitude(one) / magnitude(all_dims)
    return magnitude(1.0)


def read_sliding_windows(hf_config: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Tokens that each layer's rows see, themselves included; 0 = all.

    A window holds for every layer (Mistral), from layer `max_window_layers` on (Qwen), or where
    `layer_types` says so.

    Raises:
        ValueError: `layer_types` has another length or an unknown entry.
    """
    # Configs with max_window_layers (Qwen) state a window that is off unless they say otherwise.
    enabled = hf_config.get("use_sliding_window", "max_window_layers" not in hf_config)
    window = int(hf_config.get("sliding_window") or 0) if enabled else 0
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        first = int(hf_config.get("max_window_layers", 0))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    by_type = {"full_attention": 0, "sliding_attention": window}
    unknown = set(layer_types) - by_type.keys()
    if unknown:
        raise ValueError(
            f"config.json: layer_types has {sorted(unknown)}; supported are {', '.join(by_type)}"
        )
    if len(layer_types) != num_layers:
        raise ValueError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    return tuple(by_type[kind] for kind in layer_types)


def _stretched(rope: Rope | None, max_positions: int) -> int:
    """The context after rotary scaling; configs state it before scaling, except with llama3."""
    match rope:
        case Rope(scaling=LinearScaling(factor=factor)):
            return int(max_positions * factor)
        case Rope(scaling=YarnScaling() as yarn):
            return max(max_positions, int(yarn.original_max_position * yarn.factor))
    return max_positions


def _refuse_unsupported(hf_config: HFConfig) -> None:
    for key, only in _MUST_BE.items():
        if hf_config.get(key, only) != only:
            raise ValueError(f"config.json: {key}={hf_config[key]} is not supported, only {only}")


def _first(hf_config: HFConfig, *keys: str, default: Any = None) -> Any:
    """The first of `keys` that is present and not null."""
    for key in keys:
        if hf_config.get(key) is not None:
            return hf_config[key]
    return default


def _norm_eps(hf_config: HFConfig) -> float:
    if "n_positions" in hf_config:
        return float(_first(hf_config, "layer_norm_epsilon", default=1e-5))
    return float(_first(hf_config, "rms_norm_eps", default=1e-6))


def read_integer(hf_config: HFConfig, *keys: str, default: int | None = None) -> int:
    """The first of `keys` that is there.

    Raises:
        ValueError: there is none and no default, or it is not an integer of at least 1.
    """
    value = _first(hf_config, *keys, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {keys[0]} must be an integer of at least 1, got {value!r}")
    return value


def _quotient(hidden_size: int, num_heads: int) -> int | None:
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def read_activation(hf_config: HFConfig, key: str, default: str) -> str:
    """The activation function under `key`.

    Raises:
        ValueError: it is unknown.
    """
    name = hf_config.get(key, default)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {key}={name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return str(name)


def stated_dtype(hf_config: HFConfig) -> torch.dtype:
    """The dtype of the checkpoint's weights.

    Raises:
        ValueError: it is not one that is served.
    """
    stated = _first(hf_config, "dtype", "torch_dtype", default="float32")
    name = str(stated).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(
            f"config.json: dtype={name!r} is not supported; supported are {', '.join(_DTYPES)}; "
            "choose one with model.config.dtype"
        )
    return _DTYPES[name]


def _token_ids(config: HFConfig, key: str) -> tuple[int, ...]:
    """One id, several, or none."""
    value = config.get(key)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
