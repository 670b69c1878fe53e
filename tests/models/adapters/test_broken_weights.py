"""Weights files that are broken or do not fit the model: each error names what is wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ostinato.models.adapters.adapter_files import AdapterError
from ostinato.models.adapters.peft_adapter import read_adapter
from ostinato.models.adapters.targets import Targets
from ostinato.models.base import CausalLM
from ostinato.models.registry import build_model
from tests.models.adapters.breaking import (
    Break,
    as_pickle,
    check_refused,
    config,
    extra,
    header,
    moved,
    tensor,
    tensors,
    weights,
)
from tests.models.adapters.peft_files import (
    MAX_RANK,
    ONE_LAYER,
    build,
    save_adapter,
    save_base,
    small,
)
from tests.models.config_json.test_config import OF_FAMILY, read

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
UP = "base_model.model.model.layers.0.mlp.up_proj.lora_"
MERGE = "merge the adapter into the model with PEFT's merge_and_unload"

ONE = '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
BROKEN: dict[str, tuple[Break, str]] = {
    # weights files
    "empty file": (
        weights(b""),
        "is truncated or not a weights file: a header of 0 bytes is not in",
    ),
    "a page of HTML": (
        weights(b"<html>not found</html>"),
        "is truncated or not a weights file: a he",
    ),
    "header is not JSON": (
        header("nonsense"),
        "is truncated or not a weights file: Expecting value",
    ),
    "header is a list": (
        header("[]"),
        "adapter_model.safetensors is truncated or not a weights file",
    ),
    "header is deep": (
        header("[" * 100_000),
        "is truncated or not a weights file: maximum recursion",
    ),
    "no tensors": (header("{}"), "adapter_model.safetensors has no tensors; copy the file again"),
    "only metadata": (
        header('{"__metadata__": {}}'),
        "adapter_model.safetensors has no tensors; co",
    ),
    "data is missing": (header(ONE + "}"), "weights file: tensor a ends after the end of the file"),
    "wrong offsets": (
        header(ONE.replace("[0, 4]", "[0, 8]") + "}", bytes(8)),
        "tensor a has wrong of",
    ),
    "a gap": (
        header(ONE.replace("[0, 4]", "[4, 8]") + "}", bytes(8)),
        "tensor a has wrong offsets",
    ),
    "unknown dtype": (
        header(ONE.replace("F32", "F7") + "}", bytes(4)),
        "tensor a has the unknown dty",
    ),
    "a tensor twice": (
        header(ONE + ONE.replace("{", ", ", 1) + "}", bytes(4)),
        "names a twice; copy",
    ),
    "negative shape": (
        header(ONE.replace("[1]", "[-1, -1]") + "}", bytes(4)),
        "is truncated or not a weights file",
    ),
    "a pickled list": (
        as_pickle([1]),
        "adapter_model.bin is truncated or not a weights file: it mus",
    ),
    "a pickled number": (
        as_pickle({"a": 1}),
        "is truncated or not a weights file: 'a' is not a ten",
    ),
    "a pickled sparse tensor": (
        as_pickle({"a": torch.eye(2).to_sparse()}),
        "'a' is not a tensor; co",
    ),
    "pickled code": (
        as_pickle({"a": Path("a")}),
        "adapter_model.bin is truncated or not a weights",
    ),
    "no pickle": (
        lambda directory: (directory / "adapter_model.safetensors").rename(
            directory / "adapter_model.bin"
        ),
        "adapter_model.bin is truncated or not a weights file",
    ),
    # tensors
    "A alone": (
        tensors(lambda found: found.pop(f"{Q}B.weight")),
        f"module model.layers.0.self_attn.q_proj has {Q}A.weight but no lora_B.weight; copy the file",
    ),
    "B alone": (
        tensors(lambda found: found.pop(f"{Q}A.weight")),
        f"module model.layers.0.self_attn.q_proj has {Q}B.weight but no lora_A.weight; copy the file",
    ),
    "stored twice": (
        extra(f"{Q}A.default.weight"),
        f"tensor {Q}A.weight is stored twice, also as {Q}A.default.weight; remove one",
    ),
    "stored with and without prefix": (
        extra(f"{Q}A.weight".replace("model.model.", "model.")),
        "q_proj.lora_A.weight is stored twice, also as base_model.model.",
    ),
    "a bias": (extra(f"{Q}B.bias"), f"tensor {Q}B.bias is a bias, which is not supported; {MERGE}"),
    "an embedding": (
        extra("base_model.model.model.embed_tokens.lora_embedding_A"),
        "embed_tokens.lora_embedding_A is part of an adapter of an embedding, which is not supported",
    ),
    "DoRA": (
        extra("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        f"lora_magnitude_vector is part of DoRA, which is not supported; {MERGE}",
    ),
    "a variant": (
        extra(f"{Q}diag"),
        f"tensor {Q}diag is part of a variant of LoRA that is not supp",
    ),
    "a whole module": (
        extra("base_model.model.lm_head.weight"),
        "tensor base_model.model.lm_head.weight is neither lora_A.weight nor lora_B.weight of a modu",
    ),
    "names without prefix": (
        moved("base_model.model.", ""),
        "proj.lora_A.weight must begin with base_model.model., as PEFT's save_pretrained names it; renam",
    ),
    "name of several lines": (
        extra("base_model.model.a\n\x1b[31m\N{ZERO WIDTH JOINER}"),
        "tensor base_model.model.a\\n\\x1b[31m\\u200d is neither lora_A.weight nor",
    ),
    "long name": (extra("base_model.model." + "a" * 9000), "aaa is neither lora_A.weight nor"),
    "another layer": (
        moved("layers.0", "layers.1"),
        "module model.layers.1.mlp.up_proj is not in the model; take an adapter that was trained on",
    ),
    "another model": (
        moved("model.layers.0.mlp.up_proj", "transformer.h.0.mlp.c_fc"),
        "module transformer.h.0.mlp.c_fc is not in the model; take an adapter that was trained on th",
    ),
    "another prefix": (
        moved("model.model.layers", "model.model.model.layers"),
        "module model.model.layers.0.mlp.up_proj is not in the model",
    ),
    "a norm": (
        moved("mlp.up_proj", "input_layernorm"),
        "module model.layers.0.input_layernorm is not in the model",
    ),
    "part of a name": (
        moved("up_proj", "xup_proj"),
        "model.layers.0.mlp.xup_proj is not in the model",
    ),
    "our own name": (
        moved("self_attn.q_proj", "self_attn.qkv_proj"),
        "module model.layers.0.self_attn.qkv_proj is not in the model",
    ),
    "the head": (
        moved("model.layers.0.mlp.up_proj", "lm_head"),
        "module lm_head is the output head, which cannot have an adapter; train the adapter without",
    ),
    "the embedding": (
        moved("layers.0.mlp.up_proj", "embed_tokens"),
        f"module model.embed_tokens is an embedding, which cannot have an adapter; train the adapter "
        f"without it, or {MERGE}",
    ),
    "experts": (
        moved("mlp.up_proj", "mlp.experts.3.up_proj"),
        "module model.layers.0.mlp.experts.3.up_proj is a matrix of experts, which cannot have an ad",
    ),
    "not chosen": (
        config(target_modules=["q_proj"]),
        "has tensors of model.layers.0.mlp.up_proj, a module that target_modules, exclude_modules an",
    ),
    "dtype": (
        tensor(f"{Q}A.weight", lambda value: value.double()),
        f"tensor {Q}A.weight must have dtype torch.float32 or torch.bfloat16 or torch.float16, got t",
    ),
    "integers": (
        tensor(f"{Q}B.weight", lambda value: value.to(torch.int8)),
        "torch.float16, got torch.int8; convert it",
    ),
    "A transposed": (
        tensor(f"{Q}A.weight", lambda value: value.T),
        f"tensor {Q}A.weight must have shape [4, 64], by the rank in adapter_config.json and the mod",
    ),
    "B of another size": (
        tensor(f"{UP}B.weight", lambda value: value[:50]),
        "must have shape [96, 4], by the rank in adapter_config.json and the model's matrix, got [50,",
    ),
    "rank of the tensors": (
        tensors(
            lambda found: found.update(
                {f"{Q}A.weight": torch.ones(3, 64), f"{Q}B.weight": torch.ones(64, 3)}
            )
        ),
        f"tensor {Q}A.weight must have shape [4, 64], by the rank in adapter_config.json and the mod",
    ),
    "empty tensor": (
        tensor(f"{Q}A.weight", lambda value: value[:0]),
        "matrix, got [0, 64]; take an",
    ),
    "a number": (tensor(f"{Q}A.weight", lambda value: value[0, 0]), "must have shape [4, 64], by"),
    "NaN": (
        tensor(f"{UP}B.weight", lambda value: value.index_fill(0, torch.tensor([95]), torch.nan)),
        f"tensor {UP}B.weight must have values that are finite in torch.float32, got infinite values",
    ),
    "infinite": (
        tensor(f"{Q}A.weight", lambda value: value.fill_(torch.inf)),
        f"tensor {Q}A.weight must have values that are finite in torch.float32",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_weights(adapter: Path, model: CausalLM, change: Break, message: str) -> None:
    change(adapter)
    check_refused(adapter, model, message)


def test_bytes_after_the_last_tensor(adapter: Path, model: CausalLM) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes() + bytes(3))
    with pytest.raises(
        AdapterError, match="weights file: 3 bytes follow the last tensor; copy the"
    ):
        read_adapter(adapter, model, MAX_RANK)


@pytest.mark.parametrize("spaces", range(1, 5))
def test_tensors_at_any_address(adapter: Path, model: CausalLM, spaces: int) -> None:
    """A header can have any length, so tensors need not be aligned."""
    want = read_adapter(adapter, model, MAX_RANK).modules["layers.0.mlp.gate_up_proj"]
    file = adapter / "adapter_model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + size] + b" " * spaces, content[8 + size :]
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    got = read_adapter(adapter, model, MAX_RANK).modules["layers.0.mlp.gate_up_proj"]
    assert torch.equal(got.a, want.a)
    assert torch.equal(got.b, want.b)


@pytest.mark.parametrize(
    ("rank", "most", "remedy"),
    [
        (4, 1, "set lora.max_rank=8"),
        (9, 8, "set lora.max_rank=16"),
        (257, 256, "set lora.max_rank=320"),
        (512, 320, "set lora.max_rank=512"),
        (513, 512, f"the largest lora.max_rank is 512, so {MERGE}"),
    ],
)
def test_a_rank_above_the_largest(
    tmp_path: Path, model: CausalLM, rank: int, most: int, remedy: str
) -> None:
    directory = save_adapter(
        ONE_LAYER,
        tmp_path,
        target_modules=["q_proj", "up_proj"],
        r=1,
        rank_pattern={"up_proj": rank},
    )
    read_adapter(directory, model, rank)
    with pytest.raises(AdapterError) as refused:
        read_adapter(directory, model, most)
    assert str(refused.value) == (
        f"{directory}/adapter_config.json: the rank of model.layers.0.mlp.up_proj must be at most "
        f"lora.max_rank={most}, got {rank}; {remedy}"
    )


def test_values_that_are_not_finite_in_the_dtype_of_the_model(
    adapter: Path, tmp_path: Path
) -> None:
    model = build(save_base(ONE_LAYER, tmp_path / "base"), dtype=torch.float16)
    read = read_adapter(adapter, model, MAX_RANK).modules["layers.0.mlp.gate_up_proj"]
    assert read.a.dtype == read.b.dtype == torch.float16
    tensor(f"{UP}A.weight", lambda value: value.fill_(1e5))(adapter)
    with pytest.raises(
        AdapterError, match=r"values that are finite in torch\.float16, got infinit"
    ):
        read_adapter(adapter, model, MAX_RANK)


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.gate", "the router of experts"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w1", "a matrix of experts"),
        ("qwen3-moe", "model.layers.1.mlp.gate", "the router of experts"),
        ("qwen3-moe", "model.layers.1.mlp.experts.base_layer", "a matrix of experts"),
        ("qwen2-moe", "model.layers.1.mlp.shared_expert.up_proj", "a matrix of experts"),
        ("gpt-oss", "model.layers.1.mlp.experts", "a matrix of experts"),
        ("llama-tied", "lm_head", "the output head"),
        ("llama-tied", "model.embed_tokens", "the embedding, which is also the output head"),
        ("gpt2", "transformer.wte", "the embedding, which is also the output head"),
        ("gpt2", "transformer.wpe", "an embedding"),
    ],
)
def test_modules_that_cannot_have_an_adapter(
    tmp_path: Path, name: str, module: str, kind: str
) -> None:
    model = build(save_base(small(name), tmp_path / "base"))
    stated = {"peft_type": "LORA", "r": 1, "target_modules": "all-linear"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(stated))
    stored = {f"base_model.model.{module}.lora_{side}.weight": torch.ones(1, 1) for side in "AB"}
    save_file(stored, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError) as refused:
        read_adapter(tmp_path, model, MAX_RANK)
    assert f"module {module} is {kind}, which cannot have an adapter" in str(refused.value)


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("Qwen2AudioForConditionalGeneration", "audio_tower.layers.0.fc1"),
        ("LlavaForConditionalGeneration", "vision_tower.encoder.layers.0.mlp.fc1"),
    ],
)
def test_towers_of_images_and_of_sounds_have_no_adapters(architecture: str, module: str) -> None:
    model = build_model(
        read(architectures=[architecture], **OF_FAMILY[architecture]),
        dtype=torch.float32,
        device=torch.device("meta"),
        attention_backend="reference",
        num_media_rows=9,
    )
    text = Targets(model).why_missing(module)
    assert text.startswith("is a matrix of the tower for images or sounds, which cannot have an")


def test_every_truncation_of_the_weights(adapter: Path, model: CausalLM) -> None:
    file = adapter / "adapter_model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    for length in [*range(0, 8 + size, 5), *range(8 + size, len(content), 97), len(content) - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(AdapterError, match="truncated or not a weights file"):
            read_adapter(adapter, model, MAX_RANK)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_changed_bytes_raise_no_other_error(original: Path, model: CausalLM, data: st.DataObject):
    directory = original.parent / "changed"
    shutil.copytree(original, directory, dirs_exist_ok=True)
    file = directory / data.draw(
        st.sampled_from(["adapter_config.json", "adapter_model.safetensors"])
    )
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 700) - 1))] = data.draw(
            st.integers(0, 255)
        )
    file.write_bytes(content)
    with contextlib.suppress(AdapterError):
        read_adapter(directory, model, MAX_RANK)
