"""Layers of a checkpoint that predict one token more (MTP): DeepSeek-V3, GLM-4.5 to 4.7.

Such a layer follows the last one of the model (arXiv:2412.19437, section 2.2). At position p it
reads the model's final hidden state of p, after the final norm, and the embedding of the token at
p + 1. Both are normalised, joined and projected, and one block of the model's kind follows. Norm
and output head give the token at p + 2. The embedding and the output head are the model's. Further
tokens are drafted from the normalised output of the layer itself.

The names are those of the published checkpoints: `model.layers.{L}.` with `enorm`, `hnorm`,
`eh_proj`, a block and `shared_head`, where L is the number of the model's layers. The stored copies
of the embedding and of the output head are not read. If there are several such layers, the first
one is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.checkpoints.headers import read_headers
from ostinato.models.config.head_spec import NextTokenSpec
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import DecoderBlock
from ostinato.models.draft_heads.draft_head_model import DraftHeadModel
from ostinato.models.families.deepseek_v2 import latent_layout
from ostinato.models.families.glm4_moe import GLM4_MOE_LAYOUT
from ostinato.models.layers.linear_layers import BuildOptions, Linear
from ostinato.models.layers.norm_layers import build_norm
from ostinato.models.layers.position_tables import RotaryEmbedding
from ostinato.models.step_tensors import DEFAULT_ROPE, ForwardBatch, StepInputs

__all__ = ("NextTokenHead", "read_next_token_config")

# Architectures whose checkpoints have such a layer -> the names of the tensors of a block.
_LAYOUTS: dict[str, Callable[[ModelConfig], CheckpointLayout]] = {
    "DeepseekV3ForCausalLM": latent_layout,
    "Glm4MoeForCausalLM": lambda config: GLM4_MOE_LAYOUT,
    "Glm4MoeLiteForCausalLM": latent_layout,
}


class NextTokenHead(DraftHeadModel):
    """The layer as a model of its own."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        spec, size = config.head, config.hidden_size
        assert isinstance(spec, NextTokenSpec), "the configuration is that of such a layer"
        assert config.rope is not None, "these families have rotary embeddings"
        self.embed_norm = build_norm(config, options)
        self.hidden_norm = build_norm(config, options)
        self.pair_proj = Linear(2 * size, size, options)
        self.rotary = RotaryEmbedding(config.rope, options)
        self.layers = nn.ModuleList([DecoderBlock(config, options, 0)])
        self.final_norm = build_norm(config, options)
        self.checkpoint_layout = _layout(config, spec.layer)

    def read_hidden(self, hidden: Tensor) -> None:
        self.read_features(hidden)

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        embedded, features = self._inputs(batch.token_ids)
        pair = torch.cat((self.embed_norm(embedded), self.hidden_norm(features)), 1)
        return self.pair_proj(pair), StepInputs({DEFAULT_ROPE: self.rotary(batch.positions)}, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        return self.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, vocab_size] float32, by the target's output head."""
        self._keep_outputs(hidden)
        return self._target_logits(hidden)


def _layout(config: ModelConfig, layer: int) -> CheckpointLayout:
    """The names of the layer's tensors. All other tensors of the checkpoint are ignored."""
    block, prefix = _LAYOUTS[config.architecture](config), f"layers.{layer}."
    own = (
        ("layers.0.", prefix),
        ("embed_norm.", f"{prefix}enorm."),
        ("hidden_norm.", f"{prefix}hnorm."),
        ("pair_proj.", f"{prefix}eh_proj."),
        ("final_norm.", f"{prefix}shared_head.norm."),
    )
    stored = rf"model\.layers\.{layer}\."
    return replace(
        block,
        renamed=(*own, *block.renamed),
        ignored=(
            *block.ignored,
            rf"^(?!{stored})",
            rf"^{stored}(embed_tokens|shared_head\.head)\.",
        ),
    )


def read_next_token_config(checkpoint: Checkpoint, target: ModelConfig) -> ModelConfig:
    """The configuration of a checkpoint's next-token layer.

    Args:
        checkpoint: the model's checkpoint.
        target: the model's configuration.

    Raises:
        ValueError: the layers of this architecture are not supported, the model runs through
            transformers, or the checkpoint has no such layer that can be read.
    """
    other = "set speculation.method=auto"
    if target.architecture not in _LAYOUTS:
        raise ValueError(
            f"layers of {target.architecture} that predict further tokens are not supported; "
            f"those of {', '.join(_LAYOUTS)} are; {other}"
        )
    if target.traced is not None:
        raise ValueError(
            f"{target.architecture} runs through transformers (model.implementation=transformers), "
            f"which shows no hidden states; set model.implementation=native, or {other}"
        )
    count = checkpoint.hf_config.get("num_nextn_predict_layers")
    if not count:
        raise ValueError(
            f"config.json has num_nextn_predict_layers={count!r}: the checkpoint has no layer that "
            f"predicts further tokens; take a checkpoint with at least 1, or {other}"
        )
    if checkpoint.gguf is not None:
        raise ValueError(
            f"{checkpoint.path} is a GGUF file, from which the layer that predicts further tokens "
            f"is not read; take a checkpoint of safetensors files, or {other}"
        )
    projection = f"model.layers.{target.num_layers}.eh_proj."
    stored = read_headers(checkpoint)  # empty without safetensors files: the loader reports it
    if stored and not any(name.startswith(projection) for name in stored):
        raise ValueError(
            f"{checkpoint.path} lacks the tensor {projection}weight, although its config.json has "
            f"num_nextn_predict_layers={count}; take a checkpoint that was saved with this layer, "
            f"or {other}"
        )
    assert target.moe is not None, "these families have experts"
    return replace(
        target,
        num_layers=1,
        sliding_windows=(0,),
        moe=replace(target.moe, layers=(True,)),
        tie_word_embeddings=False,
        head=NextTokenSpec(layer=target.num_layers),
    )
