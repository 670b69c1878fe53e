"""The decoder that all causal models share: embedding, blocks, final norm, output head.

A family is a `CheckpointLayout` and the reading of its config.json; what its blocks differ in is
data (`BlockSpec`).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.config.block_spec import Residual
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers import Attention, RotaryEmbedding, build_mlp, build_norm
from ostinato.models.linear_layers import BuildOptions, Embedding, OutputHead
from ostinato.models.step_tensors import DEFAULT_ROPE, ForwardBatch, StepInputs

__all__ = ("Decoder", "DecoderBlock")


class DecoderBlock(DecoderLayer):
    """Attention and an MLP around the residual stream, joined as `BlockSpec.residual` says."""

    def __init__(self, config: ModelConfig, options: BuildOptions, sliding_window: int) -> None:
        super().__init__()
        self.residual = config.block.residual
        self.input_layernorm = build_norm(config, options)
        self.self_attn = Attention(config, options, sliding_window=sliding_window)
        if self.residual is not Residual.parallel_one_norm:
            self.post_attention_layernorm = build_norm(config, options)
        self.mlp = build_mlp(config, options)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        normal = self.input_layernorm(hidden)
        attended = self.self_attn(normal, step, k_cache, v_cache, hidden, rows)
        if self.residual is Residual.sequential:
            return self.mlp(self.post_attention_layernorm(attended), attended)
        if self.residual is Residual.parallel_one_norm:
            return self.mlp(normal if rows is None else F.embedding(rows, normal), attended)
        hidden = hidden if rows is None else F.embedding(rows, hidden)
        return self.mlp(self.post_attention_layernorm(hidden), attended)

    def static_key(self) -> tuple[object, ...]:
        return (
            "decoder block",
            self.residual,
            self.input_layernorm.static_key,
            *self.self_attn.static_key(),
            *self.mlp.static_key(),
        )


class Decoder(CausalLM):
    """Token embedding, learned positions where nothing is rotated, blocks, final norm, head."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        size, tied = config.hidden_size, config.tie_word_embeddings
        self.embed_tokens = Embedding(config.vocab_size, size, options, is_head=tied)
        if config.rope is None:
            self.rotary = None
            self.embed_positions = Embedding(config.max_model_len, size, options)
        else:
            self.rotary = RotaryEmbedding(config.rope, options)
        self.layers = nn.ModuleList(
            DecoderBlock(config, options, window) for window in config.sliding_windows
        )
        self.final_norm = build_norm(config, options)
        self.lm_head = (
            None if tied else OutputHead(size, config.vocab_size, options, bias=config.head_bias)
        )

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        hidden = self.embed_tokens(batch.token_ids)
        if self.rotary is None:
            return hidden + self.embed_positions(batch.positions), StepInputs({}, batch)
        return hidden, StepInputs({DEFAULT_ROPE: self.rotary(batch.positions)}, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        return self.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden)
