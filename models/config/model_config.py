"""A model's hyperparameters, under one set of names for all families.

Families read them from a Hugging Face config.json (`LanguageModel.read_config`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.conf.schema import DType
from ostinato.conf.sections.cache_schema import CacheDType
from ostinato.models.config.audio_config import AudioEncoderConfig, SoundConfig
from ostinato.models.config.block_spec import LLAMA_BLOCK, BlockSpec
from ostinato.models.config.head_spec import HeadSpec, NextTokenSpec
from ostinato.models.config.hf_source import HFModelSource
from ostinato.models.config.latent_spec import LatentSpec
from ostinato.models.config.model_kind import DECODER, ModelKind
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config.recurrent_spec import RecurrentSpec
from ostinato.models.config.vision_config import VisionConfig
from ostinato.models.kv_cache import KVCacheSpec, RecurrentCache
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.models.sharding import WHOLE, Shard, Span, why_indivisible
from ostinato.models.step_tensors import DEFAULT_ROPE
from ostinato.ops.attention import AttentionSpec
from ostinato.ops.rope import Rope

__all__ = (
    "DTYPES",
    "ModelConfig",
    "QueryTemperature",
    "resolve_cache_dtype",
    "resolve_dtype",
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTemperature:
    """A factor of queries that grows with their position p.

    It is `log(1 + (p + offset) // floor) * scale + 1` (arXiv:2501.19399). In Llama 4, the layers
    that rotate nothing have it. In Ministral 3, all layers have it.
    """

    scale: float
    floor: float  # tokens
    offset: int = 1  # tokens
    in_all_layers: bool = False  # after the rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The hyperparameters that a model is built from; hashable."""

    architecture: str  # the name under `architectures` in config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    max_model_len: int  # tokens of context that the model states, rotary scaling included
    norm_eps: float
    activation: str  # a key of ops.activation.ACTIVATIONS
    tie_word_embeddings: bool
    rope: Rope | None  # None = ALiBi, learned absolute positions, or none at all
    sliding_windows: tuple[int, ...]  # per layer, as `paged_attention` takes them
    dtype: torch.dtype  # the checkpoint's own
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    kind: ModelKind = DECODER
    block: BlockSpec = LLAMA_BLOCK  # the parts of decoder blocks
    value_dim: int = 0  # of a head of values; 0 = head_dim
    latent: LatentSpec | None = None  # of a model with multi-head latent attention
    moe: MoESpec | None = None  # the experts of a mixture-of-experts model
    recurrent: RecurrentSpec | None = None  # what some layers have in place of attention
    # Per layer, if blocks have one part each (models/layers/block_parts.py): whether it is the MLP
    # or the experts. Empty = every block has two parts.
    mlp_layers: tuple[bool, ...] = ()
    has_positions: bool = True  # False = no positions at all (arXiv:2305.19466)
    position_offset: int = 0  # the learned position of a sequence's first token
    local_rope: Rope | None = None  # a second rotary embedding
    rope_kinds: tuple[str | None, ...] = ()  # per layer, see `rope_kind`
    attention_scale: float | None = None  # factor of attention logits; None = head_dim ** -0.5
    query_temperature: QueryTemperature | None = None
    attention_soft_cap: float = 0.0  # logits = cap * tanh(logits / cap); 0 = none
    alibi_slopes: tuple[float, ...] = ()  # per head (ops/alibi.py); empty = no ALiBi
    qkv_clip: float = 0.0  # the largest magnitude of queries, keys and values; 0 = any
    embedding_scale: float = 1.0
    # the scale is rounded to the dtype of hidden states before it is applied
    rounds_embedding_scale: bool = False
    has_embedding_norm: bool = False
    head_bias: bool = False  # the output head has a bias
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # applied after the scale; 0 = none
    num_segments: int = 0  # segment embeddings of an encoder; 0 = none
    num_labels: int = 0  # outputs of a classification head; 0 = there is none
    has_raw_scores: bool = False  # the scores of a classification head are its logits
    traced: HFModelSource | None = None  # set if the model runs through transformers
    # Set for a head that drafts for another model: EAGLE-3, or a next-token layer.
    head: HeadSpec | NextTokenSpec | None = None
    has_traced_experts: bool = False  # the model is traced and has experts
    vision: VisionConfig | None = None  # the tower of a model that takes images
    audio: AudioEncoderConfig | None = None  # the encoder that cross attention reads
    sound: SoundConfig | None = None  # what computes the embeddings of sounds
    # For each pair of rotated elements, the axis of its position: 0 = time, 1 = row, 2 = column
    # (M-RoPE, arXiv:2409.12191). Empty = a token has one position.
    rope_axes: tuple[int, ...] = ()

    @property
    def attention_windows(self) -> tuple[int, ...]:
        """The `sliding_windows` of the layers with attention."""
        return self._attention_windows(Span.of(self.num_layers))

    def _attention_windows(self, layers: Span) -> tuple[int, ...]:
        none = (False,) * self.num_layers
        recurrent = none if self.recurrent is None else self.recurrent.layers
        without = map(any, zip(recurrent, self.mlp_layers or none, strict=True))
        pairs = list(zip(self.sliding_windows, without, strict=True))
        stage = pairs[layers.start : layers.start + layers.size]
        return tuple(window for window, has_none in stage if not has_none)

    @property
    def state_operations(self) -> int:
        """Operations on the states of all recurrent layers by a token, beside those of weights."""
        if self.recurrent is None:
            return 0
        return sum(self.recurrent.layers) * self.recurrent.state_operations

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return self.moe is not None or self.has_traced_experts

    @property
    def _has_dense_mlp(self) -> bool:
        """Whether a layer has an MLP without experts."""
        everywhere, nowhere = (True,) * self.num_layers, (False,) * self.num_layers
        sparse = nowhere if self.moe is None else self.moe.layers
        pairs = zip(self.mlp_layers or everywhere, sparse, strict=True)
        return any(has_mlp and not has_experts for has_mlp, has_experts in pairs)

    @property
    def widest_mlp(self) -> int:
        """Values of one token between the matrices of the widest MLP.

        With experts, these are the values of all experts of the token, and a copy of its hidden
        state for each of them.
        """
        if self.moe is None:
            return self.intermediate_size
        values = 2 * self.moe.intermediate_size + self.hidden_size
        return max(self.intermediate_size, self.moe.route.top_k * values)

    def rope_kind(self, layer: int) -> str | None:
        """The rotary table of a layer: a key of `StepInputs.rope`; None = no rotation."""
        if self.rope is None:
            return None
        return self.rope_kinds[layer] if self.rope_kinds else DEFAULT_ROPE

    def qkv_size(self, shard: Shard = WHOLE) -> int:
        """Values of one token between the projections and the attention, on one rank.

        The gates of the result are included.
        """
        num_heads = shard.span(self.num_heads, "num_attention_heads").size
        num_kv_heads = shard.kv_heads(self.num_kv_heads).size
        value_dim = self.value_dim or self.head_dim
        num_queries = num_heads * (2 if self.block.has_output_gate else 1)
        return (num_queries + num_kv_heads) * self.head_dim + num_kv_heads * value_dim

    def why_unshardable(self, ranks: int) -> str | None:
        """Why `ranks` tensor-parallel ranks cannot compute the model together, in one line.

        None if they can. The line names the numbers of ranks that can be used.
        """
        if ranks == 1:
            return None
        for what, is_so in (
            ("models through transformers", self.traced is not None),
            ("encoders", not self.kind.generates),
        ):
            if is_so:
                return f"{what} are not divided among ranks; set parallel.tensor to 1"
        sizes = {"num_attention_heads": self.num_heads}
        if self._has_dense_mlp:
            sizes["intermediate_size"] = self.intermediate_size
        if self.moe is not None:
            sizes["intermediate size of an expert"] = self.moe.intermediate_size
            if self.moe.shared_size:
                sizes["intermediate size of the shared expert"] = self.moe.shared_size
        if self.recurrent is not None:
            sizes |= self.recurrent.divided
        return why_indivisible(ranks, self.num_kv_heads, sizes)

    def why_unstageable(self, stages: int) -> str | None:
        """Why `stages` stages cannot compute the model one after the other, in one line.

        None if they can.
        """
        if stages == 1:
            return None
        for what, is_so in (
            ("models through transformers", self.traced is not None),
            ("encoders", not self.kind.generates),
        ):
            if is_so:
                return f"{what} are not divided into stages; set parallel.pipeline to 1"
        if stages > self.num_layers:
            return f"the model has {self.num_layers} layers; set parallel.pipeline to at most that"
        return None

    def kv_cache_spec(
        self,
        block_size: int,
        dtype: torch.dtype,
        *,
        activation_dtype: torch.dtype | None = None,
        shard: Shard = WHOLE,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
    ) -> KVCacheSpec:
        """The shape of this model's KV cache.

        Args:
            block_size: tokens per block.
            dtype: the dtype of keys and values.
            activation_dtype: the dtype of the inputs that recurrent layers keep; None = `dtype`.
            shard: the rank whose heads and layers are cached.
            groups: those of the whole model, with the same windows.
        """
        layers = shard.layers(self.num_layers)
        num_kv_heads = shard.kv_heads(self.num_kv_heads).size if self.kind.needs_kv_cache else 0
        windows, recurrent = self._attention_windows(layers), None
        if self.recurrent is not None:
            shapes = self.recurrent.shapes(shard)
            recurrent = RecurrentCache(
                layers=self.recurrent.layers[layers.start : layers.start + layers.size],
                conv=shapes.conv,
                state=shapes.state,
                conv_dtype=activation_dtype or dtype,
            )
        return KVCacheSpec(
            num_layers=len(windows),
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            block_size=block_size,
            dtype=dtype,
            windows=windows,
            groups=groups,
            recurrent=recurrent,
            stateless=self.mlp_layers[layers.start : layers.start + layers.size],
        )

    def attention_spec(
        self,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cache_dtype: torch.dtype | None = None,
        shard: Shard = WHOLE,
    ) -> AttentionSpec:
        """The attention that this model needs, with the largest sliding window of its layers.

        Args:
            block_size: tokens per block.
            dtype: the dtype of queries, keys and values.
            device: where they are.
            cache_dtype: the dtype of the KV cache; None = `dtype`.
            shard: the rank whose heads are computed.
        """
        return AttentionSpec(
            num_heads=shard.span(self.num_heads, "num_attention_heads").size,
            num_kv_heads=shard.kv_heads(self.num_kv_heads).size,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
            sliding_window=max(self.attention_windows, key=abs, default=0),
            soft_cap=self.attention_soft_cap,
            has_alibi=bool(self.alibi_slopes),
            has_sinks=self.block.has_sinks,
            has_cross=self.audio is not None,
            sees_ahead=self.vision is not None and self.vision.sees_ahead,
            cache_dtype=cache_dtype or dtype,
        )


def resolve_dtype(choice: DType, config: ModelConfig) -> torch.dtype:
    """The dtype of weights and activations: the chosen one, or for `auto` the checkpoint's own."""
    return config.dtype if choice is DType.auto else DTYPES[choice.value]


_CACHE_DTYPES = {CacheDType.fp8_e4m3: torch.float8_e4m3fn, CacheDType.int8: torch.int8}


def resolve_cache_dtype(choice: CacheDType, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values in the cache; `auto` = `dtype`, that of activations."""
    return dtype if choice is CacheDType.auto else _CACHE_DTYPES[choice]
