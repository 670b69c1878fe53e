"""Heads of EAGLE-3 (arXiv:2503.01840): one decoder layer that continues its target model's text.

The head's input at position p is the target's hidden states of position p at a few depths, and the
embedding of the token at p + 1. It predicts the token at p + 2. Further tokens are drafted from the
head's own output in place of the target's hidden states.

The layout and the names of the tensors are those of SafeAILab/EAGLE. config.json must name the
architecture `LlamaForCausalLMEagle3`, as SpecForge writes it and SGLang reads it. The heads that
SafeAILab publishes name `LlamaForCausalLM` there, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ostinato.models.base import CheckpointLayout, DecoderLayer
from ostinato.models.config.head_spec import HeadSpec
from ostinato.models.config.hf_fields import (
    HFConfig,
    architecture_of,
    read_count,
    read_flag,
    read_integer,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import read_decoder_config
from ostinato.models.decoder import LLAMA_NAMES, Decoder
from ostinato.models.draft_heads.draft_head_model import DraftHeadModel
from ostinato.models.layers.linear_layers import BuildOptions, Linear
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mlp import build_mlp
from ostinato.models.layers.norm_layers import build_norm
from ostinato.models.layers.position_tables import RotaryEmbedding
from ostinato.models.layers.vocabulary_layers import OutputHead
from ostinato.models.step_tensors import DEFAULT_ROPE, ForwardBatch, StepInputs, TableRows

__all__ = ("Eagle3Head", "is_head_config", "read_head_config")

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_PAIR = "pair"  # the key in `StepInputs.rope` under which the layer finds its [embedding, features]


class Eagle3Layer(DecoderLayer):
    """The head's layer: attention over the normalised pair [embedding, features], then an MLP.

    The pair is computed before the layer. The residual stream begins with the features, normalised
    if `norm_before_residual` is set.
    """

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, options)  # of the embedding
        self.hidden_norm = build_norm(config, options)  # of the features
        self.self_attn = Attention(
            config,
            options,
            sliding_window=0,
            rope_kind=DEFAULT_ROPE,
            in_features=2 * config.hidden_size,
        )
        self.mlp_norm = build_norm(config, options)
        self.mlp = build_mlp(config, options)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        (pair,) = step.rope[_PAIR]
        hidden = self.self_attn(pair, step, k_cache, v_cache, hidden, rows)
        return self.mlp(self.mlp_norm(hidden), hidden)

    def static_key(self) -> tuple[object, ...]:
        return (
            "eagle3 layer",
            self.mlp_norm.static_key,
            *self.self_attn.static_key(),
            *self.mlp.static_key(),
        )


class DraftVocabulary(nn.Module):
    """The tokens that a head can draw.

    Attributes:
        d2t: [draft vocabulary] int64: add it to an id of the draft vocabulary to get the target's
            id.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        distances = torch.zeros(size, dtype=torch.int64, device=device)
        self.d2t = nn.Parameter(distances, requires_grad=False)

    def target_ids(self) -> Tensor:
        """[draft vocabulary] int64: the tokens' ids in the target's vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class Eagle3Head(DraftHeadModel):
    """The head as a model of its own."""

    checkpoint_layout = CheckpointLayout(
        prefixes=(),
        renamed=(("layers.0.", "midlayer."), ("vocabulary.d2t", "d2t"), *LLAMA_NAMES),
        merged=(
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ),
        # The embedding is the target's. `t2d` has the same information as `d2t`.
        ignored=(r"^t2d$", r"^embed_tokens\.weight$", r"rotary_emb\.inv_freq$"),
    )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        spec = config.head
        assert isinstance(spec, HeadSpec), "the configuration is that of a head"
        self._spec = spec
        self.fc = Linear(spec.num_aux_layers * spec.target_hidden_size, config.hidden_size, options)
        assert config.rope is not None, "the head is a Llama layer"
        self.rotary = RotaryEmbedding(config.rope, options)
        self.layers = nn.ModuleList([Eagle3Layer(config, options)])
        self.final_norm = build_norm(config, options)
        self.lm_head = OutputHead(config.hidden_size, spec.draft_vocab_size, options)
        self.vocabulary: DraftVocabulary | None = None  # None = the target's
        if spec.draft_vocab_size != config.vocab_size:
            self.vocabulary = DraftVocabulary(spec.draft_vocab_size, options.device)
        else:
            layout = self.checkpoint_layout
            self.checkpoint_layout = replace(layout, ignored=(*layout.ignored, r"^d2t$"))
        self._target_ids: Tensor | None = None

    def attach(self, target: Decoder, max_num_tokens: int, tables: Decoder | None = None) -> None:
        """As in the base class.

        Raises:
            ValueError: `d2t` names a token that the target's vocabulary does not have.
        """
        super().attach(target, max_num_tokens, tables)
        if self.vocabulary is None:
            return
        ids = self.vocabulary.target_ids()
        wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if len(wrong):
            raise ValueError(
                f"its d2t names token {int(wrong[0])}, and the model has "
                f"{self.config.vocab_size} tokens"
            )
        self._target_ids = ids

    def read_hidden(self, hidden: Tensor) -> None:
        """hidden: [T, n D], the states that enter the head's n `aux_layers` (`HeadSpec`)."""
        self.read_features(self.fc(hidden))

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer), "the head's only layer"
        embedded, features = self._inputs(batch.token_ids)
        normal = layer.hidden_norm(features)
        pair = torch.cat((layer.attention_norm(embedded), normal), 1)
        rope = {DEFAULT_ROPE: self.rotary(batch.positions), _PAIR: TableRows(pair)}
        residual = normal if self._spec.norm_before_residual else features
        return residual, StepInputs(rope, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        # the next draft reads the hidden state without the norm, which only the logits need
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, vocab_size] float32: -inf for tokens that the head cannot draw."""
        self._keep_outputs(hidden)
        logits = self.lm_head.logits(self.final_norm(hidden))
        if self.vocabulary is None:
            return logits
        ids = self._target_ids
        if ids is None:
            ids = torch.arange(logits.shape[1], device=logits.device)
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, ids, logits)


def is_head_config(hf_config: HFConfig) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    return hf_config.get("architectures") == [_ARCHITECTURE]


def read_head_config(hf_config: HFConfig) -> ModelConfig:
    """The configuration of an EAGLE-3 head.

    There are two ways to name the layers. A number at the top level (vLLM) is that of the layer
    which the hidden state enters. A number under `eagle_config` (SGLang, SpecForge) is that of the
    layer which the hidden state leaves.

    Raises:
        ValueError: it is not an EAGLE-3 head, or a value is not supported; the text names it.
    """
    architecture = architecture_of(hf_config)
    if architecture != _ARCHITECTURE:
        raise ValueError(
            f"its architecture is {architecture}, and speculation.method=eagle3 needs "
            f"{_ARCHITECTURE}"
        )
    if read_integer(hf_config, "num_hidden_layers", default=1) != 1:
        raise ValueError(
            f"config.json: num_hidden_layers={hf_config['num_hidden_layers']} is not supported, "
            "only 1"
        )
    config = read_decoder_config({**hf_config, "num_hidden_layers": 1})
    nested = hf_config.get("eagle_config") or {}
    if not isinstance(nested, Mapping) or nested.get("use_aux_hidden_state", True) is not True:
        raise ValueError("config.json: eagle_config.use_aux_hidden_state must be true")
    layers = _layer_ids(hf_config.get("eagle_aux_hidden_state_layer_ids"), 0)
    layers = layers or _layer_ids(nested.get("eagle_aux_hidden_state_layer_ids"), 1)
    depth = "target_num_hidden_layers"
    spec = HeadSpec(
        target_hidden_size=read_integer(
            hf_config, "target_hidden_size", default=config.hidden_size
        ),
        aux_layers=layers,
        num_aux_layers=3 if layers is None else len(layers),
        target_num_layers=None if hf_config.get(depth) is None else read_count(hf_config, depth),
        draft_vocab_size=read_integer(hf_config, "draft_vocab_size", default=config.vocab_size),
        norm_before_residual=read_flag(hf_config, "norm_before_residual", False),
    )
    return replace(config, head=spec, tie_word_embeddings=False)


def _layer_ids(value: object, offset: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
        raise ValueError(
            "config.json: eagle_aux_hidden_state_layer_ids must be a list of numbers, got "
            f"{value!r}"
        )
    return tuple(one + offset for one in value)
