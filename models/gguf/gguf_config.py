"""Makes a Hugging Face config.json from the metadata of a GGUF file.

The metadata has llama.cpp's keys (gguf-py/gguf/constants.py). The result has the keys of Hugging
Face, so the model families read it like a config.json. A key of the architecture that is not known
here could change the output. So a file with such a key is refused, and the error names the key.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ostinato.models.gguf.architectures.architecture_keys import ArchitectureKeys, ReadKeys
from ostinato.models.gguf.architectures.decoder_keys import DECODERS, LAYER_NORMED
from ostinato.models.gguf.architectures.hybrid_keys import (
    GATED,
    HYBRIDS,
    read_kv_heads,
    read_unused_blocks,
)
from ostinato.models.gguf.block_types import GROUPED_TYPES, why_unsupported
from ostinato.models.gguf.gguf_file import GGUFFile, GGUFTensor
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.gguf.gguf_tensors import module_types, reordered_modules
from ostinato.models.gguf.gguf_tokenizer import NO_TOKEN, end_tokens
from ostinato.models.gguf.tensor_names import is_matrix

__all__ = ("ARCHITECTURES", "read_gguf_config", "read_gguf_generation_config")

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF file's model.

    Raises:
        GGUFError: the file holds no model; the architecture, a key or the type of a tensor is not
            supported; a key or a tensor is missing; or the metadata contradict the tensors. The
            text names the key or the tensor.
    """
    kind = file.get("general.type", str)
    if kind not in (None, "model"):
        raise GGUFError(f"{file.path} holds no model: its general.type is {kind!r}")
    read = ARCHITECTURES.get(file.architecture)
    if read is None:
        raise GGUFError(
            f"{file.path}: the architecture {file.architecture!r} is not supported as GGUF; "
            f"supported: {', '.join(ARCHITECTURES)}; other models are served from safetensors"
        )
    _refuse_types(file)
    keys = ArchitectureKeys(file)
    config = _common(keys)
    config |= read(keys, config)
    keys.refuse_unread()
    return config


def read_gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """The generation_config.json: sampling defaults, and all tokens that end an answer.

    Raises:
        GGUFError: a value has the wrong type.
    """
    stated = {ours: file.get(f"general.sampling.{name}", float) for name, ours in _SAMPLING.items()}
    sampling: dict[str, Any] = {key: value for key, value in stated.items() if value is not None}
    ends_of = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    ids = [token_id for token_id in ends_of if token_id not in (None, NO_TOKEN)]
    ids += end_tokens(file.get("tokenizer.ggml.tokens", list) or [])
    return sampling | ({"eos_token_id": list(dict.fromkeys(ids))} if ids else {})


def _common(keys: ArchitectureKeys) -> dict[str, Any]:
    """The part of the config that all architectures have."""
    file, tensors = keys.file, keys.file.tensors
    hidden, blocks = keys.size("embedding_length"), keys.size("block_count")
    heads = keys.size("attention.head_count")
    kv_heads = read_kv_heads(keys, blocks, heads)
    head_dim = _head_dim(keys, hidden, heads)
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim}
    if file.architecture in GATED:
        rows["q"] *= 2  # each query has a gate
    _check_sizes(keys, hidden, blocks, rows)
    config: dict[str, Any] = {
        "vocab_size": keys.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": blocks - read_unused_blocks(keys, blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": _norm_eps(keys),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype_without_loss(file),
        "attention_bias": keys.has_in_a_block("attn_q.bias"),
        "mlp_bias": keys.has_in_a_block("ffn_up.bias"),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        **_rope(keys, head_dim),
    }
    width = keys.integer("feed_forward_length")
    if width:
        config["intermediate_size"] = width
    types = module_types(file)
    if any(name in GROUPED_TYPES for each in types.values() for name in each):
        config["quantization_config"] = {
            "quant_method": "gguf",
            "types": types,
            "reordered": reordered_modules(file),
        }
    return config


def _refuse_types(file: GGUFFile) -> None:
    """Refuse a file with a tensor of an unsupported type."""
    for tensor in file.tensors.values():
        reason = why_unsupported(tensor.type)
        if reason is not None:
            raise GGUFError(f"{file.path}: {tensor.name}: {reason}")


def _dtype_without_loss(file: GGUFFile) -> str:
    """The dtype that rounds no float matrix.

    Quantised matrices are ignored, because they are multiplied in their stored format. Routers are
    ignored too, because they are F32 even in files of bfloat16 models.
    """
    matrices = [tensor for tensor in file.tensors.values() if is_matrix(tensor)]
    types = {tensor.type for tensor in matrices if "ffn_gate_inp" not in tensor.name}
    return "float32" if types & {"F32", "F16"} else "bfloat16"


def _head_dim(keys: ArchitectureKeys, hidden: int, heads: int) -> int:
    head_dim = keys.integer("attention.key_length") or hidden // heads
    if (keys.integer("attention.value_length") or head_dim) != head_dim:
        raise keys.error("attention.value_length", "differs from key_length", "only equal ones are")
    return head_dim


def _norm_eps(keys: ArchitectureKeys) -> float:
    kind = "epsilon" if keys.file.architecture in LAYER_NORMED else "rms_epsilon"
    key = f"attention.layer_norm_{kind}"
    eps = keys.number(key)
    if eps is None or eps < 0:
        raise keys.error(key, f"is {eps}", "a number of at least 0 is")
    return eps


def _check_sizes(keys: ArchitectureKeys, hidden: int, count: int, rows: dict[str, int]) -> None:
    """Refuse metadata that contradict the tensors, before a model of that size is built."""
    file = keys.file
    embedding = keys.tensor("token_embd.weight")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise keys.error(
            "embedding_length", f"is {hidden}, but token_embd.weight has the shape "
            f"{list(embedding.shape)}", "only rows of embedding_length values are",
        )  # fmt: skip
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(blocks) != count or blocks != {str(number) for number in range(count)}:
        raise keys.error(
            "block_count",
            f"is {count}, but there are tensors of {len(blocks)} blocks, which are not exactly "
            f"the blocks 0 to {count - 1}",
            "only files with exactly these blocks are",
        )
    for side, size in rows.items():
        name = f".attn_{side}.weight"  # hybrid models do not have it in each block
        tensors = (one for full, one in file.tensors.items() if full.endswith(name))
        tensor = next(tensors, None)
        if tensor is not None and tensor.shape[0] != size:
            raise keys.error(
                "attention.head_count" + "_kv" * (side == "k"),
                f"gives {size} rows, but {tensor.name} has {tensor.shape[0]}",
                "only equal numbers are",
            )


def _rope(keys: ArchitectureKeys, head_dim: int) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor`."""
    rotary = keys.integer("rope.dimension_count") or head_dim
    found: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base") or 10_000.0}
    if rotary != head_dim:
        found["partial_rotary_factor"] = rotary / head_dim
    kind = keys.text("rope.scaling.type", "linear")  # the default of llama.cpp
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    original = keys.integer("rope.scaling.original_context_length")
    attention = keys.number("rope.scaling.attn_factor")
    divisors = _divisors(keys)
    if divisors:
        if kind not in ("none", "longrope", "su") and (kind, factor) != ("linear", 1):
            raise keys.error(
                "rope.scaling.type",
                f"is {kind!r} with the factor {factor}, and the file has tensors of rope factors",
                "with these tensors, only none, longrope, su and linear with the factor 1 are",
            )
        short, long = divisors
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original or keys.size("context_length"),
            "attention_factor": 1.0 if attention is None else attention,
        }
        return found
    if kind == "linear" and factor != 1:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        yarn = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow"),
        }
        found["rope_scaling"] = {key: value for key, value in yarn.items() if value is not None}
    elif kind not in ("none", "linear"):
        raise keys.error(
            "rope.scaling.type",
            f"is {kind!r}",
            "without tensors of rope factors, only none, linear and yarn are",
        )
    if attention not in (None, 1.0):
        raise keys.error("rope.scaling.attn_factor", f"is {attention}", "only 1 is")
    return found


def _divisors(keys: ArchitectureKeys) -> tuple[list[float], list[float]] | None:
    """The divisors of the rotary frequencies, for short and for long contexts.

    Files store them as tensors: `rope_freqs` for Llama 3.1, `rope_factors_*` for LongRoPE.
    """
    file = keys.file
    names = ("rope_freqs.weight",) * 2
    if names[0] not in file.tensors:
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if not any(name in file.tensors for name in names):
        return None
    short, long = (_numbers(file, keys.tensor(name)) for name in names)
    return short, long


def _numbers(file: GGUFFile, tensor: GGUFTensor) -> list[float]:
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
        raise GGUFError(f"{file.path}: {tensor.name} must be a vector of at most 16384 F32 values")
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.offset)
        return np.frombuffer(opened.read(tensor.num_bytes), "<f4").tolist()


ARCHITECTURES: dict[str, ReadKeys] = {**DECODERS, **HYBRIDS}
"""`general.architecture` -> the function that reads the keys besides the common ones."""
