"""Declares the tensors of a step in one table, from which buffers, padding and tracing follow.

`StepTensors` is the table. Each field is a tensor. Its annotation gives the sizes, the dtype, the
value of padding and how the tensor is uploaded. Three things are derived from the table: the static
buffers on host and device (`graphs.buffers`), the marks for dynamic sizes (`graphs.compiler`), and
the inputs of a captured CPU graph. A new tensor needs a field here, and code that fills and reads
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionMetadata

__all__ = (
    "CROSS",
    "DEFAULT_ROPE",
    "LOCAL_ROPE",
    "TEMPERATURE",
    "AudioTensors",
    "CrossRows",
    "ForwardBatch",
    "GridTensors",
    "LookaheadTensors",
    "MediaTensors",
    "RopeRows",
    "Size",
    "StepInputs",
    "StepSizes",
    "StepTensors",
    "TableRows",
    "TensorSpec",
    "Upload",
    "given_tensors",
    "tensor_specs",
)

Array = TypeVar("Array")

DEFAULT_ROPE = "default"
"""The kind of rotary table of a model that has only one."""

LOCAL_ROPE = "local"
"""The kind of a second rotary table, which layers with a window use."""

TEMPERATURE = "temperature"
"""The kind of the table with factors of queries, used by layers without rotary positions."""


CROSS = "cross"
"""The kind of the table that says which keys cross attention reads."""


class Size(StrEnum):
    """The names of the sizes of step tensors."""

    tokens = "T"
    seqs = "S"
    seqs_plus_one = "S+1"
    rows = "R"  # tokens whose logits are wanted
    blocks = "B"  # blocks of the longest sequence; fixed for an engine's life
    window_blocks = "B'"  # the same for the second block table

    @property
    def is_dynamic(self) -> bool:
        """Whether the size differs from step to step."""
        return self not in (Size.blocks, Size.window_blocks)


class Upload(StrEnum):
    """Which part of a tensor is copied to the device in a step."""

    whole = "whole"  # all of it, in one copy with the other tensors of this kind
    used_rows = "used rows"  # the rows of the step's sequences; for tensors that are large
    never = "never"  # the tensor stays on the CPU


class StepSizes(NamedTuple):
    """The numbers that sizes stand for: those of a step, or the largest of an engine's life."""

    num_tokens: int  # T
    num_seqs: int  # S
    num_rows: int  # R

    def number(self, size: Size) -> int:
        """The number of a dynamic size.

        Raises:
            ValueError: the size does not depend on the step.
        """
        match size:
            case Size.tokens:
                return self.num_tokens
            case Size.seqs:
                return self.num_seqs
            case Size.seqs_plus_one:
                return self.num_seqs + 1
            case Size.rows:
                return self.num_rows
            case Size.blocks | Size.window_blocks:
                raise ValueError(f"the size {size} is fixed for an engine; a step does not have it")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The declaration of a step tensor.

    Only the first size may be dynamic, so that a tensor that is cut to a step's size is contiguous.
    """

    sizes: tuple[Size | int, ...]
    dtype: torch.dtype
    padding: int | Literal["edge"] = 0  # "edge" repeats the last value of the step
    upload: Upload = Upload.whole

    def __post_init__(self) -> None:
        if any(isinstance(size, Size) and size.is_dynamic for size in self.sizes[1:]):
            raise ValueError(f"only the first of {self.sizes} may be a dynamic size")

    @property
    def dynamic_size(self) -> Size | None:
        """The first size if it differs from step to step, else None."""
        first = self.sizes[0]
        return first if isinstance(first, Size) and first.is_dynamic else None

    def shape(self, largest: StepSizes, fixed: Mapping[Size, int]) -> tuple[int, ...]:
        """The sizes as numbers.

        Args:
            largest: numbers of the dynamic sizes.
            fixed: numbers of the other sizes.
        """
        return tuple(
            size
            if not isinstance(size, Size)
            else largest.number(size)
            if size.is_dynamic
            else fixed[size]
            for size in self.sizes
        )


_PER_TOKEN = TensorSpec(sizes=(Size.tokens,), dtype=torch.int64)
_PER_ROW = TensorSpec(sizes=(Size.rows,), dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class StepTensors(Generic[Array]):
    """A step's inputs: T tokens of S sequences, R of the tokens give logits.

    On the host these are NumPy arrays of the largest size, on the device tensors cut to the step.
    Padding tokens write their K and V into block 0, the null block. Padding sequences have no query
    rows. The fields that a subclass adds come after the fields here.
    """

    # [T]; on the host, `-1 - row` stands for a token that only the device has: the last token of
    # the sequence in that row. A row is an index in arrays that persist between steps.
    token_ids: Annotated[Array, _PER_TOKEN]
    # [T]; the token's position in its sequence.
    positions: Annotated[Array, _PER_TOKEN]
    # [T]; where the token's K and V go: `block_id * block_size + offset`. Block ids of step tensors
    # are those of a layer, `pieces` times the ids of the pool (models/kv_groups.py).
    slot_mapping: Annotated[Array, _PER_TOKEN]
    # [R]; the tokens whose final hidden state is wanted.
    logits_indices: Annotated[Array, _PER_ROW]
    # [S]; the rows of the sequences that sample, in the order of their tokens in `logits_indices`.
    sampled_rows: Annotated[Array, TensorSpec(sizes=(Size.seqs,), dtype=torch.int64)]
    # [S+1]; first query row of each sequence, then the total.
    query_start_loc: Annotated[
        Array, TensorSpec(sizes=(Size.seqs_plus_one,), dtype=torch.int32, padding="edge")
    ]
    # [S]; tokens in context, those of this step included.
    seq_lens: Annotated[Array, TensorSpec(sizes=(Size.seqs,), dtype=torch.int32)]
    # [S, B]; block ids by `position // block_size`.
    block_table: Annotated[
        Array,
        TensorSpec(sizes=(Size.seqs, Size.blocks), dtype=torch.int32, upload=Upload.used_rows),
    ]
    # [1]; handle of the host state of a planned attention kernel, 0 = none.
    plan: Annotated[Array, TensorSpec(sizes=(1,), dtype=torch.int64, upload=Upload.never)]
    # [T, 1]; the slot of each token's low-rank adapter, -1 = none. None = no token has one: such a
    # step runs a program without adapters.
    adapter_slots: Annotated[
        Array | None, TensorSpec(sizes=(Size.tokens, 1), dtype=torch.int32, padding=-1)
    ] = None
    # [S, B']; like `block_table`, for the layers with a window. Ids of blocks that lie outside of
    # the window may be those of other sequences. None = all layers have one block table.
    window_block_table: Annotated[
        Array | None,
        TensorSpec(
            sizes=(Size.seqs, Size.window_blocks), dtype=torch.int32, upload=Upload.used_rows
        ),
    ] = None
    # [T]; like `slot_mapping`, for the layers with a window. None = as above.
    window_slot_mapping: Annotated[Array | None, _PER_TOKEN] = None
    # [S, 4]; the slots in which recurrent layers keep the states of each sequence; its columns are
    # the last fields of `StateRows` (ops/recurrent/states.py). None = no layer is recurrent.
    state_slots: Annotated[Array | None, TensorSpec(sizes=(Size.seqs, 4), dtype=torch.int32)] = None


@dataclass(frozen=True, kw_only=True)
class MediaTensors(StepTensors[Array]):
    """The step tensors of a model whose prompts have images or sounds."""

    # [T, 1]; the row of the media tables whose values replace each token's embedding; 0 = none.
    media_rows: Annotated[Array, TensorSpec(sizes=(Size.tokens, 1), dtype=torch.int64)]


@dataclass(frozen=True, kw_only=True)
class GridTensors(MediaTensors[Array]):
    """The step tensors of a model that takes images and has positions on three axes (M-RoPE)."""

    # [T, 3]; positions on the axes time, row and column, from which the rotation is computed.
    rope_positions: Annotated[Array, TensorSpec(sizes=(Size.tokens, 3), dtype=torch.int64)]


@dataclass(frozen=True, kw_only=True)
class LookaheadTensors(MediaTensors[Array]):
    """The step tensors of a model in which the tokens of an image see each other."""

    # [T]; the index after the image of each token, in its sequence; 0 = the token is of no image.
    visible_ends: Annotated[Array, TensorSpec(sizes=(Size.tokens,), dtype=torch.int32)]


@dataclass(frozen=True, kw_only=True)
class AudioTensors(StepTensors[Array]):
    """The step tensors of a model with cross attention to audio."""

    # [T, 1]; the window of the caches of cross attention that each token reads; 0 = none.
    audio_windows: Annotated[Array, TensorSpec(sizes=(Size.tokens, 1), dtype=torch.int64)]


ForwardBatch = StepTensors[Tensor]
"""A step's tensors on the model's device; `plan` is on the CPU."""


@cache
def tensor_specs(table: type[StepTensors[Any]]) -> dict[str, TensorSpec]:
    """The declaration of each tensor of a table, by name, in its order."""
    hints = get_type_hints(table, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in fields(table)}


def given_tensors(step: StepTensors[Array]) -> dict[str, tuple[TensorSpec, Array]]:
    """The declaration and the tensor of each field of a step that is not None, by name."""
    specs = tensor_specs(type(step)).items()
    return {
        name: (spec, tensor) for name, spec in specs if (tensor := getattr(step, name)) is not None
    }


class RopeRows(NamedTuple):
    """The rows of one rotary table at the positions of a step's tokens."""

    cos: Tensor  # [T, rotary_dim / 2] float32
    sin: Tensor  # [T, rotary_dim / 2] float32


class TableRows(NamedTuple):
    """The rows of another table at the positions of a step's tokens."""

    rows: Tensor  # [T, width]


class CrossRows(NamedTuple):
    """For each token of a step, the keys and values that cross attention reads."""

    seq_lens: Tensor  # [T, 1] int32
    block_table: Tensor  # [T, E] int32, blocks of the caches of cross attention


class StepInputs(NamedTuple):
    """Inputs that all decoder layers of a step share; `LanguageModel.begin` computes them once."""

    # RopeRows, TableRows or CrossRows, by kind of table; empty for models without such tables.
    rope: Mapping[str, tuple[Tensor, ...]]
    tensors: ForwardBatch

    def attention(self, sliding_window: int) -> AttentionMetadata:
        """The part of the step tensors that the attention op of a layer reads.

        Args:
            sliding_window: the layer's, as `paged_attention` takes it.
        """
        tensors = self.tensors
        block_table, slot_mapping = tensors.block_table, tensors.slot_mapping
        if sliding_window and tensors.window_block_table is not None:
            assert tensors.window_slot_mapping is not None, "both tensors of a group are given"
            block_table, slot_mapping = tensors.window_block_table, tensors.window_slot_mapping
        return AttentionMetadata(
            tensors.query_start_loc,
            tensors.seq_lens,
            block_table,
            slot_mapping,
            tensors.plan,
            tensors.visible_ends if isinstance(tensors, LookaheadTensors) else None,
        )
