"""Both compiled forms equal the eager model, caches included, and copy no cache."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import Program
from ostinato.models.kv_cache import KVCache
from tests.graphs.toy import ToyModel, fill, make_buffers, make_cache

COMPILE_BLOCKS = 61  # a number that nothing else in the generated code has
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


class Compiled(NamedTuple):
    """A model and its program, compiled beside a cache of `COMPILE_BLOCKS` blocks."""

    model: ToyModel
    form: GraphForm
    program: Program
    code: list[str]  # that Inductor wrote, a text for each graph


@pytest.fixture(scope="module", params=list(GraphForm))
def compiled(request: pytest.FixtureRequest) -> Compiled:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_cache

    code: list[str] = []
    original = GraphLowering.codegen

    def codegen(self: GraphLowering) -> object:
        result = original(self)
        code.append(result[0].value if hasattr(result[0], "value") else str(result[0]))
        return result

    model, form = ToyModel(), request.param
    example, cache = make_buffers().batch(16, 3, 3), make_cache(num_blocks=COMPILE_BLOCKS)
    with (
        pytest.MonkeyPatch.context() as patch,
        fresh_cache(),  # whose code would not be written again
        torch.inference_mode(),
    ):
        patch.setattr(GraphLowering, "codegen", codegen)
        program = compile_model(model, form, example, cache)(model)
    return Compiled(model, form, program, code)


# The second size shows mutated views with symbolic sizes: all layers would write at offset 0. The
# outputs of such a step can be right all the same, so the caches are compared too.
@pytest.mark.parametrize("num_blocks", [COMPILE_BLOCKS, 64])
@torch.inference_mode()
def test_compiled_equals_eager_in_hidden_states_and_caches(
    compiled: Compiled, num_blocks: int
) -> None:
    eager_cache, cache = make_cache(num_blocks=num_blocks), make_cache(num_blocks=num_blocks)
    expected, got = run_steps(compiled.model, eager_cache), run_steps(compiled.program, cache)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    for (k, v), (expected_k, expected_v) in zip(cache, eager_cache, strict=True):
        torch.testing.assert_close(k, expected_k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(v, expected_v, atol=1e-5, rtol=1e-5)
    assert not torch.equal(cache[0][0], cache[1][0]), "layers hold different keys"


def test_the_compiled_graph_clones_no_cache(compiled: Compiled) -> None:
    """Functionalisation must be undone: a clone would copy the whole cache every step."""
    # The last layer is one of its own.
    assert len(compiled.code) == (1 if compiled.form is GraphForm.model else 2)
    for code in compiled.code:
        assert "ostinato.paged_attention" in code
        assert "auto_functionalized" not in code
        allocations = [line for line in code.splitlines() if "empty_strided" in line]
        assert allocations, "the generated code allocates its temporaries by empty_strided"
        assert not [line for line in allocations if str(COMPILE_BLOCKS) in line]


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
