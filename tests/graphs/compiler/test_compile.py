"""Both compiled forms equal the eager model, caches included, and copy no cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import Program
from ostinato.models.kv_cache import KVCache
from tests.graphs.toy import ToyModel, fill, make_buffers, make_cache

STEPS = [
    [(0, [3, 1, 4, 1, 5])],
    [(5, [9]), (0, [2, 6, 5, 3, 5, 8, 9, 7, 9])],
    [(6, [3]), (9, [2]), (0, [7])],
    [(0, list(range(40)))],
]


def run_steps(program: Program | ToyModel, kv_cache: KVCache) -> list[Tensor]:
    buffers = make_buffers()
    hidden = []
    for sequences, num_logits in zip(STEPS, (1, 2, None, 1), strict=True):
        num_tokens, num_seqs = fill(buffers, sequences)
        batch = buffers.batch(num_tokens, num_seqs, num_logits)
        hidden.append(program(batch, kv_cache).clone())
    return hidden


def compile_toy(model: ToyModel, form: GraphForm, kv_cache: KVCache) -> Program:
    bind = compile_model(model, form, make_buffers().batch(16, 3, 3), kv_cache)
    return bind(model)


@pytest.mark.parametrize("form", list(GraphForm))
@torch.inference_mode()
def test_compiled_equals_eager_in_hidden_states_and_caches(form: GraphForm) -> None:
    model = ToyModel()
    eager_cache, cache = make_cache(), make_cache()
    program = compile_toy(model, form, cache)
    expected, got = run_steps(model, eager_cache), run_steps(program, cache)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    for (k, v), (expected_k, expected_v) in zip(cache, eager_cache, strict=True):
        torch.testing.assert_close(k, expected_k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(v, expected_v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", list(GraphForm))
@torch.inference_mode()
def test_a_cache_of_another_size_is_written_at_the_right_place(form: GraphForm) -> None:
    """The tripwire for mutated views with symbolic sizes: layers would all write at offset 0.

    The outputs of such a step can look right, so the caches are what is compared.
    """
    model = ToyModel()
    program = compile_toy(model, form, make_cache(num_blocks=50))
    eager_cache, cache = make_cache(num_blocks=64), make_cache(num_blocks=64)
    run_steps(model, eager_cache)
    run_steps(program, cache)
    for (k, _), (expected, _) in zip(cache, eager_cache, strict=True):
        torch.testing.assert_close(k, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(cache[0][0], cache[1][0]), "layers hold different keys"


@pytest.mark.parametrize("form", list(GraphForm))
@torch.inference_mode()
def test_the_compiled_graph_clones_no_cache(
    form: GraphForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functionalisation must be undone: a clone would copy the whole cache every step."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_cache

    graphs: list[str] = []
    original = GraphLowering.codegen

    def codegen(self: GraphLowering) -> object:
        result = original(self)
        graphs.append(result[0].value if hasattr(result[0], "value") else str(result[0]))
        return result

    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    num_blocks = 61  # a number that nothing else in the generated code has
    with fresh_cache():
        compile_toy(ToyModel(), form, make_cache(num_blocks=num_blocks))
    assert len(graphs) == (1 if form is GraphForm.model else 2)  # the last layer is one of its own
    for code in graphs:
        assert "ostinato.paged_attention" in code
        assert "auto_functionalized" not in code
        allocations = [line for line in code.splitlines() if "empty_strided" in line]
        assert allocations, "the generated code allocates its temporaries by empty_strided"
        assert not [line for line in allocations if str(num_blocks) in line]


@torch.inference_mode()
def test_one_graph_serves_every_depth() -> None:
    from torch._dynamo.utils import counters

    graphs = []
    for depth in (2, 6):
        before = counters["stats"]["unique_graphs"]
        compile_model(
            ToyModel(depth),
            GraphForm.layer,
            make_buffers().batch(16, 3, 3),
            make_cache(depth),
        )
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs[0] == graphs[1] > 0
