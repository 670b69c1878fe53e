"""The settings of heads that draft for a model (EAGLE-3, MTP), and the hidden states they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ("NO_INPUTS", "HeadInputs", "HeadSpec", "NextTokenSpec")


class HeadInputs(NamedTuple):
    """The hidden states of a model that its head reads."""

    layers: tuple[int, ...] = ()  # ascending; the hidden states that enter these layers are read
    has_final: bool = False  # the hidden state after the final norm is read

    def width(self, hidden_size: int) -> int:
        """Values that the head reads at each position, if a hidden state has `hidden_size`."""
        return (len(self.layers) + self.has_final) * hidden_size


NO_INPUTS = HeadInputs()
"""The inputs of a head that reads no hidden states, and of a model without a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The input that an EAGLE-3 head reads from its target model, and the tokens that it drafts."""

    target_hidden_size: int
    # Numbers of layers of the target, ascending. The hidden states that enter these layers are the
    # head's input. None = the head does not state them; in a target of n layers they are then 2,
    # `n // 2` and `n - 3`.
    aux_layers: tuple[int, ...] | None
    num_aux_layers: int
    target_num_layers: int | None  # None = the head does not state it
    draft_vocab_size: int  # tokens that the head can draw
    norm_before_residual: bool  # the residual of the head's layer is the normalised hidden state

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose input the head reads, in a target with `num_layers` layers."""
        if self.aux_layers is not None:
            return self.aux_layers
        return (2, num_layers // 2, num_layers - 3)

    def inputs(self, num_layers: int) -> HeadInputs:
        """What the head reads from a target with `num_layers` layers."""
        return HeadInputs(layers=self.layers_of(num_layers))

    def why_not_for(self, num_layers: int, hidden_size: int) -> str | None:
        """Why a target of these sizes cannot have the head; None if it can."""
        if hidden_size != self.target_hidden_size:
            return (
                f"it reads hidden states of {self.target_hidden_size} values "
                f"(target_hidden_size), and the model's have {hidden_size}"
            )
        if self.target_num_layers not in (None, num_layers):
            return (
                f"its target has {self.target_num_layers} layers (target_num_hidden_layers), and "
                f"the model has {num_layers}"
            )
        layers = self.layers_of(num_layers)
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
            named = ", ".join(map(str, layers))
            return (
                f"it reads the hidden states that enter layers {named}, which must be ascending "
                f"and among the {num_layers} layers of the model, 0 to {num_layers - 1}"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokenSpec:
    """A layer of a checkpoint that predicts one token more than the model (MTP)."""

    layer: int  # its index in the checkpoint, after the model's own layers 0 to layer - 1

    def inputs(self, num_layers: int) -> HeadInputs:
        """What the layer reads from the model."""
        del num_layers  # it reads nothing between the layers
        return HeadInputs(has_final=True)
