"""The modules of a model that can have adapters, by the names that PEFT gives them.

PEFT names a module as transformers does: `model.layers.0.self_attn.q_proj`. These are the names of
a checkpoint's tensors (`CheckpointLayout`), also if the base model was loaded from a GGUF file.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ostinato.models.base import CheckpointLayout, LanguageModel
from ostinato.models.checkpoints.slots import (
    bare_name,
    matrix_parts,
    stored_modules,
    stored_name,
)
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import LinearBase, RouterLinear
from ostinato.models.weight_methods.weight_method import MatrixRole, Part

__all__ = ("Target", "Targets", "takes_adapters")

_KINDS = {
    MatrixRole.head: "the output head",
    MatrixRole.embedding: "an embedding",
    MatrixRole.tied: "the embedding, which is also the output head",
    MatrixRole.vision: "a matrix of the tower for images or sounds",
}


class Target(NamedTuple):
    """One stored matrix of a module that can have an adapter."""

    name: str  # the module's name in the model
    module: LinearBase
    part: Part  # the rows and columns of the stored matrix that this rank holds


def takes_adapters(name: str, module: LinearBase) -> bool:
    """Whether a module can have an adapter: a projection of attention or of an MLP.

    Args:
        name: the module's name in the model.
        module: the module.
    """
    return name.startswith("layers.") and module.takes_adapters


class Targets:
    """Finds the modules of a model, or of one stage of it, by their names in an adapter's file.

    Args:
        model: the model of this rank.

    Attributes:
        found: the targets by stored name without prefix.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._layout: CheckpointLayout = model.checkpoint_layout
        self._layers = model.stage.layers
        self.found: dict[str, Target] = {}
        self._others: dict[str, str] = {}  # stored name -> kind of the module
        for tensor in (self._layout.head, self._layout.embedding):
            kind = "the output head" if tensor == self._layout.head else "an embedding"
            self._others[self.bare_name(tensor.removesuffix(".weight"))] = kind
        for name, module in model.named_modules():
            if not isinstance(module, LinearBase):
                continue
            stored = [self.bare_name(each) for each in stored_modules(name, module, self._layout)]
            if takes_adapters(name, module):
                parts = matrix_parts(name, module, self._layout)
                for each, part in zip(stored, parts, strict=True):
                    self.found[each] = Target(name, module, part)
            else:
                self._others.update(dict.fromkeys(stored, _kind_of(module)))
        first = self.bare_name(stored_name("layers.0.", self._layout))
        self._number = re.compile(re.escape(first[:-2]) + r"([0-9]{1,9})\.")

    def bare_name(self, stored: str) -> str:
        """A stored name without the prefix that the layout drops. It can be missing."""
        return bare_name(stored, self._layout)

    def is_elsewhere(self, bare: str) -> bool:
        """Whether a module belongs to a layer of another stage of the pipeline."""
        match, layers = self._number.match(bare), self._layers
        if match is None or layers is None:
            return False
        number = int(match[1])
        is_here = layers.start <= number < layers.start + layers.size
        return number < layers.total and not is_here

    def why_missing(self, bare: str) -> str:
        """Why a module cannot have an adapter, as the end of a sentence about it."""
        kind = self._others.get(bare)
        if kind is None and "experts" in bare.split("."):
            kind = "a matrix of experts"
        if kind is None:
            return "is not in the model; take an adapter that was trained on this model"
        return (
            f"is {kind}, which cannot have an adapter; train the adapter without it, or merge the "
            "adapter into the model with PEFT's merge_and_unload"
        )


def _kind_of(module: LinearBase) -> str:
    if isinstance(module, ExpertLinear):
        return "a matrix of experts"
    if isinstance(module, RouterLinear):
        return "the router of experts"
    return _KINDS.get(module.role, "outside of the layers")
