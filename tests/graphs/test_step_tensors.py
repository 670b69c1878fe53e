"""A new step tensor is one field of the table.

Buffers, padding, dynamic sizes and replays follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.conf.schema import GraphForm
from ostinato.graphs.buckets import GraphKey
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.dynamo_trace import varying_in_batch
from ostinato.graphs.compiler.programs import LayerProgram, Program
from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.kv_cache import KVCache
from ostinato.models.step_tensors import (
    Size,
    StepInputs,
    StepTensors,
    TensorSpec,
    Upload,
    given_tensors,
)
from tests.graphs.compiler.test_cpu_capture import packed
from tests.graphs.toy import BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, MAX_TOKENS, fill

CPU = torch.device("cpu")
Array = TypeVar("Array")


@dataclass(frozen=True, kw_only=True)
class FurtherTensors(StepTensors[Array]):
    """Three more step tensors: one per token, one per row of logits, and a second block table."""

    sources: Annotated[Array, TensorSpec(sizes=(Size.tokens,), dtype=torch.int64, padding=5)]
    weights: Annotated[Array, TensorSpec(sizes=(Size.rows, 3), dtype=torch.float32)]
    other_table: Annotated[
        Array,
        TensorSpec(sizes=(Size.seqs, Size.blocks), dtype=torch.int32, upload=Upload.used_rows),
    ]


def make_buffers(max_num_rows: int | None = None) -> StaticBuffers:
    return StaticBuffers(
        max_num_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        device=CPU,
        max_num_rows=max_num_rows,
        table=FurtherTensors,
    )


class Reordered(DecoderLayer):
    """A layer that takes the hidden states in the order that the step tensor `sources` gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, DecoderLayer)
        self.layer = layer

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(step.tensors, FurtherTensors)
        hidden = F.embedding(step.tensors.sources, hidden)
        return self.layer(hidden, step, k_cache, v_cache, rows)

    def static_key(self) -> tuple[object, ...]:
        return ("reordered", *self.layer.static_key())


def fill_further(buffers: StaticBuffers, seed: int) -> tuple[int, int]:
    """Fill in a chunk of a prompt, a decoding sequence, and a random order in `sources`."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_seqs = fill(buffers, [(0, [3, 1, 4, 1, 5][: 2 + seed]), (5, [9])])
    host = buffers.host
    assert isinstance(host, FurtherTensors)
    host.sources[:num_tokens] = torch.randperm(num_tokens, generator=generator).numpy()
    return num_tokens, num_seqs


def hidden_states(program: CausalLM | Program, cache: KVCache) -> list[Tensor]:
    buffers, results = make_buffers(), []
    for seed in range(3):
        num_tokens, num_seqs = fill_further(buffers, seed)
        results.append(program(buffers.batch(num_tokens, num_seqs, num_seqs), cache).clone())
    return results


def test_buffers_and_padding_follow_from_the_table() -> None:
    buffers = make_buffers(max_num_rows=11)
    host, key = buffers.host, GraphKey(16, 4, 0)
    assert isinstance(host, FurtherTensors)
    assert host.sources.shape == (MAX_TOKENS,)
    assert host.logits_indices.shape == (11,)
    assert host.weights.shape == (11, 3)
    for _, array in given_tensors(host).values():
        array.fill(7)
    host.query_start_loc[2] = 6
    buffers.pad(6, 2, 1, key)
    assert host.sources[:17].tolist() == [7] * 6 + [5] * 10 + [7]
    assert host.weights[:, 0].tolist() == [7, 0, 0, 0] + [7] * 7
    assert host.other_table[:, 0].tolist() == [7, 7, 0, 0, 7, 7]
    assert host.query_start_loc[2:6].tolist() == [6, 6, 6, 7]
    batch = buffers.batch(16, 4, 9)
    assert isinstance(batch, FurtherTensors)
    assert batch.sources.tolist() == [7] * 6 + [5] * 10
    assert [len(batch.weights), len(batch.logits_indices), len(batch.other_table)] == [9, 9, 4]


@torch.inference_mode()
def test_programs_read_a_further_tensor_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is traced with a dynamic size, then called or replayed."""
    model, spec = packed()
    model.layers = nn.ModuleList(Reordered(layer) for layer in model.layers)
    traced: list[object] = []
    begin = model.begin
    monkeypatch.setattr(model, "begin", lambda batch: (traced.append(batch), begin(batch))[1])
    bind = compile_model(
        model, GraphForm.layer, make_buffers().batch(16, 3, 3), spec.allocate(4, CPU)
    )
    first, second, *_ = traced
    assert isinstance(first, FurtherTensors)
    assert isinstance(second, FurtherTensors)
    for name, (declared, one) in given_tensors(first).items():
        other = getattr(second, name)
        assert one.shape[1:] == other.shape[1:]
        assert (len(one) != len(other)) == (declared.dynamic_size is not None), name
        assert any(one is each for each in varying_in_batch(first)) == (len(one) != len(other))
    expected = hidden_states(model, spec.allocate(64, CPU))
    program = bind(model)
    with program.recording():
        replayed = hidden_states(program, spec.allocate(64, CPU))
    assert program.layers_by_program == {LayerProgram.captured: len(model.layers)}
    called = hidden_states(bind(model), spec.allocate(64, CPU))
    for one, two, three in zip(expected, replayed, called, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_marks_stand_for_tokens_that_only_the_device_has() -> None:
    buffers = StaticBuffers(
        max_num_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        device=CPU,
        async_tokens=True,
        max_drafts=3,
    )
    buffers.last_tokens[2] = 50
    buffers.store_drafts(0, torch.tensor([2]), torch.tensor([60]))
    buffers.store_drafts(2, torch.tensor([1, 2]), torch.tensor([70, 71]))
    marks = [buffers.draft_mark(row, place) for row in range(MAX_SEQS) for place in range(3)]
    assert len({*marks, *(-1 - row for row in range(MAX_SEQS))}) == 4 * MAX_SEQS
    ids = [-1 - 2, buffers.draft_mark(2, 0), 7, buffers.draft_mark(1, 2)]
    buffers.host.token_ids[:4] = ids
    buffers.host.logits_indices[:3] = [0, 2, 3]
    buffers.scatter_known_tokens(4)
    assert buffers.batch(4, 1, 3).token_ids.tolist() == [50, 60, 7, 70]
    assert buffers.following_tokens(2).tolist() == [60, 70]


class NoEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_an_upload_takes_small_tensors_whole_and_large_ones_by_used_rows() -> None:
    buffers = make_buffers()
    buffers._device_memory.fill_(9)
    memory = torch.full_like(buffers._device_memory, 7)
    buffers._current = buffers._current._replace(memory=memory, copied=NoEvent())  # type: ignore[arg-type]
    buffers.upload(2)
    device = buffers.batch(MAX_TOKENS, MAX_SEQS, MAX_SEQS)
    for name, (spec, tensor) in given_tensors(device).items():
        entries = tensor.reshape(len(tensor), -1).view(torch.uint8)
        found = [set(entry) for entry in entries.tolist()]
        match spec.upload:
            case Upload.whole:
                assert all(values == {7} for values in found), name
            case Upload.used_rows:
                assert found == [{7}] * 2 + [{9}] * (MAX_SEQS - 2), name
            case Upload.never:
                assert found == [{0}], name


def test_only_the_first_size_may_change_between_steps() -> None:
    with pytest.raises(ValueError, match="only the first"):
        TensorSpec(sizes=(3, Size.tokens), dtype=torch.int64)
