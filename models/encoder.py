"""The encoder that models like BERT share: embeddings with segments, post-norm layers.

A family has a `CheckpointLayout`, reads its config.json and adds its heads. A token sees its whole
sequence, so a step has whole sequences, and no layer reads or writes a KV cache.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.base import DecoderLayer, EncoderModel
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.layers.norm_layers import LayerNorm
from ostinato.models.layers.vocabulary_layers import Embedding
from ostinato.models.step_tensors import ForwardBatch, StepInputs
from ostinato.ops.activation import activate
from ostinato.ops.encoder_attention import encoder_attention

__all__ = ("Encoder", "EncoderAttention", "EncoderLayer")


class EncoderAttention(nn.Module):
    """Self-attention in both directions."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        size = config.num_heads * config.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, (size, size, size), options, bias=True)
        self.o_proj = Linear(size, config.hidden_size, options, bias=True)

    def forward(self, x: Tensor, step: StepInputs, rows: Tensor | None) -> Tensor:
        """Attention plus its input: [T, D] -> [T, D]; with `rows` only these rows, [R, D]."""
        # A layer with only views, row selections and ops of this package runs without Inductor
        # (graphs/compiler/fx_program.py).
        count = self.num_heads
        heads = self.qkv_proj(x).view(-1, 3 * count, self.head_dim)
        q, k, v = heads.split_with_sizes((count, count, count), 1)
        out = encoder_attention(q, k, v, step.tensors.query_start_loc, scale=self.head_dim**-0.5)
        out = out.reshape(-1, count * self.head_dim)
        if rows is not None:
            out, x = F.embedding(rows, out), F.embedding(rows, x)
        return self.o_proj(out, x)


class EncoderLayer(DecoderLayer):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.attention = EncoderAttention(config, options)
        self.attention_norm = LayerNorm(hidden_size, config.norm_eps, options)
        self.up_proj = Linear(hidden_size, intermediate_size, options, bias=True)
        self.down_proj = Linear(intermediate_size, hidden_size, options, bias=True)
        self.output_norm = LayerNorm(hidden_size, config.norm_eps, options)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        hidden = self.attention_norm(self.attention(hidden, step, rows))
        inner = activate(self.up_proj(hidden), self.activation)
        return self.output_norm(self.down_proj(inner, hidden))

    def static_key(self) -> tuple[object, ...]:
        linears = (self.attention.qkv_proj, self.attention.o_proj, self.up_proj, self.down_proj)
        return (
            "encoder layer",
            self.activation,
            self.output_norm.eps,
            self.attention.num_heads,
            self.attention.head_dim,
            *(linear.static_key for linear in linears),
        )


class Encoder(EncoderModel):
    """Token, position and segment embeddings with their norm, then the layers."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.word_embeddings = Embedding(config.vocab_size, hidden_size, options)
        self.position_embeddings = Embedding(config.max_model_len, hidden_size, options)
        self.token_type_embeddings = Embedding(config.num_segments, hidden_size, options)
        self.embedding_norm = LayerNorm(hidden_size, config.norm_eps, options)
        self.layers = nn.ModuleList(EncoderLayer(config, options) for _ in range(config.num_layers))

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        # A token of segment s has the id `token + s * vocab_size` (models/base.py).
        ids = batch.token_ids
        hidden = (
            self.word_embeddings(ids % self.vocab_size)
            + self.token_type_embeddings(ids // self.vocab_size)
            + self.position_embeddings(batch.positions)
        )
        return self.embedding_norm(hidden), StepInputs({}, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        return hidden
