"""The model class for architectures without a family here: runs a graph traced from transformers.

docs/models.md says which models it serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.base import CausalLM
from ostinato.models.config.block_spec import BlockSpec
from ostinato.models.config.hf_fields import (
    HFConfig,
    architecture_of,
    read_token_id,
    read_token_ids,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.torch_fields import stated_dtype
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.step_tensors import ForwardBatch, StepInputs
from ostinato.models.traced.assembly import Assembly, rows_of_kind
from ostinato.models.traced.hf_model import find_source
from ostinato.models.traced.leaf_modules import ExpertsLeaf, LinearLeaf
from ostinato.models.traced.model_trace import trace_model
from ostinato.models.traced.stored_names import checkpoint_layout

__all__ = ("TracedCausalLM",)

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")


class TracedCausalLM(CausalLM):
    """Runs the parts of a traced graph as the parts of a `LanguageModel`."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        """The hyperparameters of the traced run; see `LanguageModel.read_config`."""
        source = find_source(hf_config)
        dtype = stated_dtype(hf_config)
        trace = trace_model(source, dtype)
        config = trace.model.config.get_text_config()
        length = _context(config)
        # Building the parts raises errors about unsupported operations before any weight is read.
        meta = BuildOptions(
            dtype=dtype,
            device=torch.device("meta"),
            attention_backend="reference",
            max_model_len=length,
        )
        assembly = Assembly(trace, meta)
        list(assembly.layers())
        first = trace.calls[0]
        linears = [leaf for leaf in trace.leaves.values() if isinstance(leaf, LinearLeaf)]
        head = trace.model.get_output_embeddings()
        widest = [leaf.out_features for leaf in linears if leaf.out_features != head.out_features]
        experts = [leaf for leaf in trace.leaves.values() if isinstance(leaf, ExpertsLeaf)]
        top_k = int(getattr(config, "num_experts_per_tok", 1) or 1)
        widest += [top_k * (2 * leaf.intermediate_size + leaf.hidden_size) for leaf in experts]
        ids_of = {key: getattr(config, key, None) for key in ("bos_token_id", "eos_token_id")}
        return ModelConfig(
            architecture=architecture_of(hf_config),
            vocab_size=int(head.out_features),
            hidden_size=int(head.in_features),
            intermediate_size=max(widest),
            num_layers=len(trace.layers),
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            value_dim=first.value_dim,
            max_model_len=length,
            norm_eps=0.0,
            activation="silu",
            tie_word_embeddings=assembly.is_tied,
            rope=None,
            sliding_windows=tuple(call.sliding_window for call in trace.calls),
            dtype=dtype,
            eos_token_ids=read_token_ids(generation_config or {}, "eos_token_id")
            or read_token_ids(ids_of, "eos_token_id"),
            bos_token_id=read_token_id(ids_of, "bos_token_id"),
            block=BlockSpec(has_sinks=any(call.sinks for call in trace.calls)),
            attention_soft_cap=max(call.soft_cap for call in trace.calls),
            traced=source,
            has_traced_experts=bool(experts),
        )

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        assert config.traced is not None, "the configuration names the code of the model"
        trace = trace_model(config.traced, options.dtype)
        assembly = Assembly(trace, options)
        self.traced_begin = assembly.begin()
        self.layers = nn.ModuleList(assembly.layers())
        self.traced_finish = assembly.finish()
        self.traced_head = assembly.head(assembly.embedding_of(self.traced_begin))
        for name, rows in assembly.tables.tensors.items():
            self.register_buffer(name, rows, persistent=False)
        self._tables = assembly.tables.pairs
        self.checkpoint_layout = checkpoint_layout(
            trace, assembly.merged, assembly.row_orders, is_tied=assembly.is_tied
        )

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        hidden = self.traced_begin(batch.token_ids, batch.positions)
        tables = {
            kind: rows_of_kind(
                tuple(F.embedding(batch.positions, getattr(self, name)) for name in names)
            )
            for kind, names in self._tables.items()
        }
        return hidden, StepInputs(tables, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        return self.traced_finish(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.traced_head(hidden)


def _context(config: Any) -> int:
    """Tokens of the longest context.

    Raises:
        ValueError: the config does not state it.
    """
    for key in _POSITIONS:
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            return length
    raise ValueError(f"config.json states no context; set model.config.{_POSITIONS[0]}")
