"""Maps a checkpoint's tensor names to the parameters and matrices of a model that they fill.

A slot checks the shape and dtype of a stored tensor and copies it into a parameter, or passes it to
a matrix. The matrix may be a part of the stored one, may have another row order, and may stack
several stored matrices (`CheckpointLayout`, models/base.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ostinato.models.base import CheckpointLayout, LanguageModel
from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.layers.linear_layers import BIAS, LinearBase
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mixers.recurrent_mixers import RecurrentMixer
from ostinato.models.layers.norm_layers import RMSNorm
from ostinato.models.sharding import Span
from ostinato.models.weight_methods.weight_method import FLOATS, Part, StoredTensor

__all__ = (
    "MatrixSlot",
    "Slot",
    "bare_name",
    "find_slots",
    "matrix_parts",
    "stored_modules",
    "stored_name",
    "with_prefix",
)


_INTEGERS = (torch.int64, torch.int32)


class Slot(Protocol):
    """The destination of one stored tensor."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have in the checkpoint."""
        ...

    def fill(self, stored_name: str, tensor: Tensor, matrices: range | None = None) -> None:
        """Take the tensor. A matrix may keep a view of it until all of its tensors are there.

        Args:
            stored_name: for messages.
            tensor: as stored.
            matrices: the matrices of a stack to take; None = all.

        Raises:
            CheckpointError: the tensor's dtype or shape is not what the model needs, or the weight
                method does not support its values.
        """
        ...

    def compare(self, stored_name: str, tensor: Tensor, first_name: str) -> None:
        """Check that a second tensor for a filled slot repeats the first.

        Args:
            stored_name: the name of the second tensor.
            tensor: the second tensor, as stored.
            first_name: the name of the first one. It is another name if the checkpoint stores an
                output head and the embedding that it is tied to.

        Raises:
            CheckpointError: the second tensor differs or cannot be compared, or its dtype or shape
                is wrong.
        """
        ...


def find_slots(model: LanguageModel, layout: CheckpointLayout) -> dict[str, Slot]:
    """The slots of all tensors that a checkpoint of this model must have.

    Args:
        model: as `build_model` made it.
        layout: the layout of the checkpoint: `model.checkpoint_layout`, or for a GGUF file
            `model.gguf_layout`.

    Returns:
        Slots by the stored names of the tensors, without prefix.

    Raises:
        ValueError: one stored tensor would have to fill two tensors of the model.
    """
    slots: dict[str, Slot] = {}
    for name, module in model.named_modules():
        found = (
            _matrix_slots(name, module, layout)
            if isinstance(module, LinearBase)
            else _parameter_slots(name, module, layout)
        )
        for own_name, slot in found:
            for ours, theirs in layout.renamed:
                own_name = own_name.replace(ours, theirs)
            if own_name in slots:  # one of the two would keep uninitialised memory
                raise ValueError(f"{own_name} would fill two tensors of {type(model).__name__}")
            slots[own_name] = slot
    return slots


def matrix_parts(name: str, module: LinearBase, layout: CheckpointLayout) -> list[Part]:
    """The stored matrices of one of our modules, in the order of `stored_modules`."""
    stacked = _stacked(name, module, layout)
    if stacked is None:
        return module.parts(_order_of(name, layout))
    parent = name.rpartition(".")[0]
    orders = [_order_of(f"{parent}.{part}", layout) for part in stacked]
    return module.stacked_parts(orders, list(stacked.values()))


def _stacked(name: str, module: LinearBase, layout: CheckpointLayout) -> dict[str, int] | None:
    """The stored modules that `module` stacks, and the outputs of each; None = it stacks none.

    The keys are the last parts of their names.
    """
    if isinstance(module, ExpertLinear) and name.endswith(layout.stacked):
        return None
    names = dict(layout.merged).get(name.rpartition(".")[2])
    return dict(Counter(names)) if names is not None and len(module.outputs) > 1 else None


def stored_modules(
    name: str,
    module: LinearBase,
    layout: CheckpointLayout,
    expert: int = 0,
    modules: Container[str] = (),
) -> tuple[str, ...]:
    """The names, with prefix, of the modules of a checkpoint that one of our modules stacks.

    Args:
        name: our module's name in the model.
        module: our module.
        layout: the layout of the checkpoint.
        expert: the expert whose names are wanted, if the module has a matrix for each expert.
        modules: the names of the modules of a checkpoint, if it may have other prefixes than the
            first of the layout.
    """
    parent = name.rpartition(".")[0]
    stacked = _stacked(name, module, layout)
    names = [name] if stacked is None else [f"{parent}.{part}" for part in stacked]
    found: list[str] = []
    for each in names:
        if isinstance(module, ExpertLinear) and not name.endswith(layout.stacked):
            folder, _, last = each.rpartition(".")
            each = f"{folder}.{expert}.{last}"
        usual = stored_name(f"{each}.weight", layout).removesuffix(".weight")
        found.append(next((one for one in _spellings(usual, layout) if one in modules), usual))
    return tuple(found)


def stored_name(name: str, layout: CheckpointLayout) -> str:
    """The name, with prefix, of one of our tensors in a checkpoint."""
    for ours, theirs in layout.renamed:
        name = name.replace(ours, theirs)
    return with_prefix(name, layout)


def with_prefix(name: str, layout: CheckpointLayout) -> str:
    """The usual name in a checkpoint of a tensor whose name has no prefix."""
    if not layout.prefixes or name == layout.head or name.startswith(layout.unprefixed):
        return name
    return layout.prefixes[0] + name


def bare_name(stored: str, layout: CheckpointLayout) -> str:
    """A stored name without the prefixes that the layout drops, and without aliases."""
    for prefix in layout.prefixes:
        stored = stored.removeprefix(prefix)
    for usual, other in layout.aliases:
        if stored.startswith(other):
            return usual + stored.removeprefix(other)
    return stored


def _spellings(usual: str, layout: CheckpointLayout) -> Iterator[str]:
    """The names that a module can have in checkpoints: the usual one first."""
    yield usual
    bare = bare_name(usual, layout)
    others = [bare] + [
        other + bare.removeprefix(ours) for ours, other in layout.aliases if bare.startswith(ours)
    ]
    # Prefixes are dropped one after the other, so any of them can stand before any later one.
    starts = [""]
    for prefix in reversed(layout.prefixes):
        starts += [prefix + start for start in starts]
    for other in others:
        yield from (start + other for start in starts)


def _parameter_slots(
    name: str, module: nn.Module, layout: CheckpointLayout
) -> Iterator[tuple[str, Slot]]:
    order = _order_of(name, layout)
    offset = module.stored_offset if isinstance(module, RMSNorm) else 0.0
    held = module.held if isinstance(module, Attention | RMSNorm | RecurrentMixer) else {}
    for kind, parameter in module.named_parameters(recurse=False):
        spans = held.get(kind, ())
        spans = (spans,) if isinstance(spans, Span) else spans
        yield f"{name}.{kind}", _ParameterSlot(parameter, order, offset, spans)


def _matrix_slots(
    name: str, module: LinearBase, layout: CheckpointLayout
) -> Iterator[tuple[str, Slot]]:
    """One slot for each tensor of each stored matrix of a module."""
    parent = name.rpartition(".")[0]
    stacked_names = _stacked(name, module, layout)
    names = [name] if stacked_names is None else [f"{parent}.{part}" for part in stacked_names]
    parts = matrix_parts(name, module, layout)
    stored = dict(module.method.stored) | ({"bias": BIAS} if module.has_bias else {})
    transposed = name.endswith(layout.transposed)
    either_way = name.endswith(layout.either_way)
    for part_name, part in zip(names, parts, strict=True):
        for kind, tensor in stored.items():
            is_weight = kind == "weight"
            slot = MatrixSlot(
                module,
                kind,
                tensor,
                part.stored,
                (part,),
                transposed and is_weight,
                either_way and is_weight,
            )
            if not isinstance(module, ExpertLinear):
                yield f"{part_name}.{kind}", slot
            elif name.endswith(layout.stacked):
                experts = tuple(replace(part, expert=index) for index in range(module.experts.size))
                yield f"{part_name}.{kind}", replace(slot, parts=experts, experts=module.experts)
            else:
                yield from _expert_slots(slot, module, part_name)


def _expert_slots(slot: MatrixSlot, module: ExpertLinear, name: str) -> Iterator[tuple[str, Slot]]:
    """One slot for each expert. The slots of experts on other ranks drop their tensors."""
    parent, _, own = name.rpartition(".")
    start, size, total = module.experts
    (part,) = slot.parts
    for expert in range(total):
        is_here = start <= expert < start + size
        parts = (replace(part, expert=expert - start),) if is_here else ()
        yield f"{parent}.{expert}.{own}.{slot.kind}", replace(slot, parts=parts)


def _order_of(name: str, layout: CheckpointLayout) -> Tensor | None:
    for suffix, order in layout.row_orders:
        if name.endswith(suffix):
            return order
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _ParameterSlot:
    """A parameter; its stored rows may have another order, and a constant may be added."""

    parameter: nn.Parameter
    order: Tensor | None
    offset: float  # added to the stored values
    # The parts of the stored rows, in their order, and what the parameter holds of each. Empty =
    # the parameter holds all rows.
    spans: tuple[Span, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = tuple(self.parameter.shape)
        return (sum(span.total for span in self.spans), *shape[1:]) if self.spans else shape

    def fill(self, stored_name: str, tensor: Tensor, matrices: range | None = None) -> None:
        is_float = self.parameter.is_floating_point()
        _check(stored_name, tensor, self.stored_shape, FLOATS if is_float else _INTEGERS)
        if self.spans:
            parts = tensor.split([span.total for span in self.spans])
            pairs = zip(parts, self.spans, strict=True)
            tensor = torch.cat([part.narrow(0, *span[:2]) for part, span in pairs])
        value = tensor if self.order is None else tensor[self.order]
        self.parameter.copy_(value.double() + self.offset if self.offset else value)

    def compare(self, stored_name: str, tensor: Tensor, first_name: str) -> None:
        raise _stored_twice(stored_name)


@dataclass(frozen=True, slots=True, eq=False)
class MatrixSlot:
    """The slot of one tensor of a stored matrix, or of a stack of matrices."""

    module: LinearBase
    kind: str  # the tensor's name in the weight method
    stored: StoredTensor
    size: tuple[int, int]  # [out, in] of the stored matrix
    # The parts of this rank: one for a matrix, one for each expert of a stack, or none if the
    # matrix is that of an expert on another rank.
    parts: tuple[Part, ...]
    transposed: bool  # stored as [in, out]
    either_way: bool = False  # stored as [out, in], or as [in, out] if only that shape fits
    experts: Span | None = None  # for a stack: the experts of this rank

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self._is_convolution:
            return (self.size[0], *self.module.kernel)
        shape = self.stored.shape(*self.size)
        if self.transposed:
            shape = tuple(reversed(shape))
        return shape if self.experts is None else (self.experts.total, *shape)

    def fill(self, stored_name: str, tensor: Tensor, matrices: range | None = None) -> None:
        value = self._checked(stored_name, tensor)
        try:
            if self.experts is None:
                for part in self.parts:
                    self.module.load(self.kind, value, part)
                return
            for part in self.parts:
                expert = self.experts.start + part.expert
                if matrices is None or expert in matrices:
                    self.module.load(self.kind, value[expert], part)
        except ValueError as error:
            raise CheckpointError(f"{stored_name}: {error}") from error

    def compare(self, stored_name: str, tensor: Tensor, first_name: str) -> None:
        value = self._checked(stored_name, tensor)
        is_comparable = len(self.parts) == 1 and self.module.is_comparable(self.parts[0])
        if is_comparable and self.module.equals(self.kind, value, self.parts[0]):
            return
        if stored_name == first_name:
            raise _stored_twice(stored_name, ", with different values" if is_comparable else "")
        what = "differs from" if is_comparable else "cannot be compared with"
        raise CheckpointError(
            f"{stored_name} {what} {first_name}, to which it is tied; "
            "set model.config.tie_word_embeddings=false"
        )

    @property
    def _is_convolution(self) -> bool:
        return bool(self.module.kernel) and self.kind == "weight"

    def _checked(self, stored_name: str, tensor: Tensor) -> Tensor:
        shape = self.stored_shape
        if self.either_way and tuple(tensor.shape) == (*shape[:-2], *shape[:-3:-1]) != shape:
            tensor = tensor.transpose(-1, -2)
        _check(stored_name, tensor, shape, self.stored.dtypes)
        if self._is_convolution:
            return tensor.flatten(1)
        return tensor.transpose(-1, -2) if self.transposed else tensor


def _stored_twice(stored_name: str, how: str = "") -> CheckpointError:
    return CheckpointError(f"{stored_name} is stored twice{how}; remove it from one of the files")


def _check(
    stored_name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.dtype not in dtypes:
        raise CheckpointError(
            f"{stored_name} has dtype {tensor.dtype}, "
            f"expected {' or '.join(str(dtype) for dtype in dtypes)}"
        )
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{stored_name} has shape {list(tensor.shape)}, but the configuration needs "
            f"{list(shape)}"
        )
