"""Roofline arithmetic: the least bytes and operations of a step, from a model's sizes.

A decode step reads every weight once, and the keys and values of every context. Layers with a
sliding window read only those in the window. Every token of a prompt is multiplied with every
weight of the layers, and its last token also with the output head. A recurrent layer reads and
writes the states of each sequence once in a step, whatever the context is.
A mixture of experts counts as if every token used all experts. The rates of the memory and the
matrix units are measured in the same run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.vocabulary_layers import Embedding
from ostinato.models.registry import build_model
from ostinato.ops.attention import first_seen

__all__ = ("Machine", "ModelSizes", "sizes_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The measured rates of a device."""

    copy_bytes_s: float  # of a copy, bytes read plus bytes written; on a CPU, of a read
    matmul_flop_s: float  # in the model's type

    def least_seconds(self, num_bytes: float, num_flop: float) -> float:
        """The least seconds of a step with this traffic and this number of operations."""
        return max(num_bytes / self.copy_bytes_s, num_flop / self.matmul_flop_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that determine the cost of a step."""

    body_parameters: int  # multiplied with every token
    head_parameters: int  # multiplied with every token that samples
    weight_bytes: int  # bytes of one weight
    kv_bytes_per_token: int
    attention_size: int  # query heads x head size, over all layers
    # {window: layers that have it}, windows as `paged_attention` takes them. Empty = no layer has
    # a window.
    windows: dict[int, int] = field(default_factory=dict)
    state_bytes: int = 0  # states of a sequence in all recurrent layers
    state_operations: int = 0  # by one token, on all of these states

    def decode_bytes(self, batch: int, context: int) -> int:
        """Weights, keys and values that a step of `batch` tokens reads, and its states, twice.

        States are read and written.
        """
        weights = (self.body_parameters + self.head_parameters) * self.weight_bytes
        cached = self.attention_work(context - 1, context)[0] + 2 * self.state_bytes
        return weights + batch * cached

    def decode_flop(self, batch: int, context: int) -> int:
        """Multiplications and additions of a step of `batch` tokens."""
        parameters = self.body_parameters + self.head_parameters
        mixed = self.attention_work(context - 1, context)[1] + self.state_operations
        return batch * (2 * parameters + mixed)

    def prefill_flop(self, num_prompts: int, length: int) -> int:
        """Operations of whole prompts; causal attention counts only the half that is needed."""
        mixed = self.attention_work(0, length)[1] + length * self.state_operations
        one = 2 * length * self.body_parameters + 2 * self.head_parameters + mixed
        return num_prompts * one

    def attention_work(self, start: int, end: int) -> tuple[int, int]:
        """The least work of the attention of a sequence's positions [start, end), in all layers.

        Returns:
            Bytes of the keys and values that are read, and operations.
        """
        start = max(0, start)
        windows = self.windows or {0: 1}
        num_layers = sum(windows.values())
        num_read = sum(
            count * (end - first_seen(start, window)) for window, count in windows.items()
        )
        num_pairs = sum(
            count * (_num_pairs(window, end) - _num_pairs(window, start))
            for window, count in windows.items()
        )
        return (
            num_read * self.kv_bytes_per_token // num_layers,
            4 * num_pairs * self.attention_size // num_layers,
        )


def _num_pairs(window: int, end: int) -> int:
    """How many positions the positions [0, end) see, summed."""
    if window < 0:
        chunks, rest = divmod(end, -window)
        return chunks * _num_pairs(0, -window) + _num_pairs(0, rest)
    inside = min(end, window) if window else end
    return inside * (inside + 1) // 2 + (end - inside) * window


def sizes_of(config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype) -> ModelSizes:
    """The sizes of a model, which is built without memory."""
    model = build_model(
        config, dtype=dtype, device=torch.device("meta"), attention_backend="reference"
    )
    tables = sum(_count(module) for module in model.modules() if isinstance(module, Embedding))
    head = config.vocab_size * config.hidden_size
    tied = config.tie_word_embeddings
    cache = config.kv_cache_spec(1, cache_dtype, activation_dtype=dtype)
    return ModelSizes(
        body_parameters=_count(model) - tables - (0 if tied else head),
        head_parameters=head,
        weight_bytes=dtype.itemsize,
        kv_bytes_per_token=cache.bytes_per_token,
        attention_size=cache.num_layers * config.num_heads * config.head_dim,
        windows=dict(Counter(config.attention_windows)),
        state_bytes=0 if cache.recurrent is None else cache.recurrent.bytes_per_slot,
        state_operations=config.state_operations,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
