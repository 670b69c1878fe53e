"""Layers with recurrent mixers are captured, and replays leave the states of uncaptured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import GraphForm
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import LayerProgram
from ostinato.graphs.recorder import CpuRecorder
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.config.recurrent_spec import (
    DeltaSpec,
    RecurrentSpec,
    ShortConvSpec,
    StateSpaceSpec,
)
from ostinato.models.registry import build_model
from ostinato.ops.native.library import load
from ostinato.runtime.startup.plan.model_source import open_model
from tests.graphs.toy import BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, MAX_TOKENS, fill
from tests.runtime.tiny import MODEL, tiny_config

CPU = torch.device("cpu")
LAYERS = (True, False, True)
MIXERS: list[RecurrentSpec] = [
    DeltaSpec(layers=LAYERS, num_k_heads=2, num_v_heads=4, k_dim=16, v_dim=8, conv_width=4),
    ShortConvSpec(layers=LAYERS, channels=MODEL["hidden_size"], conv_width=3, has_bias=True),
    StateSpaceSpec(
        layers=LAYERS,
        num_heads=4,
        head_dim=8,
        state_size=16,
        num_groups=2,
        conv_width=4,
        has_conv_bias=True,
        has_bias=False,
        step_limits=(0.0, float("inf")),
        norm_eps=1e-6,
    ),
]
STEPS: list[tuple[list[tuple[int, list[int]]], list[tuple[int, ...]]]] = [
    ([(0, [3, 1, 4, 1, 5])], [(0, 1, 2, 3)]),
    ([(5, [9]), (0, [2, 6, 5])], [(1, 1, 0, 0), (0, 3, 0, 0)]),
    ([(6, [8]), (3, [7])], [(1, 4, 0, 0), (3, 3, 0, 0)]),
]
"""The sequences of each step, and their slots: (computed tokens, new tokens), a row of slots."""


def make_buffers() -> StaticBuffers:
    return StaticBuffers(
        max_num_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        device=CPU,
        has_states=True,
    )


def run(program, cache, steps=STEPS) -> Tensor:
    buffers = make_buffers()
    outputs = []
    for sequences, slots in steps:
        num_tokens, num_seqs = fill(buffers, sequences)
        assert buffers.host.state_slots is not None
        buffers.host.state_slots[:num_seqs] = slots
        outputs.append(program(buffers.batch(num_tokens, num_seqs, num_seqs), cache).clone())
    return torch.cat(outputs)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: type(mixer).__name__)
@torch.inference_mode()
def test_recurrent_layers_are_captured(mixer: RecurrentSpec) -> None:
    load("recurrent")
    values = {**MODEL, "num_hidden_layers": len(LAYERS)}
    source = open_model(tiny_config(model__config=values).engine)
    config = replace(source.config, recurrent=mixer)
    model = build_model(
        config,
        dtype=source.dtype,
        device=source.device,
        attention_backend="cpu",
        weights=source.weights,
    )
    init_dummy_weights(model, 0)
    spec = config.kv_cache_spec(BLOCK_SIZE, source.dtype)
    replayed, called, eager = (spec.allocate(64, CPU, 6) for _ in range(3))
    example = make_buffers().batch(16, 3, 3)
    program = compile_model(model, GraphForm.layer, example, spec.allocate(4, CPU, 2))(model)
    expected = run(model, eager)
    assert torch.equal(run(program, called), expected)
    assert program.layers_by_program == {LayerProgram.fx: len(LAYERS)}
    warm_up = [(STEPS[0][0], [(0, 0, 0, 0)])]
    CpuRecorder(program).capture(lambda: run(program, replayed, warm_up))
    assert program.layers_by_program == {LayerProgram.captured: len(LAYERS)}
    assert torch.equal(run(program, replayed), expected)
    for cache in (called, replayed):
        for sides, eager_sides in zip(cache, eager, strict=True):
            for written, expected_side in zip(sides, eager_sides, strict=True):
                assert torch.equal(written[1:], expected_side[1:])
