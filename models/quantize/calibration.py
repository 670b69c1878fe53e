"""Rounds the matrices of a model's layers, one layer after the other, and measures perplexity.

The calibration text runs through a layer, which gives the Hessians of its matrices. The matrices
are rounded, and the text runs through the layer again. So the next layer sees the activations that
it will see in the quantised model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ostinato.models.base import CausalLM
from ostinato.models.kv_cache import KVCache
from ostinato.models.linear_layers import LinearBase
from ostinato.models.step_tensors import ForwardBatch
from ostinato.models.weight_methods.weight_method import MatrixRole

__all__ = ("BLOCK_SIZE", "Calibrator", "layer_matrices")

Round = Callable[[str, LinearBase, Tensor | None], None]
"""Called with a matrix's name in the model, its module, and its Hessian [K, K] or None."""

BLOCK_SIZE = 16


def layer_matrices(layer: nn.Module) -> dict[str, LinearBase]:
    """The matrices of a layer that are quantised, by their names in the layer."""
    found = {name: m for name, m in layer.named_modules() if isinstance(m, LinearBase)}
    return {name: module for name, module in found.items() if module.role is MatrixRole.layer}


class Calibrator:
    """Runs rows of tokens through a float32 model.

    Args:
        model: the model, with its weights, on a CPU.
        cache: a cache for one row: its blocks of `BLOCK_SIZE` tokens, and the null block.
    """

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def round_layers(self, rows: Sequence[list[int]], round_matrix: Round) -> None:
        """Round every matrix of every layer.

        Args:
            rows: token ids of the calibration text; empty = no Hessians.
            round_matrix: rounds one matrix, and gives the module its new weights.
        """
        states = [self._model.begin(self._batch(row)) for row in rows]
        for index, (layer, cache) in enumerate(zip(self._model.layers, self._cache, strict=True)):
            sums: dict[str, Tensor] = {}
            matrices = layer_matrices(layer)
            hooks = [
                module.register_forward_pre_hook(_adder(sums, name))
                for name, module in matrices.items()
            ]
            for hidden, step in states:
                layer(hidden, step, *cache)
            for hook in hooks:
                hook.remove()
            count = sum(len(row) for row in rows)
            for name, module in matrices.items():
                hessian = sums[name] / count if rows else None
                round_matrix(f"layers.{index}.{name}", module, hessian)
            states = [(layer(hidden, step, *cache), step) for hidden, step in states]

    @torch.inference_mode()
    def perplexity(self, rows: Sequence[list[int]]) -> float:
        """exp of the mean negative log-likelihood of each row's tokens after its first."""
        total, count = 0.0, 0
        for row in rows:
            batch = self._batch(row)
            logits = self._model.compute_logits(self._model(batch, self._cache))
            chosen = logits[:-1].log_softmax(-1).gather(1, batch.token_ids[1:, None])
            total -= float(chosen.double().sum())
            count += len(row) - 1
        return math.exp(total / count)

    def _batch(self, row: list[int]) -> ForwardBatch:
        positions = torch.arange(len(row))
        blocks = torch.arange(1, -(-len(row) // BLOCK_SIZE) + 1, dtype=torch.int32)
        return ForwardBatch(
            token_ids=torch.tensor(row),
            positions=positions,
            slot_mapping=positions + BLOCK_SIZE,
            logits_indices=positions,
            sampled_rows=positions,
            query_start_loc=torch.tensor([0, len(row)], dtype=torch.int32),
            seq_lens=torch.tensor([len(row)], dtype=torch.int32),
            block_table=blocks[None],
            plan=torch.zeros(1, dtype=torch.int64),
        )


def _adder(sums: dict[str, Tensor], name: str) -> Callable[..., None]:
    """A hook that adds x^T x of a module's inputs to `sums[name]`."""

    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        product = x.T @ x
        sums[name] = sums[name] + product if name in sums else product

    return add
