"""BERT (arXiv:1810.04805): an encoder with learned positions and segments, and post-norm layers.

A checkpoint has no head (`BertModel`), a masked-language-model head or a classification head. The
masked-language-model head is not loaded. The classification head scores pairs of texts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.encoder_fields import read_encoder_config
from ostinato.models.encoder import Encoder
from ostinato.models.layers.linear_layers import BuildOptions, Linear

__all__ = ("BertForSequenceClassification", "BertModel")

_LAYOUT = CheckpointLayout(
    prefixes=("bert.",),
    embedding="embeddings.word_embeddings.weight",
    renamed=(
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
    ),
    merged=(("qkv_proj", ("query", "key", "value")),),
    ignored=(r"position_ids$",),
)


class BertModel(Encoder):
    """BERT without a head."""

    # `pooler` serves next-sentence prediction. `cls` is the masked-language-model head.
    checkpoint_layout = replace(
        _LAYOUT, ignored=(*_LAYOUT.ignored, r"^(bert\.)?pooler\.", r"^cls\.")
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return read_encoder_config(hf_config)


class BertForSequenceClassification(BertModel):
    """BERT with a classification head: one logit for each label from the first token's state."""

    checkpoint_layout = _LAYOUT

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        self.pooler = nn.ModuleDict(
            {"dense": Linear(config.hidden_size, config.hidden_size, options, bias=True)}
        )
        self.classifier = Linear(config.hidden_size, config.num_labels, options, bias=True)

    def classify(self, pooled: Tensor) -> Tensor:
        pooled = pooled.to(self.embedding_norm.weight.dtype)
        return self.classifier(torch.tanh(self.pooler["dense"](pooled))).float()
