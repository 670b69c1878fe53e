"""Writes GGUF files with the `gguf` package, from checkpoints that transformers saved.

Names of tensors come from the package. Values are changed as llama.cpp's convert_hf_to_gguf.py
changes them: Llama's queries and keys permuted, 1 added to Gemma's norms, experts stacked. The
dequantised matrices replace those of the checkpoint, so that both files hold the same numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from tests.models.random_checkpoints import VARIANTS, reference_model, save

Array = np.ndarray[Any, Any]

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
}
_PAIRED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.MISTRAL3, gguf.MODEL_ARCH.SMOLLM3)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def save_checkpoint(name: str, directory: Path, **settings: Any) -> Path:
    """A checkpoint of a variant with other settings, as one safetensors file."""
    variant = VARIANTS[name]
    variant = replace(variant, settings={**variant.settings, **settings}).as_one_file()
    return save(reference_model(variant), variant, directory)


def write_gguf(
    checkpoint: Path,
    file: Path,
    *,
    type_of: Callable[[str], str] = lambda name: "F32",
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split_tensors: int = 0,
    arch: gguf.MODEL_ARCH | None = None,
) -> Path:
    """Write a checkpoint as GGUF, and put the dequantised matrices into the checkpoint.

    Args:
        checkpoint: a directory with one safetensors file.
        file: the file to write.
        type_of: the type of a matrix by its name in the GGUF file.
        metadata: adds further metadata to the writer.
        split_tensors: the number of tensors in each file of a split model; 0 = one file.
        arch: the architecture that the file states; None = that of the checkpoint.

    Returns:
        The (first) file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = arch or ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(
        file, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split_tensors, split_max_size=0
    )
    _add_config(writer, config, arch)
    metadata(writer)
    stored = load_file(checkpoint / "model.safetensors")
    dequantized: dict[str, Array] = {}
    experts: dict[str, dict[int, tuple[GGMLQuantizationType, Array]]] = {}
    for name, value in stored.items():
        if arch is gguf.MODEL_ARCH.GPT_OSS and ".experts." in name:
            dequantized |= _add_gpt_oss_experts(writer, name, value, type_of)
            continue
        expert = _EXPERT.fullmatch(name)
        own = _own_name(names, f"{expert[1]}.{expert[3]}.weight" if expert else name)
        kind = GGMLQuantizationType[type_of(own)] if value.ndim > 1 else GGMLQuantizationType.F32
        data, dequantized[name] = encode(value, kind)
        if expert is not None:
            experts.setdefault(own, {})[int(expert[2])] = kind, data
            continue
        _add_tensor(writer, own, _converted(own, data, config, arch), kind)
    for own, each in experts.items():
        kind = each[0][0]
        _add_tensor(writer, own, np.stack([each[n][1] for n in range(len(each))]), kind)
    save_file(stored | dequantized, checkpoint / "model.safetensors", {"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if not split_tensors else sorted(file.parent.glob(f"{file.stem}-00001-of-*"))[0]


def encode(value: Array, kind: GGMLQuantizationType) -> tuple[Array, Array]:
    """The stored form of a matrix, and the float32 values that it stands for."""
    if kind is GGMLQuantizationType.F32:
        return value.astype(np.float32), value.astype(np.float32)
    try:
        data = gguf.quants.quantize(value.astype(np.float32), kind)
    except NotImplementedError:
        data = _random_blocks(value.shape, kind)
    return data, gguf.quants.dequantize(data, kind).reshape(value.shape)


def _random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> Array:
    """Random blocks of a type that the package cannot quantise to; their scales are small."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(math.prod(shape))
    count = math.prod(shape) // block_values
    blocks = generator.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    # Small float16 scales at these offsets make values as large as those of a trained model.
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for place in halves.get(kind.name, (0,)):
        small = generator.uniform(2e-5, 8e-5, (count, 1)).astype(np.float16)
        blocks[:, place : place + 2] = small.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _own_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.endswith(".sinks"):
        name += ".weight"
    name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
    own = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert own is not None, name
    return own


def _converted(name: str, data: Array, config: dict[str, Any], arch: gguf.MODEL_ARCH) -> Array:
    """Rows and values as the converter changes them."""
    if arch.name.startswith("GEMMA") and name.endswith("norm.weight"):
        return data + np.float32(1.0)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = name.split(".")[-2]
    if arch in _PAIRED and part in heads:
        halves = data.reshape(config[heads[part]], 2, -1, *data.shape[1:])
        return halves.swapaxes(1, 2).reshape(data.shape)
    return data


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, data: Array, kind: GGMLQuantizationType
) -> None:
    if data.dtype in (np.float32, np.float16):
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, data, raw_dtype=kind)


def _add_gpt_oss_experts(
    writer: gguf.GGUFWriter, name: str, value: Array, type_of: Callable[[str], str]
) -> dict[str, Array]:
    """Split interleaved gate and up rows into two tensors [experts, out, in].

    Returns:
        The matrix with the values that the file stands for.
    """
    layer = re.search(r"layers\.(\d+)\.", name)
    assert layer is not None
    kind = "bias" if name.endswith("bias") else "weight"
    rows = value if kind == "bias" else value.swapaxes(1, 2)
    sides = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in name else {"down": rows}
    stands_for: list[Array] = []
    for side, part in sides.items():
        own = f"blk.{layer[1]}.ffn_{side}_exps.{kind}"
        type_name = "F32" if kind == "bias" else type_of(own)
        data, values = encode(np.ascontiguousarray(part), GGMLQuantizationType[type_name])
        _add_tensor(writer, own, data, GGMLQuantizationType[type_name])
        stands_for.append(values)
    rows = np.stack(stands_for, 2).reshape(rows.shape)
    return {name: rows if kind == "bias" else np.ascontiguousarray(rows.swapaxes(1, 2))}


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], arch: gguf.MODEL_ARCH) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_logit_scale(config["logit_scale"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((config[key] for key in counts if config.get(key)), None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch is gguf.MODEL_ARCH.GPT_OSS:
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch is gguf.MODEL_ARCH.GLM4_MOE:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    has_window = config.get("sliding_window") and config.get("use_sliding_window", True)
    if has_window and arch is not gguf.MODEL_ARCH.LLAMA:
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    rope = config["rope_parameters"]
    if arch is gguf.MODEL_ARCH.GEMMA3:
        writer.add_sliding_window_pattern(2)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if arch is gguf.MODEL_ARCH.OLMO2 and has_window:
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        rope = rope["full_attention"]
    if arch is gguf.MODEL_ARCH.MISTRAL3:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    _add_rope(writer, rope, head_dim, config)


def _add_rope(
    writer: gguf.GGUFWriter, rope: dict[str, Any], head_dim: int, config: dict[str, Any]
) -> None:
    rotary = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        original = (
            rope.get("original_max_position_embeddings")
            or config["original_max_position_embeddings"]
        )
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for side in ("long", "short"):
            factors = np.array(rope[f"{side}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{side}.weight", factors)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Array:
    factors: list[float] = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for exponent in np.arange(0, head_dim, 2) / head_dim:
        turns = rope["original_max_position_embeddings"] / (
            2 * math.pi * rope["rope_theta"] ** exponent
        )
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - keep) / rope["factor"] + keep))
    return np.array(factors, np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], **keys: Any) -> None:
    """Add the vocabulary of a tokenizer.json, as the converter writes it.

    Args:
        writer: the writer of the file.
        tokenizer: the parsed tokenizer.json: byte-level BPE if `keys` have `pre`, else a BPE
            with fallback to bytes.
        keys: further keys below `tokenizer.ggml`, such as `eos_token_id`.
    """
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    texts |= {token_id: token["content"] for token_id, token in added.items()}
    assert sorted(texts) == list(range(len(texts)))
    tokens = [texts[token_id] for token_id in range(len(texts))]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for token_id, token in added.items():
        special = token["special"]
        types[token_id] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    merges = [tuple(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_token_list(tokens)
    if "pre" in keys:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        writer.add_tokenizer_model("llama")
        ranks = {left + right: -float(rank) for rank, (left, right) in enumerate(merges)}
        writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
        for token_id, token in enumerate(tokens):
            if re.fullmatch("<0x..>", token):
                types[token_id] = gguf.TokenType.BYTE
        types[tokens.index("<unk>")] = gguf.TokenType.UNKNOWN
    writer.add_token_types(types)
    for key, value in keys.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
