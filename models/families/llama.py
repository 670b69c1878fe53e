"""Llama 1, 2 and 3 (arXiv:2302.13971, 2307.09288, 2407.21783) and what shares its shape.

Pre-norm residual blocks: attention with rotary positions, then a gated MLP. Mistral, Qwen2 and
Qwen3 are this with a sliding window, with biases, and with normalised queries and keys.
"""

from __future__ import annotations

from torch import Tensor, nn

from ostinato.models.base import CausalLM, CheckpointLayout, DecoderLayer
from ostinato.models.config.decoder_config import read_decoder_config
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.layers import Attention, GatedMLP, RMSNorm, RotaryEmbedding
from ostinato.models.linear_layers import BuildOptions, Embedding, OutputHead
from ostinato.models.step_tensors import DEFAULT_ROPE, ForwardBatch, StepInputs

__all__ = ("LlamaDecoderLayer", "LlamaForCausalLM")


class LlamaDecoderLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, options: BuildOptions, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, options)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, options)
        self.mlp = GatedMLP(config, options)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        normal = self.input_layernorm(hidden)
        hidden = self.self_attn(normal, step, k_cache, v_cache, hidden, rows)
        return self.mlp(self.post_attention_layernorm(hidden), hidden)

    def static_key(self) -> tuple[object, ...]:
        return (
            "llama",
            self.input_layernorm.eps,
            *self.self_attn.static_key(),
            *self.mlp.static_key(),
        )


class LlamaForCausalLM(CausalLM):
    """Embedding, decoder layers, final norm, output head."""

    checkpoint_layout = CheckpointLayout(
        merged=(
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ),
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return read_decoder_config(hf_config, generation_config)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        if config.rope is None:
            raise ValueError(f"{config.architecture} needs max_position_embeddings in config.json")
        tied = config.tie_word_embeddings
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, options, is_head=tied)
        self.rotary = RotaryEmbedding(config.rope, options)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, options, self.build_attention(config, options, window))
            for window in config.sliding_windows
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, options)
        self.lm_head = None if tied else OutputHead(config.hidden_size, config.vocab_size, options)

    @staticmethod
    def build_attention(
        config: ModelConfig, options: BuildOptions, sliding_window: int
    ) -> Attention:
        """The attention of one layer: what the members of this family differ in."""
        return Attention(
            config,
            options,
            sliding_window=sliding_window,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        rope = {DEFAULT_ROPE: self.rotary(batch.positions)}
        return self.embed_tokens(batch.token_ids), StepInputs(rope, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden)
