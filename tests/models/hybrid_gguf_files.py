"""Writes GGUF files of hybrid models, from checkpoints that transformers saved.

Values, shapes and orders are changed as llama.cpp's conversion/{lfm2,qwen,granite,mamba}.py change
them. With a quantised type, the matrices of the checkpoint are rounded to it first. Then both files
hold the same numbers, whatever the order of heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from tests.models.gguf_files import encode

Array = np.ndarray[Any, Any]
Converted = Iterator[tuple[str, Array]]

ARCHITECTURES = {
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "BambaForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
}
_MULTIPLIED = (
    gguf.MODEL_ARCH.GRANITE,
    gguf.MODEL_ARCH.GRANITE_MOE,
    gguf.MODEL_ARCH.GRANITE_HYBRID,
)
# Parts of the names of vectors and kernels, and of matrices that stay float32.
_FLOATS = ("norm", "A_log", "dt_bias", "conv1d", "conv.conv", "expert_bias", ".D", ".bias")
_ROUTERS = ("feed_forward.gate.", "mlp.gate.", "router", "shared_expert_gate")
_SHARED = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}  # their heads of values are reordered


def write_hybrid_gguf(
    checkpoint: Path,
    file: Path,
    *,
    kind: str = "F32",
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    changed: Callable[[str, Array], dict[str, Array]] = lambda name, data: {name: data},
    unused_blocks: int = 0,
    out_kind: str = "",
    divides: bool = True,
) -> Path:
    """Write a checkpoint as GGUF.

    Args:
        checkpoint: a directory with one safetensors file; its matrices are rounded to `kind`.
        file: the file to write.
        kind: the type of the matrices.
        metadata: adds further metadata to the writer.
        changed: the tensors of the file in place of one with this name.
        unused_blocks: how many copies of the first block of attention follow the model's blocks, as
            layers for multi-token prediction.
        out_kind: the type of the output projections of gated delta nets, if it is not `kind`. Their
            values can be random.
        divides: False keeps the matrix of Qwen3-Next that has rows of queries, keys, values and
            gates, as older converters did.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = _architecture(config)
    quantised = GGMLQuantizationType[kind]
    stored = load_file(checkpoint / "model.safetensors")
    matrices = {name for name in stored if is_quantised(name)}
    for name in matrices:
        stored[name] = encode(stored[name], quantised)[1]
    save_file(stored, checkpoint / "model.safetensors", {"format": "pt"})

    num_layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, num_layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _add_config(writer, config, arch, unused_blocks)
    metadata(writer)
    tensors: dict[str, tuple[Array, bool]] = {}
    for name, value in _without_single_experts(stored):
        is_whole = not divides and "in_proj_qkvz" in name
        whole = iter([(name, value)])
        for converted, data in whole if is_whole else _converted(name, value, config):
            own = _own_name(names, converted)
            for other, part in changed(own, data).items():
                tensors[other] = np.ascontiguousarray(part), is_quantised(name)
    attending = next((own for own in tensors if own.endswith(".attn_q.weight")), "").split(".")
    for number in range(unused_blocks):
        prefix = f"blk.{num_layers + number}."
        for own, each in list(tensors.items()):
            if own.startswith(f"blk.{attending[1]}."):
                tensors[prefix + own.split(".", 2)[2]] = each
        tensors[f"{prefix}nextn.enorm.weight"] = (np.ones(config["hidden_size"], np.float32), False)
    for own, (data, is_matrix) in tensors.items():
        own_kind = out_kind if out_kind and ".ssm_out." in own else kind if is_matrix else "F32"
        if own_kind != "F32":
            quantised = GGMLQuantizationType[own_kind]
            writer.add_tensor(own, encode(data, quantised)[0], raw_dtype=quantised)
        else:
            writer.add_tensor(own, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _architecture(config: dict[str, Any]) -> gguf.MODEL_ARCH:
    """Granite 4 has another name if no layer has Mamba-2."""
    arch = ARCHITECTURES[config["architectures"][0]]
    is_hybrid = "linear_attention" in config.get("layer_types", ["linear_attention"])
    if arch is not gguf.MODEL_ARCH.GRANITE_HYBRID or is_hybrid:
        return arch
    has_experts = config["num_local_experts"]
    return gguf.MODEL_ARCH.GRANITE_MOE if has_experts else gguf.MODEL_ARCH.GRANITE


def is_quantised(name: str) -> bool:
    """Whether a tensor of a checkpoint is a matrix that llama.cpp quantises."""
    return not any(part in name for part in (*_FLOATS, *_ROUTERS))


def tiled(value: Array, config: dict[str, Any], head_rows: int) -> Array:
    """Rows of heads of values in the order of llama.cpp: the first head of each head of keys, ..."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = value.reshape(keys, values // keys, head_rows, *value.shape[1:])
    return heads.swapaxes(0, 1).reshape(value.shape)


def _without_single_experts(stored: dict[str, Array]) -> Converted:
    """The tensors, with the experts of a layer stacked; gate and up of a stack apart."""
    stacks: dict[str, dict[int, Array]] = {}
    for name, value in stored.items():
        before, is_expert, after = name.partition(".experts.")
        number, _, side = after.partition(".")
        if is_expert and number.isdigit():
            stacks.setdefault(f"{before}.experts.{side}", {})[int(number)] = value
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(value, 2, 1)
            yield f"{before}.experts.gate_proj.weight", gate
            yield f"{before}.experts.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", value
        else:
            yield name, value
    for name, each in stacks.items():
        yield name, np.stack([each[number] for number in range(len(each))])


def _converted(name: str, value: Array, config: dict[str, Any]) -> Converted:
    architecture = config["architectures"][0]
    if architecture.startswith("Lfm2"):
        name = name.replace(".expert_bias", ".expert_bias.bias")
        if ".experts." in name:
            name = name.removeprefix("model.")
        yield name, value.squeeze(1) if "conv.conv" in name and value.ndim == 3 else value
    elif architecture.startswith("Qwen"):
        yield from _converted_delta(name, value, config)
    else:
        yield from _converted_mamba(name, value, config)


def _converted_delta(name: str, value: Array, config: dict[str, Any]) -> Converted:
    keys, k_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values, v_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "in_proj_qkvz":
        shared = values // keys * v_dim
        sizes = np.cumsum([k_dim, k_dim, shared])
        heads = value.reshape(keys, -1, value.shape[1])
        sides = [one.reshape(-1, value.shape[1]) for one in np.split(heads, sizes, 1)]
        yield name.replace("qkvz", "qkv"), np.concatenate(sides[:3])
        yield name.replace("qkvz", "z"), sides[3]
        return
    if part == "A_log":
        value = -np.exp(value)
    elif part == "conv1d":
        value = value.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + np.float32(1.0)
    if config["architectures"][0] in _SHARED and "linear_attn." in name:
        first = 2 * keys * k_dim
        if part in ("in_proj_qkv", "conv1d"):
            value = np.concatenate([value[:first], tiled(value[first:], config, v_dim)])
        elif part == "in_proj_z":
            value = tiled(value, config, v_dim)
        elif part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            value = tiled(value, config, 1)
        elif part == "out_proj":
            value = tiled(value.T, config, v_dim).T
    yield name.replace(".dt_bias", ".dt_proj.bias"), value


def _converted_mamba(name: str, value: Array, config: dict[str, Any]) -> Converted:
    part = name.rpartition(".")[0].rpartition(".")[2]
    if part == "input_linear":
        routed = "block_sparse_moe" in name
        kind = "exps" if routed else "shexp" if config.get("num_local_experts") else ""
        layer = name.split(".")[2]
        for side, half in zip(("gate", "up"), np.split(value, 2, -2), strict=True):
            yield f"blk.{layer}.ffn_{side}{f'_{kind}' if kind else ''}.weight", half
        return
    if part == "output_linear" and "shared" in name and not config.get("num_local_experts"):
        yield f"blk.{name.split('.')[2]}.ffn_down.weight", value
        return
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if part in heads:
        halves = value.reshape(config[heads[part]], 2, -1, *value.shape[1:])
        value = halves.swapaxes(1, 2).reshape(value.shape)
    elif name.endswith(".A_log"):
        value = -np.exp(value)[:, None]
    elif name.endswith(".D"):
        value = value[:, None]
    elif name.endswith("mamba.norm.weight"):
        value = value.reshape(config["mamba_n_groups"], -1)
    elif part == "conv1d" and value.ndim == 3:
        value = value.squeeze(1)
    yield name.replace(".dt_bias", ".dt_proj.bias"), value


def _own_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.startswith("blk."):
        return name
    own = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert own is not None, name
    return own


def _add_config(
    writer: gguf.GGUFWriter, config: dict[str, Any], arch: gguf.MODEL_ARCH, unused: int
) -> None:
    num_layers = config["num_hidden_layers"]
    attending = config.get("attn_layer_indices", range(num_layers))
    kinds = config.get("layer_types") or [
        "full_attention" if layer in attending else "linear_attention"
        for layer in range(num_layers)
    ]
    writer.add_block_count(len(kinds) + unused)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch in (gguf.MODEL_ARCH.LFM2, gguf.MODEL_ARCH.LFM2MOE, *_MULTIPLIED):
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    if arch in (gguf.MODEL_ARCH.LFM2, gguf.MODEL_ARCH.LFM2MOE):
        _add_lfm2(writer, config, has_experts=experts is not None)
    elif arch in _MULTIPLIED:
        _add_granite(writer, config)
    else:
        _add_delta(writer, config, gguf.MODEL_ARCH_NAMES[arch], kinds, unused)


def _add_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], *, has_experts: bool) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    size = config["intermediate_size"]
    if has_experts:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        # The converter writes neither. Other values than llama.cpp's would be lost without them.
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    elif config["block_auto_adjust_ff_dim"]:
        size = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3))
        size = -(-size // config["block_multiple_of"]) * config["block_multiple_of"]
    writer.add_feed_forward_length(size)


def _add_delta(
    writer: gguf.GGUFWriter, config: dict[str, Any], name: str, kinds: list[str], unused: int
) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    heads = config["linear_num_value_heads"]
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    recurrent = [kind == "linear_attention" for kind in kinds] + [False] * unused
    writer.add_array(f"{name}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    if unused:
        writer.add_nextn_predict_layers(unused)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    if not config.get("norm_topk_prob", True):
        writer.add_expert_weights_norm(False)  # the converter does not write it


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    is_bamba = config["model_type"] == "bamba"
    writer.add_feed_forward_length(config["intermediate_size"])
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    fraction = config["rope_parameters"].get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(head_dim * fraction))
    if "mamba_d_conv" in config:
        # The converter writes true for Bamba alone. A reader must honour both values.
        has_positions = is_bamba or config.get("position_embedding_type") == "rope"
        writer.add_rope_scaling_finetuned(has_positions)
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if not is_bamba:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
