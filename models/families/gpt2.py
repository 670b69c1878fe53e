"""GPT-2 (Radford et al., 2019): learned positions, layer norms, biases everywhere, a plain MLP."""

from __future__ import annotations

from torch import Tensor, nn

from ostinato.models.base import CausalLM, CheckpointLayout, DecoderLayer
from ostinato.models.config.decoder_config import MUST_BE, read_head_dim
from ostinato.models.config.hf_fields import (
    architecture_of,
    read_activation,
    read_first,
    read_integer,
    read_token_ids,
    refuse_other_values,
    stated_dtype,
)
from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.layers import Attention, LayerNorm
from ostinato.models.linear_layers import BuildOptions, Embedding, Linear, OutputHead
from ostinato.models.step_tensors import ForwardBatch, StepInputs
from ostinato.ops.activation import activate

__all__ = ("GPT2DecoderLayer", "GPT2LMHeadModel")

_MUST_BE = {**MUST_BE, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True}


class MLP(nn.Module):
    """residual + down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.activation = config.activation
        inner = options.shard.span(config.intermediate_size, "n_inner")
        self.c_fc = Linear(config.hidden_size, inner, options, bias=True)
        self.c_proj = Linear(inner, config.hidden_size, options, bias=True)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, D] -> [T, D], added to the residual."""
        return self.c_proj(activate(self.c_fc(x), self.activation), residual)

    def static_key(self) -> tuple[object, ...]:
        """What the traced program depends on besides tensors."""
        return ("mlp", self.activation, self.c_fc.static_key, self.c_proj.static_key)


class GPT2DecoderLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, options: BuildOptions, sliding_window: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.norm_eps, options)
        self.attn = Attention(
            config, options, sliding_window=sliding_window, qkv_bias=True, out_bias=True
        )
        self.ln_2 = LayerNorm(config.hidden_size, config.norm_eps, options)
        self.mlp = MLP(config, options)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        normal = self.ln_1(hidden)
        hidden = self.attn(normal, step, k_cache, v_cache, hidden, rows)
        return self.mlp(self.ln_2(hidden), hidden)

    def static_key(self) -> tuple[object, ...]:
        return ("gpt2", self.ln_1.eps, *self.attn.static_key(), *self.mlp.static_key())


class GPT2LMHeadModel(CausalLM):
    """Token and position embeddings, decoder layers, final norm, an output head, usually tied."""

    checkpoint_layout = CheckpointLayout(
        prefixes=("transformer.",),
        embedding="wte.weight",
        renamed=(
            ("layers.", "h."),
            ("attn.qkv_proj.", "attn.c_attn."),
            ("attn.o_proj.", "attn.c_proj."),
        ),
        transposed=("attn.qkv_proj", "attn.o_proj", "mlp.c_fc", "mlp.c_proj"),
        ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),  # causal masks of old checkpoints
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, _MUST_BE)
        hidden_size = read_integer(hf_config, "n_embd", "hidden_size")
        num_layers = read_integer(hf_config, "n_layer", "num_hidden_layers")
        num_heads = read_integer(hf_config, "n_head", "num_attention_heads")
        return ModelConfig(
            architecture=architecture_of(hf_config),
            vocab_size=read_integer(hf_config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_integer(
                hf_config, "n_inner", "intermediate_size", default=4 * hidden_size
            ),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=read_head_dim(hf_config, hidden_size, num_heads),
            max_model_len=read_integer(hf_config, "n_positions", "max_position_embeddings"),
            norm_eps=float(read_first(hf_config, "layer_norm_epsilon", default=1e-5)),
            activation=read_activation(hf_config, "activation_function", "gelu_new"),
            tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", True)),
            attention_bias=True,
            mlp_bias=True,
            rope=None,
            sliding_windows=(0,) * num_layers,
            dtype=stated_dtype(hf_config),
            eos_token_ids=read_token_ids(generation_config or {}, "eos_token_id")
            or read_token_ids(hf_config, "eos_token_id"),
            bos_token_id=hf_config.get("bos_token_id"),
        )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        tied = config.tie_word_embeddings
        self.wte = Embedding(config.vocab_size, config.hidden_size, options, is_head=tied)
        self.wpe = Embedding(config.max_model_len, config.hidden_size, options)
        self.layers = nn.ModuleList(
            GPT2DecoderLayer(config, options, window) for window in config.sliding_windows
        )
        self.ln_f = LayerNorm(config.hidden_size, config.norm_eps, options)
        self.lm_head = None if tied else OutputHead(config.hidden_size, config.vocab_size, options)

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        hidden = self.wte(batch.token_ids) + self.wpe(batch.positions)
        return hidden, StepInputs({}, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        return self.ln_f(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        head = self.wte if self.lm_head is None else self.lm_head
        return head.logits(hidden)
