"""GGUF files of hybrid models, and of all of Granite, against transformers and against safetensors on the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from ostinato.models.checkpoints.checkpoint import CheckpointError
from ostinato.models.gguf.gguf_config import read_gguf_config
from ostinato.models.gguf.gguf_file import open_gguf
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.quantized_checkpoints.gguf import AsStored
from ostinato.models.registry import model_class
from ostinato.models.sharding import Shard
from tests.models.driver import Driver, Sequence
from tests.models.gguf_files import save_checkpoint
from tests.models.hybrid_gguf_files import tiled, write_hybrid_gguf
from tests.models.parity import PROMPT, Expected, check_chunked, check_whole, load

# Three heads of values for each of two heads of keys: an order that is undone in the wrong
# direction differs.
THREE_TO_TWO = {"linear_num_value_heads": 6}
# A GGUF file cannot state limits of time steps, or which blocks of Qwen3-Next have no experts.
MODELS: dict[str, dict[str, Any]] = {
    "bamba": {},
    "bamba-bias": {"time_step_limit": [0.0, math.inf], "mamba_n_groups": 2},
    "granite4": {"mamba_n_groups": 2},
    "granite4-dense": {"intermediate_size": 48},
    "lfm2": {},
    "lfm2-bias": {},
    "lfm2-moe": {},
    "lfm2-moe-unbiased": {},
    "qwen3-next": THREE_TO_TWO,
    "qwen3-next-mixed": {"mlp_only_layers": []},
    "qwen3.5": THREE_TO_TWO,
    "qwen3.5-moe": THREE_TO_TWO,
}
# Granite without recurrent layers. The intermediate size of a dense model is that of its MLP.
ATTENDING: dict[str, dict[str, Any]] = {
    "granite": {},
    "granite4-attention": {"intermediate_size": 48},
    "granite4-attention-rotating": {"intermediate_size": 48, "position_embedding_type": "rope"},
    "granite4-attention-experts": {
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "granitemoe": {},
}
# Sizes that are multiples of a block of 32 values.
WHOLE_BLOCKS: dict[str, dict[str, Any]] = {
    "bamba": {},
    "granite4": {"shared_intermediate_size": 64},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2-moe": {},
    **{
        name: {
            **THREE_TO_TWO,
            "linear_value_head_dim": 32,
            **({} if name == "qwen3.5" else {"shared_expert_intermediate_size": 64}),
        }
        for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe")
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Name -> the checkpoint of a variant, and what transformers computes."""

    @cache
    def save(name: str) -> Expected:
        settings = (MODELS | ATTENDING)[name]
        variant = name.removesuffix("-rotating").removesuffix("-experts")
        directory = save_checkpoint(variant, tmp_path_factory.mktemp(name), **settings)
        return _expected(directory)

    return save


def _expected(directory: Path) -> Expected:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return Expected(model, directory, logits)


def _without(*keys: str) -> Callable[[gguf.GGUFWriter], None]:
    def remove(writer: gguf.GGUFWriter) -> None:
        for key in keys:
            del writer.kv_data[0][key]

    return remove


@pytest.mark.parametrize("name", [*MODELS, *ATTENDING])
def test_logits_and_greedy_tokens(saved, tmp_path: Path, name: str) -> None:
    expected = saved(name)
    model, config = load(write_hybrid_gguf(expected.directory, tmp_path / "m.gguf"), "cpu")
    assert (config.recurrent is not None) == (name in MODELS)
    driver = Driver(model, config)
    check_whole(driver, expected)
    check_chunked(driver, expected)


@pytest.mark.parametrize("name", WHOLE_BLOCKS)
def test_matrices_are_multiplied_as_stored(tmp_path: Path, name: str) -> None:
    directory = save_checkpoint(name, tmp_path, **WHOLE_BLOCKS[name])
    file = write_hybrid_gguf(directory, tmp_path / "m.gguf", kind="Q8_0")
    expected = load(directory, "cpu")[0]
    model, config = load(file, "cpu", pack=True)
    assert config.dtype is torch.bfloat16
    kinds = set()
    for own, module in model.named_modules():
        if isinstance(module, LinearBase):
            other = expected.get_submodule(own)
            assert isinstance(other, LinearBase)
            kinds.add(own.rpartition(".")[2])
            is_router = own.endswith((".gate", ".shared_gate"))
            assert isinstance(module.method, AsStored) != is_router, own
            assert torch.equal(module.dense().float(), other.dense().float()), own
    assert kinds > {"in_proj", "out_proj", "qkv_proj", "embed_tokens"}
    logits = _expected(directory).prompt_logits
    driver = Driver(model, config, dtype=torch.float32)
    ours = driver.prefill(Sequence(PROMPT), [20, len(PROMPT) - 20])
    # Activations are rounded to 8 bits. With experts, tokens can move to other experts.
    assert float((ours - logits).norm() / logits.norm()) < (0.3 if config.moe else 0.1)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q3_K"])
def test_a_block_that_holds_values_of_two_heads(tmp_path: Path, kind: str) -> None:
    sizes = {"linear_value_head_dim": 128, "num_hidden_layers": 4}
    directory = save_checkpoint("qwen3.5", tmp_path, **THREE_TO_TWO, **sizes)
    file = write_hybrid_gguf(directory, tmp_path / "m.gguf", out_kind=kind)
    config = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    tensors = gguf.GGUFReader(file).tensors
    stored = next(one for one in tensors if one.name == "blk.0.ssm_out.weight")
    values = gguf.quants.dequantize(stored.data, gguf.GGMLQuantizationType[kind])
    module = _out_proj(file)
    assert isinstance(module.method, AsStored)
    assert np.array_equal(tiled(module.dense().numpy().T, config, 128).T, values)
    parts = [_out_proj(file, shard=Shard(rank, 2)).dense() for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), module.dense())


def _out_proj(file: Path, **settings: Any) -> LinearBase:
    model, _ = load(file, "cpu", pack=True, **settings)
    module = model.get_submodule("layers.0.mixer.out_proj")
    assert isinstance(module, LinearBase)
    return module


def test_layers_for_multi_token_prediction_are_not_used(saved, tmp_path: Path) -> None:
    expected = saved("qwen3.5")
    file = write_hybrid_gguf(expected.directory, tmp_path / "m.gguf", unused_blocks=1)
    model, config = load(file, "cpu")
    assert config.num_layers == 4
    check_whole(Driver(model, config), expected)


def test_older_files_of_qwen3_next(saved, tmp_path: Path) -> None:
    """They have one matrix for queries, keys, values and gates, and no list of recurrent layers."""
    expected = saved("qwen3-next")
    file = write_hybrid_gguf(
        expected.directory,
        tmp_path / "m.gguf",
        metadata=_without("qwen3next.attention.recurrent_layers"),
        divides=False,
    )
    assert "blk.0.ssm_in.weight" in open_gguf(file).tensors
    model, config = load(file, "cpu")
    check_whole(Driver(model, config), expected)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("lfm2", "attention.sliding_window", 128, "attention.sliding_window is not known"),
        ("lfm2", "attention.head_count_kv", [0, 0, 0], "is 0 in all layers"),
        ("lfm2", "attention.head_count_kv", [1, 2, 0], "differs between layers with attention"),
        ("lfm2", "attention.head_count_kv", [0, 2], "is no list of 3 whole numbers"),
        ("lfm2", "attention.causal", False, "attention.causal is False; only True is"),
        ("lfm2-moe", "expert_gating_func", 1, "expert_gating_func is 1; only 2 .sigmoid. is"),
        ("qwen3-next", "full_attention_interval", 0, "full_attention_interval is 0"),
        ("qwen3.5", "ssm.time_step_rank", 5, "ssm.time_step_rank is 5; only multiples of 2 are"),
        ("qwen3.5", "ssm.inner_size", 100, "ssm.inner_size is 100; only multiples of 6 are"),
        ("qwen3.5", "nextn_predict_layers", 4, "is 4, and block_count is 4"),
        ("qwen3.5", "rope.dimension_sections", [2, 2, 2, 1], "only 0 as the fourth number is"),
        ("qwen3.5-moe", "expert_weights_norm", False, "expert_weights_norm is false"),
        ("granite4", "ssm.inner_size", 100, "ssm.inner_size is 100; only multiples of 64 are"),
        ("granite4", "expert_weights_norm", False, "expert_weights_norm is false"),
        ("granite4", "expert_shared_feed_forward_length", 0, "beside experts"),
        ("granite4", "attention.recurrent_layers", [True], "recurrent_layers is not known"),
    ],
)
def test_keys_that_are_refused(
    saved, tmp_path: Path, name: str, key: str, value: Any, message: str
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        full = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(full, None)
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        else:
            writer.add_uint32(full, value)

    file = write_hybrid_gguf(saved(name).directory, tmp_path / "m.gguf", metadata=change)
    with pytest.raises(GGUFError, match=message):
        read_gguf_config(open_gguf(file))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lfm2", "shortconv.l_cache"),
        ("lfm2-moe", "expert_feed_forward_length"),
        ("qwen3.5", "ssm.group_count"),
        ("qwen3.5", "ssm.inner_size"),
        ("granite4", "ssm.conv_kernel"),
        ("granite4", "ssm.state_size"),
    ],
)
def test_a_missing_key_is_named(saved, tmp_path: Path, name: str, key: str) -> None:
    directory = saved(name).directory

    def remove(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][f"{writer.arch}.{key}"]

    file = write_hybrid_gguf(directory, tmp_path / "m.gguf", metadata=remove)
    with pytest.raises(GGUFError, match=rf"{key} is not there; a number of at least 1 is"):
        read_gguf_config(open_gguf(file))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_a_head_is_rotated_as_a_whole_unless_the_file_states_its_part(
    saved, tmp_path: Path, name: str
) -> None:
    """As in llama.cpp. In a config.json of these families, the default is a quarter of a head."""
    directory = saved(name).directory

    def remove(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][f"{writer.arch}.rope.dimension_count"]

    file = write_hybrid_gguf(directory, tmp_path / "m.gguf", metadata=remove)
    config = read_gguf_config(open_gguf(file))
    rope = model_class(config["architectures"][0]).read_config(config).rope
    assert rope is not None
    assert rope.rotary_dim == config["head_dim"]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("lfm2", "blk.0.shortconv.conv.weight", "layers.0.conv.conv.weight"),
        ("lfm2", "token_embd_norm.weight", "model.embedding_norm.weight"),
        ("qwen3.5", "blk.1.ssm_a", "layers.1.linear_attn.A_log"),
        ("qwen3-next", "blk.0.attn_gate.weight", "layers.0.linear_attn.in_proj_z.weight"),
        ("granite4", "blk.0.ssm_d", "layers.0.mamba.D"),
    ],
)
def test_a_missing_tensor_is_named(
    saved, tmp_path: Path, name: str, tensor: str, message: str
) -> None:
    file = write_hybrid_gguf(
        saved(name).directory,
        tmp_path / "m.gguf",
        changed=lambda own, data: {} if own == tensor else {own: data},
    )
    with pytest.raises(
        CheckpointError, match=rf"lacks tensor model\.{message.removeprefix('model.')}"
    ):
        load(file, "cpu")


def test_groups_that_span_two_heads_are_refused(tmp_path: Path) -> None:
    sizes = {"linear_value_head_dim": 48, "hidden_size": 64}
    directory = save_checkpoint("qwen3.5", tmp_path, **THREE_TO_TWO, **sizes)
    file = write_hybrid_gguf(directory, tmp_path / "m.gguf", out_kind="Q8_0")
    with pytest.raises(CheckpointError, match=r"ssm_out.weight: heads of 48 values do not consist"):
        load(file, "cpu", pack=True)


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("blk.0.ssm_a", lambda data: -data, "blk.0.ssm_a: decays must be at most 0"),
        ("blk.0.ssm_beta.weight", lambda data: data[1:], "it has 5 rows, .* must have 6"),
        ("blk.0.attn_qkv.weight", lambda data: data[:-1], "attn_qkv.weight: it has 207 rows"),
    ],
)
def test_tensors_that_contradict_the_metadata(
    saved, tmp_path: Path, tensor: str, change: Callable[[Any], Any], message: str
) -> None:
    file = write_hybrid_gguf(
        saved("qwen3.5").directory,
        tmp_path / "m.gguf",
        changed=lambda own, data: {own: change(data) if own == tensor else data},
    )
    with pytest.raises(CheckpointError, match=message):
        load(file, "cpu")
