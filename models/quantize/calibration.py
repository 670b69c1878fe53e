"""Rounds the matrices of a model's layers, one after the other, and measures perplexity.

For each matrix the calibration text runs through its layer twice. The first run has the unrounded
layer and the results of unrounded layers before it. It gives the results that the matrix should
have. The second run has the layer as it is now and the results of the rounded layers before it. It
gives the activations that the matrix will have. So a matrix makes up for a part of the errors of
the matrices before it. For experts there is no first run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.kv_cache import KVCache
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import LinearBase, MergedLinear
from ostinato.models.layers.vocabulary_layers import OutputHead
from ostinato.models.step_tensors import ForwardBatch, StepInputs
from ostinato.models.weight_methods.weight_method import MatrixRole

__all__ = ("BLOCK_SIZE", "Calibrator", "Seen", "layer_matrices", "num_matrices")


@dataclass(frozen=True, slots=True)
class Seen:
    """Statistics of a matrix [N, K] over the calibration text."""

    hessian: Tensor  # [K, K] float32, the mean of x x^T over the matrix's inputs x
    # [N, K] float32, the mean of e x^T; e = wanted - actual result; None = not known (experts)
    miss: Tensor | None


RoundMatrices = Callable[[str, LinearBase, Sequence[Seen | None]], None]
"""Called with a module's name in the model, the module, and a list with one entry for each matrix.

A module with experts has one matrix for each expert. An entry is None if the text did not reach the
matrix, or if there is no text.
"""

ScaleLayer = Callable[[str, DecoderLayer, Callable[[str], Tensor | None]], None]
"""Called with a layer's name, the layer, and a function from the name of one of its matrices to the
Hessian of that matrix. The function returns None if the text does not reach the matrix."""

_States = list[tuple[Tensor, StepInputs]]
_Cache = tuple[Tensor, Tensor]

BLOCK_SIZE = 16


def layer_matrices(layer: nn.Module) -> dict[str, LinearBase]:
    """The modules of a layer with matrices other than a router's, by their names in the layer."""
    found = {name: m for name, m in layer.named_modules() if isinstance(m, LinearBase)}
    return {name: module for name, module in found.items() if module.role is MatrixRole.layer}


def num_matrices(module: LinearBase) -> int:
    """One, or as many as the module has experts."""
    return module.experts.size if isinstance(module, ExpertLinear) else 1


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
    def round_layers(
        self,
        rows: Sequence[list[int]],
        round_matrices: RoundMatrices,
        scale_layer: ScaleLayer,
        head: tuple[str, OutputHead] | None = None,
    ) -> None:
        """Round every matrix of every layer, except those of routers.

        Args:
            rows: token ids of the calibration text; empty = nothing is observed or scaled.
            round_matrices: rounds the matrices of a module, and gives it the new weights.
            scale_layer: scales the inputs of a layer's matrices, if it can. The layer's result must
                stay the same.
            head: the name and the module of the output head, if it is rounded after the layers.
        """
        exact = states = [self._model.begin(self._batch(row)) for row in rows]
        for index, (layer, cache) in enumerate(zip(self._model.layers, self._cache, strict=True)):
            assert isinstance(layer, DecoderLayer), f"{type(layer).__name__} is not a DecoderLayer"
            prefix, matrices = f"layers.{index}", layer_matrices(layer)
            if not rows:
                for name, module in matrices.items():
                    round_matrices(f"{prefix}.{name}", module, [None] * num_matrices(module))
                continue
            scale_layer(prefix, layer, partial(_hessian, layer, states, cache))
            # Copied after the scaling, so that the results of a matrix in both layers differ only
            # by rounding.
            original = copy.deepcopy(layer)
            for name, module in matrices.items():
                if isinstance(module, ExpertLinear):
                    seen = _observe_experts(layer, name, states, cache)
                else:
                    seen = [_observe(original, layer, name, exact, states, cache)]
                round_matrices(f"{prefix}.{name}", module, seen)
            exact = [(original(hidden, step, *cache), step) for hidden, step in exact]
            states = [(layer(hidden, step, *cache), step) for hidden, step in states]
        if head is not None:
            round_matrices(*head, [self._observe_head(head[1], exact, states)])

    def _observe_head(self, head: OutputHead, exact: _States, states: _States) -> Seen | None:
        """The statistics of the output head; None if there is no text.

        The errors of its results are its weight times the errors of its inputs.
        """
        if not states:
            return None
        width, count = head.in_features, 0
        hessian, moved = torch.zeros(width, width), torch.zeros(width, width)
        for (unrounded, _), (hidden, _) in zip(exact, states, strict=True):
            x = self._model.finish(hidden).float()
            hessian.addmm_(x.T, x)
            moved.addmm_((self._model.finish(unrounded).float() - x).T, x)
            count += len(x)
        return Seen(hessian / count, head.get_parameter("weight") @ (moved / count))

    @torch.inference_mode()
    def perplexity(self, rows: Sequence[list[int]]) -> float:
        """exp of the mean negative log-likelihood of all tokens except the first of each row."""
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


def _hessian(layer: DecoderLayer, states: _States, cache: _Cache, name: str) -> Tensor | None:
    """The mean of x x^T over the inputs of a matrix; None if the layer does not call it."""
    total: Tensor | None = None
    count = 0
    for hidden, step in states:
        call = _call(layer, name, hidden, step, cache)
        if call is not None:
            x = call[0][0].float()
            total = x.T @ x if total is None else total.addmm_(x.T, x)
            count += len(x)
    return None if total is None else total / count


def _observe(
    original: DecoderLayer,
    current: DecoderLayer,
    name: str,
    exact: _States,
    states: _States,
    cache: _Cache,
) -> Seen | None:
    """Run the text through a layer as it was and as it is.

    Args:
        original, exact: the layer before any of it was rounded, and the states that entered it.
        current, states: the layer, and the states that enter it now.
        name: a matrix of both layers.
        cache: for the keys and values of a row.

    Returns:
        None if for no row both layers call the matrix.
    """
    hessian: Tensor | None = None
    miss: Tensor | None = None
    count = 0
    for (unrounded, step), (hidden, _) in zip(exact, states, strict=True):
        should = _call(original, name, unrounded, step, cache)
        does = _call(current, name, hidden, step, cache)
        if should is None or does is None:
            continue
        x, error = does[0][0].float(), (should[1] - does[1]).float()
        hessian = x.T @ x if hessian is None else hessian.addmm_(x.T, x)
        miss = error.T @ x if miss is None else miss.addmm_(error.T, x)
        count += len(x)
    if hessian is None or miss is None:
        return None
    return Seen(hessian / count, miss / count)


def _observe_experts(
    layer: DecoderLayer, name: str, states: _States, cache: _Cache
) -> list[Seen | None]:
    """The Hessian of each expert's tokens.

    For some tokens, the unrounded layer chooses other experts. So the wanted results are not known.
    """
    module = layer.get_submodule(name)
    assert isinstance(module, ExpertLinear), f"{name} has no experts"
    size, columns = module.experts.size, module.in_features
    sums = torch.zeros(size, columns, columns)
    counts = [0] * size
    for hidden, step in states:
        call = _call(layer, name, hidden, step, cache)
        if call is None:
            continue
        x, ids = call[0][0].float(), call[0][1].flatten()
        pairs = x.repeat_interleave(len(ids) // len(x), 0)
        for expert in ids.unique().tolist():
            own = pairs[ids == expert]
            sums[expert].addmm_(own.T, own)
            counts[expert] += len(own)
    return [
        Seen(total / count, None) if count else None
        for total, count in zip(sums, counts, strict=True)
    ]


class _Reached(Exception):
    """The matrix that is observed was called; the rest of its layer need not run."""


def _call(
    layer: DecoderLayer, name: str, hidden: Tensor, step: StepInputs, cache: _Cache
) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """The inputs and the result of a layer's matrix; None if the layer does not call it.

    The result is that of the matrix, before the activation of a gated linear unit.
    """
    found: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        multiply: Callable[..., Tensor] = module.forward
        arguments = inputs[:2] if isinstance(module, MergedLinear) else inputs
        found.append((inputs, multiply(*arguments)))
        raise _Reached

    hook = layer.get_submodule(name).register_forward_pre_hook(keep)
    try:
        layer(hidden, step, *cache)
    except _Reached:
        return found[0]
    finally:
        hook.remove()
    return None
