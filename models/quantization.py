"""Which weights of a model are quantised, and how; the arithmetic is in ops/quantized.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ostinato.conf.schema import HeadQuantization, ModelSection, Quantization
from ostinato.models.layers import Embedding, Matrix, OutputHead
from ostinato.ops.quantized_reference import QuantFormat

__all__ = ("ModelQuantization", "quantization_of", "quantize_model", "quantize_module")

_BITS = {"int8": 8, "int4": 4}
_GROUP_SIZES = {8: 128, 4: 32}
# Smaller tables, those of positions and segments, would save nothing.
_MIN_TABLE_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuantization:
    """The forms of a model's weights."""

    layers: QuantFormat
    head: QuantFormat | None  # of token embeddings and output head; None = as they are

    @property
    def name(self) -> str:
        """For people."""
        head = "as loaded" if self.head is None else self.head.name
        return f"{self.layers.name}; head {head}"


def quantization_of(section: ModelSection) -> ModelQuantization | None:
    """What the configuration asks for; None = nothing.

    The output head decides between tokens that are near each other, and is a small part of all but
    the smallest models: it stays at 8 bits unless it is said otherwise.
    """
    if section.quantization is Quantization.none:
        return None
    head = section.quantization_head
    if head is HeadQuantization.auto:
        head = HeadQuantization.int8
    return ModelQuantization(
        layers=_format(section, _BITS[section.quantization.value]),
        head=None if head is HeadQuantization.none else _format(section, _BITS[head.value]),
    )


def _format(section: ModelSection, bits: int) -> QuantFormat:
    group_size = section.quantization_group_size or _GROUP_SIZES[bits]
    return QuantFormat(bits, group_size, section.quantization_symmetric)


def quantize_module(
    module: nn.Module, quantization: ModelQuantization, *, fill: bool = True
) -> bool:
    """Replace the module's own weight by its quantised form, if it is one that should be.

    Args:
        module: with its final weight; any module of a model.
        quantization: the forms.
        fill: False = the form only, contents unset: for a model to trace, or to measure.

    Returns:
        Whether it was.

    Raises:
        NativeBuildError: the kernels can not be built on this machine.
    """
    if not isinstance(module, Matrix):
        return False
    if isinstance(module, Embedding):
        worth = module.is_head or module.out_features >= _MIN_TABLE_ROWS
        form = quantization.head if worth else None
    else:
        form = quantization.head if isinstance(module, OutputHead) else quantization.layers
    if form is None:
        return False
    module.quantize(form, fill=fill)
    return True


def quantize_model(model: nn.Module, quantization: ModelQuantization, *, fill: bool = True) -> int:
    """`quantize_module` for all of them; returns how many weights were quantised."""
    return sum(quantize_module(module, quantization, fill=fill) for module in model.modules())
