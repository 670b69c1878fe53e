"""Replayed steps equal uncaptured ones bit for bit; the log names layers that are not captured."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.fx_program import FxFunction
from ostinato.graphs.compiler.programs import LayeredProgram, LayerProgram
from ostinato.graphs.recorder import CpuRecorder
from ostinato.models.base import DecoderLayer
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.decoder import DecoderBlock
from ostinato.models.registry import build_model
from ostinato.models.step_tensors import StepInputs
from ostinato.runtime.startup.plan.model_source import open_model
from tests.graphs.compiler.test_fx_program import Store, make_buffers, run
from tests.graphs.toy import fill
from tests.runtime.tiny import MODEL, tiny_config

CPU = torch.device("cpu")


def packed(*overrides: str, backend: str = "cpu", **values: object):
    source = open_model(tiny_config(*overrides, **values).engine)
    model = build_model(
        source.config,
        dtype=source.dtype,
        device=source.device,
        attention_backend=backend,
        weights=source.weights,
    )
    init_dummy_weights(model, 0)
    return model, source.config.kv_cache_spec(8, source.dtype)


def compiled(model, spec, store: Store | None = None):
    """The layered program of a model."""
    example = make_buffers().batch(16, 3, 3)
    return compile_model(model, GraphForm.layer, example, spec.allocate(4, CPU), store)(model)


def capture(program, cache) -> None:
    """Record a step of one sequence with one token."""
    buffers = make_buffers()
    num_tokens, num_seqs = fill(buffers, [(0, [3])])
    batch = buffers.batch(num_tokens, num_seqs, num_seqs)
    CpuRecorder(program).capture(lambda: program(batch, cache))


@pytest.mark.parametrize("overrides", [(), ("model.dtype=bfloat16",)])
@torch.inference_mode()
def test_replayed_steps_equal_called_ones(overrides: tuple[str, ...]) -> None:
    model, spec = packed(*overrides)
    replayed, called = spec.allocate(64, CPU), spec.allocate(64, CPU)
    program = compiled(model, spec)
    expected = run(program, called)
    assert program.layers_by_program == {LayerProgram.fx: len(model.layers)}
    capture(program, replayed)
    assert program.layers_by_program == {LayerProgram.captured: len(model.layers)}
    assert torch.equal(run(program, replayed), expected)
    assert torch.equal(run(program, spec.allocate(64, CPU)), expected)  # a cache without a graph
    for sides in zip(replayed, called, strict=True):
        for cache, cache_expected in zip(*sides, strict=True):
            assert torch.equal(cache[1:], cache_expected[1:])


@torch.inference_mode()
def test_weights_that_are_written_in_place_are_read_anew() -> None:
    model, spec = packed()
    program, cache = compiled(model, spec), spec.allocate(64, CPU)
    capture(program, cache)
    before = run(program, cache)
    init_dummy_weights(model, 1)
    assert not torch.equal(run(program, cache), before)


@torch.inference_mode()
def test_a_layer_that_is_not_captured_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    model, spec = packed(backend="reference")
    program, cache = compiled(model, spec), spec.allocate(64, CPU)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            capture(program, cache)
    reasons = [record.message for record in caplog.records if "not captured" in record.message]
    last = len(model.layers) - 1
    assert reasons == [
        f"layers 0 to {last} are not captured: attention runs on the backend reference"
    ]
    assert program.layers_by_program == {LayerProgram.fx: len(model.layers)}
    assert program.has_loops


@torch.inference_mode()
def test_layers_between_those_that_are_not_captured_are(caplog: pytest.LogCaptureFixture) -> None:
    """A layer that no CPU graph can hold does not keep the others from being captured."""
    model, spec = packed(model__config={**MODEL, "num_hidden_layers": 4})
    example = make_buffers().batch(16, 3, 3)
    bind = compile_model(model, GraphForm.layer, example, spec.allocate(4, CPU))
    expected = run(bind(model), spec.allocate(64, CPU))
    cases = {
        "layer 1 is": [1],
        "layer 0 is": [0],
        "layer 3 is": [3],
        "layers 1, 3 are": [1, 3],
        "layers 0 to 3 are": [0, 1, 2, 3],
    }
    for words, others in cases.items():
        program, cache = bind(model), spec.allocate(64, CPU)
        assert isinstance(program, LayeredProgram)
        calls = list(program._calls)
        for index in others:
            function, parameters = calls[index]
            assert isinstance(function, FxFunction)
            opaque = msgspec.structs.replace(function.program, obstacle="the test forbids it")
            calls[index] = FxFunction(opaque), parameters
        program = LayeredProgram(model, calls)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                capture(program, cache)
        reasons = [one.message for one in caplog.records if "not captured" in one.message]
        assert reasons == [f"{words} not captured: the test forbids it"]
        counts = {LayerProgram.captured: 4 - len(others), LayerProgram.fx: len(others)}
        assert program.layers_by_program == {way: count for way, count in counts.items() if count}
        assert program.has_loops
        for _ in range(2):
            assert torch.equal(run(program, cache), expected)


@torch.inference_mode()
def test_a_kernel_that_refuses_says_why() -> None:
    model, spec = packed()
    program, cache = compiled(model, spec), spec.allocate(64, CPU)
    capture(program, cache)
    buffers = make_buffers()
    num_tokens, num_seqs = fill(buffers, [(0, [3, 1, 4])])
    buffers.host.slot_mapping[1] = 10**9
    with pytest.raises(ValueError, match="slot_mapping\\[1\\] = 1000000000 is outside"):
        program(buffers.batch(num_tokens, num_seqs, num_seqs), cache)


@torch.inference_mode()
def test_the_profiler_sees_every_kernel_of_a_replay() -> None:
    model, spec = packed()
    program, cache = compiled(model, spec), spec.allocate(64, CPU)
    capture(program, cache)
    buffers = make_buffers()
    num_tokens, num_seqs = fill(buffers, [(0, [3, 1, 4])])
    batch = buffers.batch(num_tokens, num_seqs, num_seqs)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        program(batch, cache)
    counts = {event.key: event.count for event in profiler.key_averages()}
    layers = len(model.layers)
    assert counts["ostinato::paged_attention"] == layers
    assert counts["ostinato::rotate_heads"] == layers
    assert counts["ostinato::packed_gated_linear"] == layers
    assert counts["ostinato::packed_linear"] == 3 * layers
    assert counts["ostinato::rms_norm"] == 2 * layers + 1  # the last one is the model's


class CappedLayer(DecoderLayer):
    """A Llama layer. Torch ops scale its input, if `scale` is not 1, and cap its output."""

    def __init__(self, layer: DecoderBlock, scale: float) -> None:
        super().__init__()
        self.layer = layer
        self.scale = scale

    def static_key(self) -> tuple[object, ...]:
        return ("capped", self.scale, *self.layer.static_key())

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        scaled = hidden if self.scale == 1.0 else hidden * self.scale
        hidden = self.layer(scaled, step, k_cache, v_cache, rows)
        return torch.tanh(hidden / 30.0) * 30.0


# Inductor's compiler takes most of the time: 10 to 15 s for each program.
@pytest.mark.parametrize(
    ("scale", "programs"),
    [
        (1.0, ["truediv, tanh, mul"]),
        pytest.param(0.75, ["mul", "truediv, tanh, mul"], marks=pytest.mark.slow),
    ],
    ids=["after", "before and after"],
)
@torch.inference_mode()
def test_torch_ops_between_ours_join_the_captured_step(
    scale: float, programs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, spec = packed("model.dtype=bfloat16")
    layers = [layer for layer in model.layers if isinstance(layer, DecoderBlock)]
    model.layers = nn.ModuleList(CappedLayer(layer, scale) for layer in layers)
    store = Store()
    with caplog.at_level(logging.INFO):
        program = compiled(model, spec, store)
    compiles = [record.message for record in caplog.records if "Inductor" in record.message]
    assert compiles == [f"Inductor compiles {names}" for names in programs]
    called = run(program, spec.allocate(64, CPU))
    torch.testing.assert_close(called, run(model, spec.allocate(64, CPU)))
    warm = compiled(model, spec, store)
    assert store.rejected == []
    cache = spec.allocate(64, CPU)
    capture(warm, cache)
    assert warm.layers_by_program == {LayerProgram.captured: len(model.layers)}
    assert warm.has_loops  # Inductor's code, which runs on one thread in small steps
    for _ in range(3):
        assert torch.equal(run(warm, cache), called)
