"""Each rank of a tensor-parallel group loads its part of a checkpoint; the parts make the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import LoadFormat, ModelSection
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.choose_weights import WeightsByRole
from ostinato.models.layers.linear_layers import LinearBase, MergedLinear
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")


def build(directory: Path, shard: Shard, weights: WeightsByRole, seed: int | None) -> LanguageModel:
    """A rank's model with the checkpoint's weights, or with dummy weights if there is a seed."""
    checkpoint = open_checkpoint(ModelSection(path=str(directory)))
    model = build_model(
        read_model_config(checkpoint),
        dtype=torch.float32,
        device=CPU,
        attention_backend="reference",
        weights=weights,
        shard=shard,
    )
    if seed is None:
        load_weights(model, checkpoint)
    else:
        init_dummy_weights(model, seed)
    return model


def joined(modules: list[LinearBase]) -> Tensor:
    """The whole matrix, joined from one module's parts on all ranks."""
    first = modules[0]
    if first.is_partial:
        return torch.cat([module.dense() for module in modules], 1)
    sizes = [[span.size for span in module.outputs] for module in modules]
    sides = [module.dense().split(size) for module, size in zip(modules, sizes, strict=True)]
    whole = []
    for index, span in enumerate(first.outputs):
        target = torch.empty(span.total, first.in_features)
        for module, parts in zip(modules, sides, strict=True):
            start, size, _ = module.outputs[index]
            target[start : start + size] = parts[index]
        whole.append(target)
    return torch.cat(whole)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("method", [Plain(), Packed(), Int4(8)])
@pytest.mark.parametrize(("name", "ranks"), [("llama-mqa", 4), ("phi3", 2), ("gpt2", 4)])
def test_the_parts_make_the_whole(
    tmp_path: Path, name: str, ranks: int, method: Packed | Plain | Int4, seed: int | None
) -> None:
    weights = WeightsByRole(layers=method, router=method, head=method, embedding=Plain())
    directory = save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path)
    whole = build(directory, WHOLE, weights, seed)
    parts = [build(directory, Shard(rank, ranks), weights, seed) for rank in range(ranks)]
    num_bytes = [sum(p.nbytes for p in model.layers.parameters()) for model in (whole, parts[0])]
    assert num_bytes[1] < num_bytes[0]
    for path, module in whole.named_modules():
        if not isinstance(module, LinearBase):
            continue
        submodules = [model.get_submodule(path) for model in parts]
        found = [part for part in submodules if isinstance(part, LinearBase)]
        assert len(found) == ranks
        # Groups of 8 columns lie within a rank's columns, so their scales equal those of the whole
        # matrix.
        assert torch.equal(joined(found), module.dense()), path
        if module.bias is not None and not isinstance(module, MergedLinear):
            biases = [part.bias for part in found if part.bias is not None]
            if found[0].is_partial:
                assert torch.equal(biases[0], module.bias)
                assert not any(bool(bias.any()) for bias in biases[1:])
            else:
                assert torch.equal(torch.cat(tuple(biases)), module.bias)


def test_the_heads_of_a_rank() -> None:
    settings = {**VARIANTS["llama3"].settings, "architectures": ["LlamaForCausalLM"]}
    config = read_model_config(
        open_checkpoint(ModelSection(load_format=LoadFormat.dummy, config=settings))
    )
    shard = Shard(1, 4)  # 4 query heads, 2 heads of keys and values
    assert config.kv_cache_spec(16, torch.float32, shard=shard).num_kv_heads == 1
    spec = config.attention_spec(16, torch.float32, CPU, shard=shard)
    assert (spec.num_heads, spec.num_kv_heads) == (1, 1)
    with pytest.raises(ValueError, match="num_attention_heads=4 cannot be divided among 3"):
        config.attention_spec(16, torch.float32, CPU, shard=Shard(0, 3))
