"""Steps played from a tape are the programs' steps, bit for bit."""

from __future__ import annotations

import msgspec
import pytest
import torch

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler import programs
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.cpu_capture import LayerCall, capture_layers
from ostinato.graphs.compiler.fx_program import FxProgram
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.registry import build_model
from ostinato.runtime.startup.planning import open_model
from tests.graphs.compiler.test_fx_program import Store, make_buffers, run
from tests.graphs.toy import fill
from tests.runtime.tiny import tiny_config


def packed(*overrides: str, backend: str = "cpu"):
    source = open_model(tiny_config(*overrides))
    model = build_model(
        source.config,
        dtype=source.dtype,
        device=source.device,
        attention_backend=backend,
        weights=source.weights,
    )
    init_dummy_weights(model, 0)
    return model, source.config.kv_cache_spec(8, source.dtype)


@pytest.mark.parametrize("overrides", [(), ("model.dtype=bfloat16",)])
@torch.inference_mode()
def test_played_steps_equal_called_ones(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spec = packed(*overrides)
    device = torch.device("cpu")
    bind = compile_model(
        model, GraphForm.layer, make_buffers().batch(16, 3, 3), spec.allocate(4, device)
    )
    played, called = spec.allocate(64, device), spec.allocate(64, device)
    program = bind(model)
    result = run(program, played)
    again = run(program, spec.allocate(64, device))  # another cache: another tape
    monkeypatch.setattr(programs, "_REPLAYED_TOKENS", 0)
    expected = run(bind(model), called)
    assert torch.equal(result, expected)
    assert torch.equal(again, expected)
    for sides in zip(played, called, strict=True):
        for cache, cache_expected in zip(*sides, strict=True):
            assert torch.equal(cache, cache_expected)


@torch.inference_mode()
def test_weights_that_are_written_in_place_are_read_anew() -> None:
    model, spec = packed()
    device = torch.device("cpu")
    store = Store()
    example = make_buffers().batch(16, 3, 3)
    program = compile_model(model, GraphForm.layer, example, spec.allocate(4, device), store)(model)
    before = run(program, spec.allocate(64, device))
    init_dummy_weights(model, 1)
    cache = spec.allocate(64, device)
    assert not torch.equal(run(program, cache), before)


@torch.inference_mode()
def test_only_a_program_that_was_recorded_is_known_to_have_no_loops() -> None:
    device = torch.device("cpu")
    for backend, has_loops in (("cpu", False), ("reference", True)):
        model, spec = packed(backend=backend)
        example = make_buffers().batch(16, 3, 3)
        bind = compile_model(model, GraphForm.layer, example, spec.allocate(4, device))
        program = bind(model)
        assert program.has_loops
        run(program, spec.allocate(64, device))
        assert program.has_loops == has_loops, backend


@torch.inference_mode()
def test_what_a_tape_can_not_hold_is_not_recorded() -> None:
    device = torch.device("cpu")
    for backend, is_recorded in (("cpu", True), ("reference", False)):
        model, spec = packed(backend=backend)
        store = Store()
        buffers = make_buffers()
        compile_model(
            model, GraphForm.layer, buffers.batch(16, 3, 3), spec.allocate(4, device), store
        )
        programs = [
            msgspec.msgpack.decode(content[1:], type=FxProgram) for content in store.files.values()
        ]
        num_tokens, num_seqs = fill(buffers, [(0, [3, 1])])
        hidden, step = model.begin(buffers.batch(num_tokens, num_seqs, num_seqs))
        layers = [
            LayerCall(
                programs[-1] if index == len(model.layers) - 1 else programs[0],
                [t.detach() for t in (*layer.parameters(), *layer.buffers())],
            )
            for index, layer in enumerate(model.layers)
        ]
        replay = capture_layers(layers, spec.allocate(64, device), hidden, step)
        assert (replay is not None) == is_recorded, backend


@torch.inference_mode()
def test_a_kernel_that_refuses_says_why() -> None:
    model, spec = packed()
    device = torch.device("cpu")
    example = make_buffers().batch(16, 3, 3)
    program = compile_model(model, GraphForm.layer, example, spec.allocate(4, device))(model)
    buffers = make_buffers()
    num_tokens, num_seqs = fill(buffers, [(0, [3, 1, 4])])
    buffers.host.slot_mapping[1] = 10**9
    with pytest.raises(ValueError, match="slot_mapping\\[1\\] = 1000000000 is outside"):
        program(buffers.batch(num_tokens, num_seqs, num_seqs), spec.allocate(64, device))
