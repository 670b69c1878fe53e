"""Ranks read their parts of an adapter, and models from other sources read the same adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.models.adapters.adapter_files import AdapterError
from ostinato.models.adapters.peft_adapter import Adapter, read_adapter
from ostinato.models.layers.adapter_slots import ModuleAdapter
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.sharding import Shard, Span, Stage
from tests.models.adapters.peft_files import (
    MAX_RANK,
    build,
    check_merged,
    edit_tensors,
    load_base,
    matrices,
    product,
    save_adapter,
    save_base,
    save_merged,
    small,
)
from tests.models.gguf_files import write_gguf
from tests.models.traced.traced_variants import UNKNOWN

RANKS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama3", 2, {"target_modules": "all-linear"}),
    ("llama3", 4, {"target_modules": ["k_proj", "v_proj", "o_proj", "up_proj"]}),
    ("phi3", 2, {"target_modules": "all-linear"}),
    ("glm4", 2, {"target_modules": "all-linear"}),
    ("gpt-neox", 4, {"target_modules": "all-linear"}),
    ("gpt2", 2, {"target_modules": "all-linear"}),
    ("gptj", 2, {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}}),
    ("falcon-40b", 2, {"target_modules": "all-linear"}),
    ("deepseek-v2", 2, {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
    ("deepseek-v3", 4, {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
]


def put_together(parts: list[tuple[LinearBase, ModuleAdapter]]) -> Tensor:
    """The product of a whole module from those of the ranks; checks what several ranks hold."""
    first = parts[0][0]
    whole = torch.full((sum(span.total for span in first.outputs), first.inputs.total), torch.nan)
    for module, adapter in parts:
        own = product(module, adapter)
        begin = taken = 0
        for span in module.outputs:
            rows = slice(begin + span.start, begin + span.start + span.size)
            columns = slice(module.inputs.start, module.inputs.start + module.inputs.size)
            piece, place = own[taken : taken + span.size], whole[rows, columns]
            if not place.isnan().any():
                torch.testing.assert_close(place, piece)
            place.copy_(piece)
            begin, taken = begin + span.total, taken + span.size
    assert not whole.isnan().any()
    return whole


@pytest.mark.parametrize(("name", "world", "settings"), RANKS, ids=lambda value: str(value)[:12])
def test_the_parts_of_the_ranks_give_the_whole(
    tmp_path: Path, name: str, world: int, settings: dict[str, Any]
) -> None:
    variant = small(name, vocab_size=200)
    base = save_base(variant, tmp_path / "base")
    directory = save_adapter(variant, tmp_path / "adapter", **settings)
    models = [build(base, Shard(rank, world)) for rank in range(world)]
    parts = [read_adapter(directory, model, MAX_RANK) for model in models]
    whole = build(base, Shard())
    adapter = read_adapter(directory, whole, MAX_RANK)
    assert all(part.modules.keys() == adapter.modules.keys() for part in parts)
    assert {part.digest for part in parts} == {adapter.digest}
    for module_name, module in adapter.modules.items():
        of_ranks = [part.modules[module_name] for part in parts]
        assert all(each[2:] == module[2:] for each in of_ranks)
        modules = [matrices(model)[module_name] for model in models]
        torch.testing.assert_close(
            put_together(list(zip(modules, of_ranks, strict=True))),
            product(matrices(whole)[module_name], module),
            atol=1e-6,
            rtol=1e-5,
        )


def stages(base: Path) -> list[Any]:
    """The three layers of a model in two stages."""
    spans = (Span(0, 1, 3), Span(1, 2, 3))
    return [build(base, Shard(stage=Stage(n, 2, span))) for n, span in enumerate(spans)]


@pytest.mark.parametrize("name", ["llama3", "gpt2", "mpt"])
def test_a_stage_reads_its_layers(tmp_path: Path, name: str) -> None:
    variant = small(name)
    base = save_base(variant, tmp_path / "base")
    directory = save_adapter(variant, tmp_path / "adapter", target_modules="all-linear")
    whole = read_adapter(directory, build(base, Shard()), MAX_RANK).modules
    first, second = (read_adapter(directory, each, MAX_RANK).modules for each in stages(base))
    assert {name.split(".")[1] for name in first} == {"0"}
    assert {name.split(".")[1] for name in second} == {"1", "2"}
    assert (first | second).keys() == whole.keys()
    for module_name, module in (first | second).items():
        assert torch.equal(module.a, whole[module_name].a)
        assert torch.equal(module.b, whole[module_name].b)


def test_a_stage_without_any_module_of_the_adapter(tmp_path: Path) -> None:
    variant = small("llama3")
    base = save_base(variant, tmp_path / "base")
    directory = save_adapter(
        variant, tmp_path / "adapter", target_modules=["q_proj"], layers_to_transform=[0]
    )
    adapters: list[Adapter] = [read_adapter(directory, each, MAX_RANK) for each in stages(base)]
    assert adapters[0].modules.keys() == {"layers.0.self_attn.qkv_proj"}
    assert not adapters[1].modules
    assert adapters[0].digest == adapters[1].digest


def test_layers_that_no_stage_has_are_refused_by_all(tmp_path: Path) -> None:
    variant = small("llama3", num_hidden_layers=4)
    directory = save_adapter(variant, tmp_path / "adapter", target_modules=["q_proj"])
    base = save_base(small("llama3"), tmp_path / "base")
    for model in (*stages(base), build(base, Shard())):
        with pytest.raises(
            AdapterError, match=r"model\.layers\.3\.self_attn\.q_proj is not in the"
        ):
            read_adapter(directory, model, MAX_RANK)


def test_a_wrong_module_is_refused_by_the_stage_of_its_layer(tmp_path: Path) -> None:
    variant = small("llama3")
    directory = save_adapter(variant, tmp_path / "adapter", target_modules=r".*\.2\..*_proj")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("self_attn.q_proj", "other.q_proj")] = tensors.pop(name)

    edit_tensors(directory, rename)
    first, second = stages(save_base(variant, tmp_path / "base"))
    assert not read_adapter(directory, first, MAX_RANK).modules
    with pytest.raises(AdapterError, match=r"model\.layers\.2\.other\.q_proj is not in the model"):
        read_adapter(directory, second, MAX_RANK)


@pytest.mark.parametrize("name", ["llama3", "phi3"])
def test_a_base_model_from_a_gguf_file(tmp_path: Path, name: str) -> None:
    """Llama's queries and keys are permuted in the file."""
    variant = small(name)
    base = save_base(variant, tmp_path / "base")
    model = load_base(write_gguf(base, tmp_path / "base.gguf"))
    directory = save_adapter(variant, tmp_path / "adapter", target_modules="all-linear")
    merged = load_base(save_merged(variant, directory, tmp_path / "merged"))
    check_merged(model, read_adapter(directory, model, MAX_RANK).modules, merged)


@pytest.mark.parametrize("name", ["glm", "gpt_bigcode"])
def test_a_model_that_is_run_through_transformers(tmp_path: Path, name: str) -> None:
    variant = UNKNOWN[name]
    directory = save_adapter(variant, tmp_path / "adapter", target_modules="all-linear")
    model = load_base(save_base(variant, tmp_path / "base"))
    merged = load_base(save_merged(variant, directory, tmp_path / "merged"))
    check_merged(model, read_adapter(directory, model, MAX_RANK).modules, merged)
