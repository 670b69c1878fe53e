"""Writes GGUF files of random weights for measurements. Only dense Qwen 3 is written."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch

from ostinato.models.gguf.gguf_file import TENSOR_TYPES

__all__ = ("write_random_gguf",)

_VERSION = 3
_ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8  # types of metadata


def write_random_gguf(hf_config: dict[str, Any], type_name: str, file: Path) -> None:
    """Write a model whose matrices are of one type.

    Args:
        hf_config: the config.json of a Qwen 3 model.
        type_name: a type of TENSOR_TYPES.
        file: the file to write.

    Raises:
        ValueError: the model is not a Qwen 3.
    """
    if hf_config["model_type"] != "qwen3":
        raise ValueError(f"model_type is {hf_config['model_type']!r}; only qwen3 can be written")
    tensors = _tensors(hf_config)
    numbers = {sizes[0]: (number, *sizes[1:]) for number, sizes in TENSOR_TYPES.items()}
    metadata = _metadata(hf_config)
    header = b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))
    header += b"".join(metadata)
    data: list[torch.Tensor] = []
    offset = 0
    for name, shape in tensors:
        number, values, num_bytes = numbers[type_name if len(shape) > 1 else "F32"]
        size = math.prod(shape) // values * num_bytes
        header += _text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack(
            "<IQ", number, offset
        )
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        # read as float16 or float32, such bytes are small numbers
        data.append(torch.randint(0, 32, (padded,), dtype=torch.uint8))
        offset += padded
    with file.open("wb") as opened:
        opened.write(header + bytes(-len(header) % _ALIGNMENT))
        for each in data:
            opened.write(each.numpy().tobytes())


def _tensors(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (size,),
        "attn_q": (queries, size),
        "attn_k": (keys, size),
        "attn_v": (keys, size),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "attn_output": (size, queries),
        "ffn_norm": (size,),
        "ffn_gate": (inner, size),
        "ffn_up": (inner, size),
        "ffn_down": (size, inner),
    }
    found: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (config["vocab_size"], size)),
        ("output_norm.weight", (size,)),
    ]
    for number in range(config["num_hidden_layers"]):
        found += [(f"blk.{number}.{name}.weight", shape) for name, shape in layer.items()]
    return found


def _metadata(config: dict[str, Any]) -> list[bytes]:
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }
    found = [_text("general.architecture") + struct.pack("<I", _STRING) + _text("qwen3")]
    for name, value in numbers.items():
        found.append(_text(f"qwen3.{name}") + struct.pack("<II", _UINT32, value))
    eps = struct.pack("<If", _FLOAT32, config["rms_norm_eps"])
    found.append(_text("qwen3.attention.layer_norm_rms_epsilon") + eps)
    base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    found.append(_text("qwen3.rope.freq_base") + struct.pack("<If", _FLOAT32, base))
    return found


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
