"""`model.quantization_head`: a checkpoint's head of floats is quantised while it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import HeadQuantization, ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_methods.int8 import Int8
from ostinato.models.weight_methods.weight_method import MatrixRole, MatrixSpec
from ostinato.models.weight_policy import WeightPolicy
from ostinato.ops.quantized import quantize_linear_weight
from tests.models.driver import Driver, Sequence
from tests.models.quantized_checkpoints.loading import load, matrices
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")
PROMPT = [(11 * index * index + 3 * index + 1) % 199 for index in range(31)]
LARGE = MatrixSpec(5000, 64, torch.float32, CPU)
SMALL = LARGE._replace(out_features=512)


def logits_of(model: CausalLM, config: ModelConfig) -> Tensor:
    return Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [len(PROMPT)])


@pytest.mark.parametrize("name", ["qwen2", "llama-tied"])
@pytest.mark.parametrize(
    "form", [None, Form("gptq", act_order=True), Form("awq", symmetric=False), Form("fp8", bits=8)]
)
def test_only_the_head_changes(tmp_path: Path, name: str, form: Form | None) -> None:
    floats = save(reference_model(VARIANTS[name]), VARIANTS[name].as_one_file(), tmp_path / "plain")
    directory = floats
    if form is not None:
        directory = tmp_path / "quantised"
        write(floats, directory, form)
    stored, config = load(directory)
    model, _ = load(directory, quantization_head=HeadQuantization.int8)
    own, others = matrices(model), matrices(stored)
    changed = {each for each in own if own[each].method != others[each].method}
    assert changed == ({"embed_tokens"} if name == "llama-tied" else {"lm_head"})
    for each in own.keys() - changed:
        for key, weight in own[each].weights.items():
            assert torch.equal(weight, others[each].weights[key]), each
    head, plain = (each[next(iter(changed))] for each in (own, others))
    assert head.method == Int8()
    expected = quantize_linear_weight(plain.dense(), Int8().form(head.spec))
    assert torch.equal(head.weights["weight"], expected)
    rounded, exact = logits_of(model, config), logits_of(stored, config)
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.1


def chosen(checkpoint: Checkpoint, **keys: object) -> WeightPolicy:
    section = ModelSection(**keys)  # type: ignore[arg-type]
    return choose_weights(section, checkpoint, pack=True, device=CPU, dtype=torch.float32)


def test_the_method_of_each_role() -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    checkpoint = Checkpoint(
        path=None, hf_config={"quantization_config": stated}, generation_config={}
    )
    as_stored = chosen(checkpoint)
    policy = chosen(checkpoint, quantization_head=HeadQuantization.int4, quantization_group_size=64)
    assert policy.quantization == f"{as_stored.quantization}; head int4 in groups of 64"
    assert repr(policy) != repr(as_stored)  # the key of compiled programs has it
    for role, spec, names in (
        (MatrixRole.layer, LARGE, ("model.layers.0.mlp.down_proj",)),
        (MatrixRole.router, LARGE, ("model.layers.0.mlp.gate",)),
        (MatrixRole.embedding, SMALL, ("model.embed_positions",)),
    ):
        assert policy.method_for(names, role, spec) == as_stored.method_for(names, role, spec)
    for role in (MatrixRole.head, MatrixRole.tied, MatrixRole.embedding):
        assert policy.method_for(("lm_head",), role, LARGE) == Int4(64)


def test_a_quantised_head_is_not_quantised_again() -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    checkpoint = Checkpoint(
        path=None, hf_config={"quantization_config": stated}, generation_config={}
    )
    policy = chosen(checkpoint, quantization_head=HeadQuantization.int8)
    with pytest.raises(ValueError, match=r"output head is quantised already .*int4 in groups of"):
        policy.method_for(("lm_head",), MatrixRole.head, LARGE)
