"""GPT-2 (Radford et al., 2019): learned positions, layer norms, biases everywhere, a plain MLP."""

from __future__ import annotations

from torch import Tensor, nn

from ostinato.models.base import CausalLM, CheckpointLayout, DecoderLayer
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers import Attention, LayerNorm
from ostinato.models.linear import BuildOptions, Embedding, Linear, OutputHead
from ostinato.models.step_tensors import ForwardBatch, StepInputs
from ostinato.ops.activation import activate

__all__ = ("GPT2DecoderLayer", "GPT2LMHeadModel")


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
