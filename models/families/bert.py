"""BERT (arXiv:1810.04805): an encoder with learned positions and segments, and post-norm layers.

A checkpoint has no head (`BertModel`), a masked-language-model head or a classification head. The
masked-language-model head is not loaded. The classification head scores pairs of texts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.base import (
    CheckpointLayout,
    DecoderLayer,
    EncoderModel,
)
from ostinato.models.config.encoder_config import read_encoder_config
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.layers import LayerNorm
from ostinato.models.linear_layers import BuildOptions, Linear, MergedLinear
from ostinato.models.step_tensors import ForwardBatch, StepInputs
from ostinato.models.vocabulary_layers import Embedding
from ostinato.ops.activation import activate
from ostinato.ops.encoder_attention import encoder_attention

__all__ = ("BertForSequenceClassification", "BertLayer", "BertModel")

_RENAMED = (
    ("embedding_norm.", "embeddings.LayerNorm."),
    ("word_embeddings.", "embeddings.word_embeddings."),
    ("position_embeddings.", "embeddings.position_embeddings."),
    ("token_type_embeddings.", "embeddings.token_type_embeddings."),
    ("layers.", "encoder.layer."),
    ("attention.query.", "attention.self.query."),
    ("attention.key.", "attention.self.key."),
    ("attention.value.", "attention.self.value."),
    ("attention.o_proj.", "attention.output.dense."),
    ("attention_norm.", "attention.output.LayerNorm."),
    ("up_proj.", "intermediate.dense."),
    ("down_proj.", "output.dense."),
    ("output_norm.", "output.LayerNorm."),
)
_LAYOUT = CheckpointLayout(
    prefixes=("bert.",),
    embedding="embeddings.word_embeddings.weight",
    renamed=_RENAMED,
    merged=(("qkv_proj", ("query", "key", "value")),),
    # `pooler` serves next-sentence prediction. `cls` is the masked-language-model head.
    ignored=(r"position_ids$", r"^(bert\.)?pooler\.", r"^cls\."),
)


class BertAttention(nn.Module):
    """Self-attention in both directions."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        size = config.num_heads * config.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, (size, size, size), options, bias=True)
        self.o_proj = Linear(size, config.hidden_size, options, bias=True)

    def forward(self, x: Tensor, step: StepInputs, rows: Tensor | None) -> Tensor:
        """Attention plus its input: [T, D] -> [T, D]; with `rows` only these rows, [R, D]."""
        # A layer with only views and ops of this package runs without Inductor
        # (graphs/compiler/fx_program.py).
        count = self.num_heads
        heads = self.qkv_proj(x).view(-1, 3 * count, self.head_dim)
        q, k, v = heads.split_with_sizes((count, count, count), 1)
        out = encoder_attention(q, k, v, step.tensors.query_start_loc, scale=self.head_dim**-0.5)
        out = out.reshape(-1, count * self.head_dim)
        if rows is not None:
            out, x = F.embedding(rows, out), F.embedding(rows, x)
        return self.o_proj(out, x)


class BertLayer(DecoderLayer):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.attention = BertAttention(config, options)
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
            "bert",
            self.activation,
            self.output_norm.eps,
            self.attention.num_heads,
            self.attention.head_dim,
            *(linear.static_key for linear in linears),
        )


class BertModel(EncoderModel):
    """Token, position and segment embeddings with their norm, then the layers."""

    checkpoint_layout = _LAYOUT

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return read_encoder_config(hf_config)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.word_embeddings = Embedding(config.vocab_size, hidden_size, options)
        self.position_embeddings = Embedding(config.max_model_len, hidden_size, options)
        self.token_type_embeddings = Embedding(config.num_segments, hidden_size, options)
        self.embedding_norm = LayerNorm(hidden_size, config.norm_eps, options)
        self.layers = nn.ModuleList(BertLayer(config, options) for _ in range(config.num_layers))

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


class BertForSequenceClassification(BertModel):
    """BERT with a classification head: one logit for each label from the first token's state."""

    checkpoint_layout = CheckpointLayout(
        prefixes=_LAYOUT.prefixes,
        embedding=_LAYOUT.embedding,
        renamed=_RENAMED,
        merged=_LAYOUT.merged,
        ignored=(r"position_ids$",),
    )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        self.pooler = nn.ModuleDict(
            {"dense": Linear(config.hidden_size, config.hidden_size, options, bias=True)}
        )
        self.classifier = Linear(config.hidden_size, config.num_labels, options, bias=True)

    def classify(self, pooled: Tensor) -> Tensor:
        pooled = pooled.to(self.embedding_norm.weight.dtype)
        return self.classifier(torch.tanh(self.pooler["dense"](pooled))).float()
