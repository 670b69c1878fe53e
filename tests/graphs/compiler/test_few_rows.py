"""A layer's program for steps of few rows: its calls, its results, and the steps that use it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.compiler.compile import _Traced
from ostinato.graphs.compiler.compiled_piece import PieceCompiler
from ostinato.graphs.compiler.dynamo_trace import example_batch, module_tensors
from ostinato.graphs.compiler.functions import is_portable
from ostinato.graphs.compiler.fx_program import FxFunction
from ostinato.graphs.compiler.programs import FewRowsCall, LayeredProgram
from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.choose_weights import PLAIN
from ostinato.models.kv_cache import KVCache
from ostinato.models.layers.few_rows import MOST_EXPERT_ROWS, MOST_QUANTIZED_ROWS
from ostinato.models.registry import build_model, model_class
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_policy import WeightPolicy
from ostinato.ops.fused.fused_linear import most_rows
from tests.graphs.compiler.test_fx_program import Store
from tests.graphs.toy import fill
from tests.runtime.tiny import MODEL

CPU = torch.device("cpu")
MOST_ROWS = most_rows(torch.float32)
QWEN3 = {**MODEL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
EXPERTS = {
    **MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SHARED_EXPERT = {
    **EXPERTS,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 32,
}
ATTENTION = ["scale_rows", "fused_linear", "rotary_attention"]
DENSE = [*ATTENTION, "linear_and_scale", "fused_linear", "fused_linear"]


def build(
    hf_config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    weights: WeightPolicy = PLAIN,
) -> tuple[CausalLM, Any]:
    config = model_class(hf_config["architectures"][0]).read_config(hf_config)
    model = build_model(
        config, dtype=dtype, device=CPU, attention_backend="reference", weights=weights
    )
    init_dummy_weights(model, 0)
    assert isinstance(model, CausalLM)
    return model, config


def make_buffers() -> StaticBuffers:
    return StaticBuffers(
        max_num_tokens=2 * MOST_EXPERT_ROWS,
        max_num_seqs=4,
        max_blocks_per_seq=16,
        block_size=8,
        device=CPU,
    )


def few_calls(model: CausalLM, cache: KVCache, store: Store) -> list[FewRowsCall]:
    example = make_buffers().batch(16, 2, 2)
    calls = []
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        few = layer.few_rows()
        assert few is not None
        traced = _Traced(
            few,
            lambda: [model.begin(example_batch(example, is_second=each)) for each in (False, True)],
            cache[index],
            str(index),
            index == last,
        )
        function = traced.compile(store, PieceCompiler(), calls_own_ops=True)
        assert isinstance(function, FxFunction)
        calls.append(FewRowsCall(function, list(module_tensors(few).values()), few.most_tokens))
    return calls


@pytest.mark.parametrize(
    ("hf_config", "ops"),
    [
        (MODEL, DENSE),
        (QWEN3, DENSE),
        (EXPERTS, ["norm_linear", "rotary_attention", "fused_experts"]),
    ],
    ids=["llama", "qwen3", "experts"],
)
@torch.inference_mode()
def test_a_layer_is_few_calls_of_ops(hf_config: dict[str, Any], ops: list[str]) -> None:
    """Each layer's program calls exactly `ops`, and its results equal those of the model."""
    model, config = build(hf_config)
    spec = config.kv_cache_spec(8, torch.float32)
    cache, expected_cache = spec.allocate(80, CPU), spec.allocate(80, CPU)
    store = Store()
    calls = few_calls(model, cache, store)
    assert all(map(is_portable, store.files.values()))
    for function, _, most_tokens in calls:
        assert isinstance(function, FxFunction)
        assert most_tokens == (MOST_EXPERT_ROWS if hf_config is EXPERTS else MOST_ROWS)
        found = re.findall(r"\bop_(\w+)\(", function.program.source)
        assert found == ops
        assert function.pieces == []

    def larger(*arguments: Any) -> Tensor:
        raise AssertionError("the program of larger steps is called")

    program = LayeredProgram(model, [(larger, [])] * len(calls), calls)
    buffers = make_buffers()
    steps: list[list[tuple[int, list[int]]]] = [
        [(0, list(range(3, 43))), (0, [5, 6, 7])],
        [(40, [9]), (3, [11])],
        [(41, [2, 3, 4]), (4, [8])],
    ]
    for step in steps:
        num_tokens, num_seqs = fill(buffers, step)
        batch = buffers.batch(num_tokens, num_seqs, num_seqs)
        torch.testing.assert_close(
            program(batch, cache), model(batch, expected_cache), atol=1e-5, rtol=1e-5
        )
    with pytest.raises(AssertionError, match="the program of larger steps"):
        program(buffers.batch(calls[0].most_tokens + 1, 1, 1), cache)


@torch.inference_mode()
def test_a_layer_of_quantised_weights() -> None:
    """Its program has the calls of plain weights; steps of up to 256 tokens run it.

    On a CPU its results differ from those of the model, which rounds activations
    (tests/ops/fused/interpreted_fused_quantized.py compares results).
    """
    model, config = build(MODEL, weights=replace(PLAIN, layers=Int4()))
    cache = config.kv_cache_spec(8, torch.float32).allocate(80, CPU)
    for function, _, most_tokens in few_calls(model, cache, Store()):
        assert isinstance(function, FxFunction)
        product = "fused_quantized_linear"
        expected = ["scale_rows", product, "rotary_attention", product, product, product]
        assert re.findall(r"\bop_(\w+)\(", function.program.source) == expected
        assert most_tokens == MOST_QUANTIZED_ROWS


def test_each_layer_has_a_limit_of_its_own() -> None:
    model, _ = build(MODEL)
    names = ["large 0", "large 1"], ["small 0", "small 1"]
    calls, few = ([(lambda *_, name=name: name, []) for name in each] for each in names)
    few = [FewRowsCall(*call, most) for call, most in zip(few, (8, 32), strict=True)]
    program = LayeredProgram(model, calls, few)
    found = {n: [function() for function, _ in program._calls_of(n)] for n in (8, 9, 32, 33)}
    middle = ["large 0", "small 1"]
    assert found == {8: names[1], 9: middle, 32: middle, 33: names[0]}


@pytest.mark.parametrize(
    ("hf_config", "dtype"),
    [
        (MODEL, torch.float16),
        ({**MODEL, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, torch.float32),
        ({**MODEL, "architectures": ["CohereForCausalLM"], "model_type": "cohere"}, torch.float32),
        (SHARED_EXPERT, torch.float32),
    ],
    ids=["float16", "post-norm", "layer norm", "shared expert"],
)
def test_layers_without_such_a_form(hf_config: dict[str, Any], dtype: torch.dtype) -> None:
    model, _ = build(hf_config, dtype)
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer)
    assert layer.few_rows() is None
