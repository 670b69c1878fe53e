"""Loading: dtypes, stored forms, and checkpoints that do not fit their model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import LoadFormat, ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import CheckpointError, open_checkpoint
from ostinato.models.checkpoints.slots import find_slots
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.ops.linear.packed_linear import unpack_linear_weight
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Saved:
    """What transformers wrote for a variant: the JSON files by name, and the tensors."""

    small_files: dict[str, bytes]
    tensors: dict[str, Tensor]

    def write_small_files(self, directory: Path) -> Path:
        for name, content in self.small_files.items():
            (directory / name).write_bytes(content)
        return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Name of a variant -> its checkpoint, for the variants of this file."""
    everything = {}
    for name in ("gpt2", "llama-tied", "qwen2", "qwen3"):
        directory = tmp_path_factory.mktemp(name)
        save(reference_model(VARIANTS[name]), VARIANTS[name], directory)
        tensors = load_file(directory / "model.safetensors")
        small_files = {file.name: file.read_bytes() for file in directory.glob("*.json")}
        everything[name] = Saved(small_files, tensors)
    return everything


def load(directory: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    checkpoint = open_checkpoint(ModelSection(path=str(directory)))
    model = build_model(
        read_model_config(checkpoint), dtype=dtype, device=CPU, attention_backend="reference"
    )
    load_weights(model, checkpoint)
    assert isinstance(model, CausalLM)
    return model


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_and_converted(saved: dict[str, Saved], tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = saved["qwen2"].tensors
    save_file(tensors, saved["qwen2"].write_small_files(tmp_path) / "model.safetensors")
    parameters = dict(load(tmp_path, dtype).named_parameters())
    for kind in ("weight", "bias"):
        parts = [tensors[f"model.layers.1.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(
            parameters[f"layers.1.self_attn.qkv_proj.{kind}"], torch.cat(parts).to(dtype)
        )
    gate, up = (tensors[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    merged = parameters["layers.2.mlp.gate_up_proj.weight"]
    assert torch.equal(merged, torch.cat([gate, up]).to(dtype))
    assert {parameter.dtype for parameter in parameters.values()} == {dtype}


def test_transposed(saved: dict[str, Saved], tmp_path: Path) -> None:
    tensors = saved["gpt2"].tensors
    save_file(tensors, saved["gpt2"].write_small_files(tmp_path) / "model.safetensors")
    parameters = dict(load(tmp_path).named_parameters())
    stored = tensors["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(parameters["layers.0.mlp.up_proj.weight"], stored.T)


def test_old_checkpoints_without_prefix_and_with_masks(
    saved: dict[str, Saved], tmp_path: Path
) -> None:
    directory = saved["gpt2"].write_small_files(tmp_path)
    tensors = {
        name.removeprefix("transformer."): value for name, value in saved["gpt2"].tensors.items()
    }
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, directory / "model.safetensors")
    assert torch.equal(load(directory).get_parameter("embed_tokens.weight"), tensors["wte.weight"])


@pytest.mark.parametrize("new_format", [True, False])
def test_pickles_of_both_formats(saved: dict[str, Saved], tmp_path: Path, new_format: bool) -> None:
    directory = saved["qwen3"].write_small_files(tmp_path)
    file = directory / "pytorch_model.bin"
    torch.save(saved["qwen3"].tensors, file, _use_new_zipfile_serialization=new_format)
    weight = load(directory).get_parameter("lm_head.weight")
    assert torch.equal(weight, saved["qwen3"].tensors["lm_head.weight"])


def test_pickle_that_runs_code_is_refused(saved: dict[str, Saved], tmp_path: Path) -> None:
    directory = saved["qwen3"].write_small_files(tmp_path)
    torch.save({"model.norm.weight": Path("/")}, directory / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(directory)


def test_missing_tensor(saved: dict[str, Saved], tmp_path: Path) -> None:
    directory = saved["qwen3"].write_small_files(tmp_path)
    tensors = dict(saved["qwen3"].tensors)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    assert refusal(directory) == (
        f"{directory} lacks tensor model.layers.1.self_attn.k_proj.weight"
    )


def test_many_missing_tensors_are_counted(saved: dict[str, Saved], tmp_path: Path) -> None:
    directory = saved["qwen3"].write_small_files(tmp_path)
    save_file(
        {"lm_head.weight": saved["qwen3"].tensors["lm_head.weight"]},
        directory / "model.safetensors",
    )
    # 3 layers of 11 tensors, the embedding and the final norm
    assert refusal(directory).endswith(" and 30 more")


def test_unexpected_tensor(saved: dict[str, Saved], tmp_path: Path) -> None:
    directory = saved["qwen3"].write_small_files(tmp_path)
    tensors = {**saved["qwen3"].tensors, "model.layers.3.mlp.up_proj.weight": torch.zeros(2, 2)}
    save_file(tensors, directory / "model.safetensors")
    assert refusal(directory) == (
        f"{directory} has unexpected tensor model.layers.3.mlp.up_proj.weight"
    )


def test_a_bias_that_the_model_lacks_is_ignored_if_it_is_zero(
    saved: dict[str, Saved], tmp_path: Path
) -> None:
    """Checkpoints of AutoGPTQ have a bias of zeros for each matrix."""
    directory = saved["qwen3"].write_small_files(tmp_path)
    name = "model.layers.1.mlp.down_proj.bias"
    tensors = {**saved["qwen3"].tensors, name: torch.zeros(64, dtype=torch.float16)}
    save_file(tensors, directory / "model.safetensors")
    assert torch.equal(load(directory).get_parameter("lm_head.weight"), tensors["lm_head.weight"])
    tensors[name][3] = 1e-4
    save_file(tensors, directory / "model.safetensors")
    assert refusal(directory) == f"{directory} has unexpected tensor {name}"


@pytest.mark.parametrize(
    ("variant", "name", "shape", "expected"),
    [
        ("qwen3", "model.layers.0.self_attn.v_proj.weight", [48, 63], [48, 64]),
        ("qwen3", "model.embed_tokens.weight", [200, 64], [199, 64]),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", [256, 64], [64, 256]),
    ],
)
def test_wrong_shape(
    saved: dict[str, Saved],
    tmp_path: Path,
    variant: str,
    name: str,
    shape: list[int],
    expected: list[int],
) -> None:
    directory = saved[variant].write_small_files(tmp_path)
    save_file({**saved[variant].tensors, name: torch.zeros(shape)}, directory / "model.safetensors")
    assert refusal(directory) == f"{name} has shape {shape}, but the configuration needs {expected}"


def test_truncated_shard(saved: dict[str, Saved], tmp_path: Path) -> None:
    directory = saved["qwen3"].write_small_files(tmp_path)
    names = sorted(saved["qwen3"].tensors)
    shards = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for shard, members in shards.items():
        save_file({name: saved["qwen3"].tensors[name] for name in members}, directory / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    index = {"weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    load(directory)
    whole = (directory / "two.safetensors").read_bytes()
    for length in (len(whole) - 100, 100, 0):
        (directory / "two.safetensors").write_bytes(whole[:length])
        assert f"{directory / 'two.safetensors'} is truncated or not a weights file" in refusal(
            directory
        )


def test_one_tensor_for_two_weights_is_refused() -> None:
    """Otherwise one of the two weights would stay uninitialised."""
    checkpoint = open_checkpoint(ModelSection(path="", load_format=LoadFormat.dummy))
    model = build_model(
        read_model_config(checkpoint), dtype=torch.float32, device=CPU, attention_backend="cpu"
    )
    layout = replace(model.checkpoint_layout, renamed=(("attention_norm", "mlp_norm"),))
    with pytest.raises(ValueError, match=r"layers.0.mlp_norm.weight would fill two tensors"):
        find_slots(model, layout)


def test_integers_are_refused(saved: dict[str, Saved], tmp_path: Path) -> None:
    directory = saved["qwen3"].write_small_files(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    quantized = saved["qwen3"].tensors[name].to(torch.int8)
    save_file({**saved["qwen3"].tensors, name: quantized}, directory / "model.safetensors")
    assert refusal(directory).startswith(f"{name} has dtype torch.int8")


def test_stored_head_of_a_tied_model(saved: dict[str, Saved], tmp_path: Path) -> None:
    directory = saved["llama-tied"].write_small_files(tmp_path)
    embedding = saved["llama-tied"].tensors["model.embed_tokens.weight"]
    tensors = {**saved["llama-tied"].tensors, "lm_head.weight": embedding.clone()}
    save_file(tensors, directory / "model.safetensors")
    load(directory)
    tensors["lm_head.weight"] = embedding + 1
    save_file(tensors, directory / "model.safetensors")
    names = ("lm_head.weight", "model.embed_tokens.weight")
    assert refusal(directory) in [
        f"{one} differs from {other}, to which it is tied; set model.config.tie_word_embeddings=false"
        for one, other in (names, names[::-1])
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.weight", ""),  # a part of the matrix QKV
        ("model.layers.0.mlp.down_proj.weight", ", with different values"),
        ("model.norm.weight", ""),
    ],
)
def test_a_tensor_in_two_shards_is_named(
    saved: dict[str, Saved], tmp_path: Path, name: str, reason: str
) -> None:
    directory = saved["llama-tied"].write_small_files(tmp_path)
    tensors = saved["llama-tied"].tensors
    save_file(tensors, directory / "one.safetensors")
    save_file({name: tensors[name] + 1}, directory / "two.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "one.safetensors") | {name: "two.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(directory) == f"{name} is stored twice{reason}; remove it from one of the files"


def dummy(
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    pack: bool = False,
    variant: str = "gpt2",
    shard: Shard = WHOLE,
    **config: object,
) -> CausalLM:
    settings = {
        **VARIANTS[variant].settings,
        "architectures": ["GPT2LMHeadModel"],
        **config,
    }
    section = ModelSection(load_format=LoadFormat.dummy, config=settings)
    model = build_model(
        read_model_config(open_checkpoint(section)),
        dtype=dtype,
        device=CPU,
        attention_backend="reference",
        weights=choose_weights(
            section, open_checkpoint(section), pack=pack, device=CPU, dtype=dtype
        ),
        shard=shard,
    )
    init_dummy_weights(model, seed)
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights(dtype: torch.dtype) -> None:
    # The embedding is larger than the pool of random numbers, so it repeats them.
    model = dummy(0, dtype, vocab_size=50_000)
    weight = model.get_parameter("embed_tokens.weight").float()
    assert 0.019 < float(weight.std()) < 0.021
    assert len({tuple(row) for row in weight[::50].tolist()}) == 1000
    for module in model.modules():
        if isinstance(module, LayerNorm | RMSNorm):
            assert module.weight.unique().tolist() == [1.0]
    for name, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), name


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    one, again, other = dummy(3), dummy(3), dummy(4)
    name = "layers.2.mlp.down_proj.weight"
    assert torch.equal(one.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))


def test_ranks_have_parts_of_the_same_dummy_weights() -> None:
    family = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 200}
    whole, *ranks = (
        dummy(0, variant="gpt-oss", shard=shard, **family)
        for shard in (WHOLE, Shard(0, 2), Shard(1, 2))
    )
    name = "layers.0.mlp.experts.down_proj"  # experts with biases; a rank has half of the columns
    columns = [model.get_parameter(f"{name}.weight") for model in ranks]
    assert torch.equal(torch.cat(columns, 2), whole.get_parameter(f"{name}.weight"))
    bias = whole.get_parameter(f"{name}.bias")
    assert torch.equal(ranks[0].get_parameter(f"{name}.bias"), bias)


def test_packed_weights_are_the_plain_ones_in_another_order() -> None:
    plain = dict(dummy(0, torch.bfloat16).named_parameters())
    model = dummy(0, torch.bfloat16, pack=True)
    packed = dict(model.named_parameters())
    assert packed.keys() == plain.keys()
    methods = {n: m.method for n, m in model.named_modules() if isinstance(m, LinearBase)}
    assert sum(method == Packed() for method in methods.values()) == 13
    for name, parameter in plain.items():
        if methods.get(name.removesuffix(".weight")) == Packed():
            unpacked = unpack_linear_weight(packed[name], *parameter.shape)
            assert torch.equal(unpacked, parameter), name
        else:
            assert torch.equal(packed[name], parameter), name
    assert methods["embed_positions"] == Plain()  # an embedding's rows are looked up


def test_float16_stays_unpacked() -> None:
    model = dummy(0, torch.float16, pack=True)
    matrices = [module for module in model.modules() if isinstance(module, LinearBase)]
    assert {module.method for module in matrices} == {Plain()}
    assert model.get_parameter("embed_tokens.weight").shape == (199, 64)
