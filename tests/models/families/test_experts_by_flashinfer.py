"""Models with graphs.experts=flashinfer. On the CPU of these tests its op runs in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import ExpertKernels, ModelSection, Quantization
from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.moe import Experts, MoE
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from tests.live_bytes import LiveBytes
from tests.models.driver import Driver, Sequence
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(30)]


def saved(name: str, directory: Path) -> Path:
    variant = VARIANTS[name]
    return save(reference_model(variant), variant, directory)


def build(
    directory: Path,
    experts: ExpertKernels = ExpertKernels.flashinfer,
    *,
    quantization: Quantization = Quantization.none,
    pack: bool = False,
    shard: Shard = WHOLE,
    **changes: object,
) -> tuple[CausalLM, ModelConfig]:
    """The model before its weights are loaded; `changes` replace fields of its configuration."""
    section = ModelSection(path=str(directory), quantization=quantization)
    checkpoint = open_checkpoint(section)
    config = replace(read_model_config(checkpoint), **changes)  # type: ignore[arg-type]
    weights = choose_weights(section, checkpoint, pack=pack, device=CPU, dtype=torch.float32)
    model = build_model(
        config,
        dtype=torch.float32,
        device=CPU,
        attention_backend="reference",
        weights=weights,
        shard=shard,
        experts=experts,
    )
    assert isinstance(model, CausalLM)
    return model, config


def load(directory: Path, experts: ExpertKernels, shard: Shard = WHOLE) -> CausalLM:
    model, _ = build(directory, experts, shard=shard)
    load_weights(model, open_checkpoint(ModelSection(path=str(directory))))
    return model


def logits(directory: Path, experts: ExpertKernels) -> Tensor:
    _, config = build(directory, experts)
    return Driver(load(directory, experts), config).prefill(Sequence(PROMPT), [len(PROMPT)])


def experts_of(model: CausalLM) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


# These families have every order of an expert's rows in checkpoints, biases, shared experts, and
# every kind of routing but one: softmax scores in groups (`deepseek-v2-groups`).
FAMILIES = [
    *("qwen3-moe-mixed", "gpt-oss", "granitemoe", "deepseek-v3"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("glm4-moe", "llama4", "mixtral", "olmoe", "qwen2-moe")
    ),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_result_is_that_of_our_kernels(name: str, tmp_path: Path) -> None:
    directory = saved(name, tmp_path)
    ours = logits(directory, ExpertKernels.auto)
    torch.testing.assert_close(
        logits(directory, ExpertKernels.flashinfer), ours, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["qwen3-moe-mixed", "gpt-oss"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_up_comes_before_gate_and_no_copy_is_kept(name: str, ranks: int, tmp_path: Path) -> None:
    """One family stores experts one by one, the other stacked, with gate and up in turns."""
    directory = saved(name, tmp_path)
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        ours = experts_of(load(directory, ExpertKernels.auto, shard))
        model, _ = build(directory, shard=shard)
        size = sum(tensor.nbytes for tensor in model.parameters())
        with LiveBytes() as live:
            load_weights(model, open_checkpoint(ModelSection(path=str(directory))))
        theirs = experts_of(model)
        assert size == sum(tensor.nbytes for tensor in model.parameters())
        one = max(each.nbytes for each in model.parameters())  # a matrix of all experts of a layer
        assert live.peak < one
        assert len(ours) == len(theirs) > 0
        for our, their in zip(ours, theirs, strict=True):
            for tensor, swapped in (
                (our.gate_up_proj.weights["weight"], their.gate_up_proj.weights["weight"]),
                (our.gate_up_proj.bias, their.gate_up_proj.bias),
            ):
                assert (tensor is None) == (swapped is None)
                if tensor is not None and swapped is not None:
                    gate, up = tensor.chunk(2, 1)
                    assert torch.equal(swapped, torch.cat((up, gate), 1))
            assert torch.equal(our.down_proj.dense(), their.down_proj.dense())


def test_a_compiled_layer_calls_one_op(tmp_path: Path) -> None:
    """One graph serves any number of tokens, and the host reads no result within it."""
    model = load(saved("gpt-oss", tmp_path), ExpertKernels.flashinfer)
    moe = next(module for module in model.modules() if isinstance(module, MoE))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(moe, backend=keep, fullgraph=True, dynamic=True)
    for tokens in (5, 12):
        x, residual = torch.randn(tokens, 64), torch.randn(tokens, 64)
        with torch.inference_mode():
            assert torch.equal(compiled(x, residual), moe(x, residual))
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in called if "ostinato" in name and "linear" not in name] == [
        "ostinato.route.default",
        "ostinato.flashinfer_experts.default",
    ]


def test_the_choice_is_part_of_the_program_and_small_steps_take_it_too(tmp_path: Path) -> None:
    directory = saved("qwen3-moe-mixed", tmp_path)
    ours, theirs = (build(directory, experts)[0].layers[1] for experts in ExpertKernels)
    assert isinstance(ours, DecoderLayer)
    assert isinstance(theirs, DecoderLayer)
    assert ours.static_key() != theirs.static_key()
    assert ours.few_rows() is not None
    assert theirs.few_rows() is None


def test_what_the_kernels_cannot_do_is_refused(tmp_path: Path) -> None:
    directory = saved("qwen3-moe-mixed", tmp_path)
    for quantization, pack, method in (
        (Quantization.int8, True, r"int8 .*"),
        (Quantization.none, True, r"packed .*"),
    ):
        with pytest.raises(
            ValueError, match=rf"needs unquantized weights, but the model's are {method}"
        ):
            build(directory, quantization=quantization, pack=pack)
    with pytest.raises(
        ValueError,
        match=r"^graphs.experts=flashinfer has the gated activations silu, .*, but the model has relu "
        r"\(layers.1.mlp.experts\); leave it at auto$",
    ):
        build(directory, activation="relu")
    with pytest.raises(ValueError, match="intermediate size on this rank is 4 "):
        build(directory, shard=Shard(0, 8), num_heads=8, num_kv_heads=8)
    with pytest.raises(
        ValueError,
        match=r"flashinfer takes one input for all experts of a token, but this model scales the "
        r"input for each of 2 experts; leave graphs\.experts at auto",
    ):
        build(saved("llama4-two-experts", tmp_path / "llama4"))
