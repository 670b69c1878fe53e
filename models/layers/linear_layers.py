"""Linear layers: modules around one weight matrix [out_features, in_features].

The weight method (models/weight_methods/) stores and multiplies the matrix. Spans
(models/sharding.py) say which part of it this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from ostinato.conf.schema import ExpertKernels
from ostinato.models.kv_cache import CrossSpace
from ostinato.models.layers.adapter_slots import AdapterSlots, AdapterSpace
from ostinato.models.sharding import WHOLE, Shard, Span
from ostinato.models.weight_methods.huge_pages import WeightMemory
from ostinato.models.weight_methods.weight_method import (
    OUT,
    MatrixRole,
    MatrixSpec,
    Part,
    StoredTensor,
    WeightMethod,
)
from ostinato.ops.activation import activate
from ostinato.ops.parallel.collectives import all_reduce
from ostinato.ops.parallel.exchange import Exchange, RankGroup

__all__ = (
    "BIAS",
    "BuildOptions",
    "Linear",
    "LinearBase",
    "MergedLinear",
    "RouterLinear",
    "join_group",
)

BIAS = StoredTensor((OUT,))
"""A bias [out]. Every format of checkpoints stores it this way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The dtype, device, kernels and context length for which a model is built."""

    dtype: torch.dtype  # the dtype of weights and activations
    device: torch.device  # "meta" gives shapes without memory
    attention_backend: str  # a name that ops.attention.select_backend returned
    max_model_len: int  # tokens of the longest context
    shard: Shard = WHOLE
    exchange: Exchange = Exchange.shared_memory  # how values are exchanged with the other ranks
    has_cache_scales: bool = False  # the checkpoint's scales of keys and values are used
    experts: ExpertKernels = ExpertKernels.auto
    adapters: AdapterSpace | None = None  # the room for low-rank adapters; None = no room
    num_media_rows: int = 0  # embeddings of images or sounds that can be kept at once
    cross: CrossSpace | None = None  # the room for keys and values of encoder states
    memory: WeightMemory = field(default_factory=WeightMemory, compare=False)  # only used on a CPU

    def empty(self, *shape: int) -> nn.Parameter:
        """Uninitialised memory for a weight. On a CPU, it takes memory when it is first written."""
        return nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )


@dataclass(slots=True)
class _Pending:
    """A matrix that is being loaded."""

    tensors: dict[str, Tensor]  # key: stored name
    count: int = 0  # stored tensors that were loaded so far


class LinearBase(nn.Module):
    """A matrix [out_features, in_features] and its bias; may stack several stored matrices.

    The constructor makes no matrix. `use` sets the weight method and allocates the matrix.

    Args:
        in_features: columns of the matrix; a span if this rank holds a part of them.
        outputs: rows of each stacked matrix; spans if this rank holds a part of them.
        options: dtype and device.
        bias: whether there is a bias [out_features].
    """

    role: MatrixRole = MatrixRole.layer
    takes_adapters = False  # whether low-rank adapters can be added to its result
    # A checkpoint stores the matrix as [out, *kernel], the weight of a convolution. () = [out, in].
    kernel: tuple[int, ...] = ()

    def __init__(
        self,
        in_features: int | Span,
        outputs: Sequence[int | Span],
        options: BuildOptions,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.inputs = Span.of(in_features)
        self.outputs = tuple(Span.of(size) for size in outputs)
        self.spec = MatrixSpec(
            sum(span.size for span in self.outputs), self.inputs.size, options.dtype, options.device
        )
        self.has_bias = bias
        self.exchange = options.exchange
        self.adapters = self._make_adapters(options.adapters)
        self._memory = options.memory
        self.bias: nn.Parameter | None = None
        self.group: Tensor | None
        self.register_buffer("group", None, persistent=False)
        if self.is_partial:
            self._meet_others()
        self._names: tuple[str, ...] = ()  # names of the matrix's parameters
        self._method: WeightMethod | None = None
        self._num_stored = 0  # stored tensors of one part
        self._pending: dict[int, _Pending] = {}  # by expert; 0 = the only matrix

    @property
    def in_features(self) -> int:
        """Columns that this rank holds."""
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        """Rows that this rank holds."""
        return self.spec.out_features

    @property
    def is_partial(self) -> bool:
        """Whether the result is a partial sum that must be added to those of the other ranks."""
        return not self.inputs.is_whole

    @property
    def method(self) -> WeightMethod:
        """How the matrix is stored and multiplied."""
        assert self._method is not None, "a matrix is used before it has a weight method"
        return self._method

    @property
    def weights(self) -> dict[str, Tensor]:
        """The matrix's parameters by name."""
        return {name: getattr(self, name) for name in self._names}

    @property
    def stacking(self) -> tuple[int, ...]:
        """The outputs by number, in the order in which the matrix stacks their rows."""
        return tuple(range(len(self.outputs)))

    @property
    def static_key(self) -> tuple[object, ...]:
        """What a traced program depends on besides tensors."""
        exchange = str(self.exchange) if self.is_partial else ""
        space = None if self.adapters is None else self.adapters.space
        return (*self.method.static_key, self.has_bias, self.is_partial, exchange, space)

    def parts(self, order: Tensor | None = None) -> list[Part]:
        """How the module's matrix is cut from one stored matrix: a list of one part.

        Args:
            order: [rows] int64: row i of the outputs, in their order, is row order[i] of the stored
                matrix; None = row i.
        """
        total = sum(span.total for span in self.outputs)
        is_in_order = order is None and self.stacking == tuple(range(len(self.outputs)))
        if is_in_order and all(span.is_whole for span in self.outputs):
            return [self._part(0, 1, total, slice(0, total), 0)]
        rows = torch.arange(total) if order is None else order
        pieces = rows.split([span.total for span in self.outputs])
        held = [
            piece.narrow(0, *span[:2]) for piece, span in zip(pieces, self.outputs, strict=True)
        ]
        rows = torch.cat([held[number] for number in self.stacking])
        return [self._part(0, 1, total, rows, 0)]

    def stacked_parts(
        self, orders: Sequence[Tensor | None], counts: Sequence[int] | None = None
    ) -> list[Part]:
        """How the module's matrix is cut from several stored matrices.

        Args:
            orders: for each stored matrix its `order`, as in `parts`.
            counts: for each stored matrix the number of outputs that it has, one after the other;
                None = 1.
        """
        counts = [1] * len(orders) if counts is None else counts
        first_rows: dict[int, int] = {}
        next_row = 0
        for number in self.stacking:
            first_rows[number] = next_row
            next_row += self.outputs[number].size
        found: list[Part] = []
        outputs = iter(enumerate(self.outputs))
        for index, (order, count) in enumerate(zip(orders, counts, strict=True)):
            numbers, spans = zip(*islice(outputs, count), strict=True)
            total, rows = _held_rows(spans, order)
            found.append(self._part(index, len(orders), total, rows, first_rows[numbers[0]]))
        return found

    def use(self, method: WeightMethod) -> None:
        """Set the weight method, and allocate its parameters and the bias without values.

        Raises:
            ValueError: the method cannot store the columns that this rank holds.
        """
        if (reason := method.why_indivisible(self.inputs)) is not None:
            raise ValueError(f"weights as {method.name}: {reason}")
        for name in self._names:
            delattr(self, name)
        self._method = method
        self._num_stored = len(method.stored)
        self._pending = {}
        parameters = method.parameters(self.spec)
        for name, (shape, dtype) in parameters.items():
            self.register_parameter(name, self._empty(shape, dtype))
        self._names = tuple(parameters)
        if self.has_bias:
            self.bias = self._empty((self.out_features,), self.spec.dtype)

    def load(self, name: str, value: Tensor, part: Part) -> None:
        """Load one tensor of a checkpoint. The last tensor of a matrix completes its parameters.

        Args:
            name: a stored tensor of the weight method, or `bias`.
            value: the tensor as stored.
            part: the stored matrix that it belongs to.

        Raises:
            ValueError: the tensor cannot be cut to what this rank holds, or the weight method does
                not support its values.
            NativeBuildError: the kernels cannot be built on this machine.
        """
        if name == "bias":
            self._load_bias(value, part)
            return
        pending = self._pending.get(part.expert)
        if pending is None:
            in_place = self.method.loads_in_place(self.spec)
            pending = _Pending(self._weights_of(part.expert) if in_place else {})
            self._pending[part.expert] = pending
        self.method.load(pending.tensors, name, value, part, self.spec)
        pending.count += 1
        if pending.count == part.count * self._num_stored:
            for parameter, tensor in self.method.finish(pending.tensors, self.spec).items():
                self._replace(parameter, tensor, part.expert)
            del self._pending[part.expert]

    def is_comparable(self, part: Part) -> bool:
        """Whether one stored tensor gives the whole matrix, so that `equals` can compare it."""
        return len(self.method.stored) == 1 and part.count == 1

    def equals(self, name: str, value: Tensor, part: Part) -> bool:
        """Whether the loaded matrix equals the one that this stored tensor gives.

        The matrix must be comparable (`is_comparable`).
        """
        tensors: dict[str, Tensor] = {}
        if self.method.loads_in_place(self.spec):
            parameters = self.method.parameters(self.spec).items()
            tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in parameters}
        self.method.load(tensors, name, value, part, self.spec)
        finished = self.method.finish(tensors, self.spec)
        return all(
            torch.equal(tensor.to(self.spec.device), self.weights[key])
            for key, tensor in finished.items()
        )

    def multiply(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        slots: Tensor | None = None,
        *,
        float32_output: bool = False,
        activation: str | None = None,
    ) -> Tensor:
        """[T, in_features] -> [T, out_features], plus bias, residual and adapters if given.

        If the result is a partial sum, `reduce` adds the residual.

        Args:
            slots: [T, 1] int32, the slot of each token's adapter; -1 = none.
            activation: a key of `ACTIVATIONS` (ops/activation.py): the result is
                activation(first half) * second half, [T, out_features / 2], without a residual.
        """
        assert activation is None or residual is None, "a gated linear unit has no residual"
        if activation is not None and (slots is None or self.adapters is None):
            return self.method.apply_gated(self.weights, self.spec, x, self.bias, activation)
        result = self.method.apply(
            self.weights, self.spec, x, self.bias, residual, float32_output=float32_output
        )
        if slots is not None and self.adapters is not None:
            self.adapters(result, x, slots)
        return result if activation is None else activate(result, activation, gated=True)

    def reduce(self, partial: Tensor, residual: Tensor | None) -> Tensor:
        """The sum of all ranks' partial results [T, out_features], plus the residual."""
        assert self.group is not None, "a module without a group has no partial results"
        return all_reduce(partial, residual, self.group, self.spec.dtype, self.exchange)

    def dense(self) -> Tensor:
        """The matrix that the parameters stand for: [out_features, in_features]."""
        return self.method.dense(self.weights, self.spec)

    def _meet_others(self) -> None:
        """Allocate the tensor to which `join_group` writes the group's handle.

        The handle is a tensor, so all ranks run one program although their handles differ.
        """
        self.group = torch.zeros(1, dtype=torch.int64)

    def _make_adapters(self, space: AdapterSpace | None) -> AdapterSlots | None:
        if space is None or not self.takes_adapters:
            return None
        outputs = [self.outputs[number].size for number in self.stacking]
        spec = self.spec
        return AdapterSlots(space, spec.in_features, outputs, spec.dtype, spec.device)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        """Uninitialised memory for a parameter. On a CPU, it takes memory when first written."""
        device = self.spec.device
        on_cpu = device.type == "cpu"
        empty = self._memory.empty if on_cpu else partial(torch.empty, device=device)
        return nn.Parameter(empty(shape, dtype=dtype), requires_grad=False)

    def _part(
        self, index: int, count: int, total: int, rows: slice | Tensor, first_row: int
    ) -> Part:
        num_rows = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        stored = (total, self.inputs.total)
        return Part(index, count, stored, rows, self.inputs, first_row, num_rows)

    def _weights_of(self, expert: int) -> dict[str, Tensor]:
        """The parameters of one expert. A module without experts counts as one expert."""
        return self.weights

    def _bias_of(self, expert: int) -> Tensor:
        assert self.bias is not None, "the module has no bias"
        return self.bias

    def _load_bias(self, value: Tensor, part: Part) -> None:
        rows = self._bias_of(part.expert)[part.first_row : part.first_row + part.num_rows]
        # If the ranks' outputs are summed, only the first rank adds the bias. The others add
        # zeros, so that all ranks run the same program.
        if self.inputs.start:
            rows.zero_()
        else:
            rows.copy_(part.cut(value, BIAS))

    def _replace(self, name: str, tensor: Tensor, expert: int) -> None:
        """Give a parameter its content."""
        parameter: Tensor = getattr(self, name)
        if tensor is parameter:
            return
        # the memory of the parameter was reserved and never written
        if parameter.device.type == "cpu":
            moved = self._memory.moved(tensor)
            setattr(self, name, nn.Parameter(moved, requires_grad=False))
        else:
            parameter.copy_(tensor)


def _held_rows(spans: Sequence[Span], order: Tensor | None) -> tuple[int, slice | Tensor]:
    """The rows of a stored matrix, and those of them that a rank holds.

    Args:
        spans: the matrix's outputs, one after the other.
        order: as in `LinearBase.parts`.
    """
    total = sum(span.total for span in spans)
    if order is None and all(span.is_whole for span in spans):
        return total, slice(0, total)
    if order is None and len(spans) == 1:
        start, size, _ = spans[0]
        return total, slice(start, start + size)
    pieces = (torch.arange(total) if order is None else order).split([one.total for one in spans])
    held = [piece.narrow(0, *span[:2]) for piece, span in zip(pieces, spans, strict=True)]
    return total, torch.cat(held)


class Linear(LinearBase):
    """y = x W^T + b."""

    takes_adapters = True

    def __init__(
        self,
        in_features: int | Span,
        out_features: int | Span,
        options: BuildOptions,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, (out_features,), options, bias=bias)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """[T, in_features] -> [T, out_features], plus a residual of that shape if there is one.

        `slots` is as for `multiply`. Partial sums are added over all ranks. On CPUs they are added
        in float32, and then rounded. On GPUs they are rounded before they are added. That halves
        the bytes between the GPUs.
        """
        if self.is_partial:
            on_cpu = self.exchange is not Exchange.nccl
            return self.reduce(self.multiply(x, slots=slots, float32_output=on_cpu), residual)
        return self.multiply(x, residual, slots)


class MergedLinear(LinearBase):
    """Several projections of one input as a single matrix; `outputs` are their numbers of rows."""

    takes_adapters = True

    def forward(
        self, x: Tensor, slots: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """[T, in_features] -> [T, out_features]; `slots` and `activation` as for `multiply`."""
        return self.multiply(x, slots=slots, activation=activation)


class RouterLinear(Linear):
    """Maps a hidden state to a logit for each expert."""

    role = MatrixRole.router
    takes_adapters = False


def join_group(model: nn.Module, group: RankGroup) -> None:
    """Let the layers of a rank exchange values with the other ranks of a group.

    Args:
        model: the model of one rank, with any weights.
        group: it must not be closed before the model's last step.
    """
    for module in model.modules():
        if isinstance(module, LinearBase) and module.group is not None:
            module.group.fill_(group.handle)
