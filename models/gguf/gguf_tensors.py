"""The tensors of a GGUF file under the names, shapes and row orders of Hugging Face checkpoints.

llama.cpp's converter renames tensors, stacks experts, permutes the rows of Llama's queries and keys
and adds 1 to the norms of Gemma. All of that is undone here while a file is read.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ostinato.models.gguf.block_types import FLOAT_TYPES, dequantize
from ostinato.models.gguf.gguf_file import TENSOR_TYPES, GGUFFile, GGUFTensor
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.gguf.stored_formats import FORMATS, common_format, in_format
from ostinato.ops.quantized_reference import QuantFormat
from ostinato.ops.stored.stored_blocks import BLOCK_LAYOUTS

__all__ = ("module_types", "read_tensors")

# Values that are dequantised at a time, so that intermediate tensors stay in the processor's
# caches.
_CHUNK_VALUES = 1 << 18
# Tensors that are not weights. gguf_config.py reads some of them.
_WITHOUT_WEIGHTS = re.compile(r"rope_freqs|rope_factors|attn_rot_embd")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")  # number, name, kind
_STACKED = re.compile(r"\bffn_(gate|up|down)_exps\b")
_ANY_EXPERT = re.compile(r"\.experts\.\d+\.")
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # in early files of Mixtral

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens",
    "output_norm.weight": "model.norm",
    "output.weight": "lm_head",
}
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT = "mlp.experts.{expert}.{side}_proj"
# `general.architecture` -> the names that differ from the common names above.
_OTHER_NAMES = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
}
_MIXTRAL_NAMES = {"ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERT = "block_sparse_moe.experts.{expert}.{side}"
_MIXTRAL_SIDES = {"gate": "w1", "up": "w3", "down": "w2"}


def module_types(file: GGUFFile) -> dict[str, list[str]]:
    """The types of all matrices, by their modules in a Hugging Face checkpoint.

    The entry of a layer's first expert has the types of all experts of the layer.

    Raises:
        GGUFError: a tensor has a name that is not known.
    """
    names = _Names(file)
    found: dict[str, list[str]] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and not _WITHOUT_WEIGHTS.search(tensor.name):
            module = _ANY_EXPERT.sub(".experts.0.", names.modules(tensor)[0])
            types = found.setdefault(module, [])
            if tensor.type not in types:
                types.append(tensor.type)
    return found


def read_tensors(
    file: GGUFFile,
    dtype: torch.dtype,
    types_of: Callable[[str], Collection[str]] = lambda module: (),
    keeps_blocks: Callable[[str], bool] = lambda module: False,
) -> Iterator[tuple[str, Tensor, int]]:
    """All weights of a file, one after the other.

    Args:
        file: the opened model.
        dtype: quantised tensors are dequantised to it.
        types_of: gives, for a module's name in a Hugging Face checkpoint, the types of its matrix.
            If there are types, the module gets integers and scales in the `common_format` of these
            types. () = the module gets floats.
        keeps_blocks: whether the module of this name gets undecoded blocks instead of integers.

    Yields:
        The name in a Hugging Face checkpoint, the tensor, and its share of the stored tensor's
        bytes.
        If a module gets integers, the names of its tensors end in the keys of `in_format`.
        Blocks, and a tensor that is not quantised, may be views of the mapped file.

    Raises:
        GGUFError: a tensor has a name that is not known.
    """
    names = _Names(file)
    for path in file.files:
        with _Mapped(path) as mapped:
            for tensor in file.tensors.values():
                if tensor.file != path or _WITHOUT_WEIGHTS.search(tensor.name):
                    continue
                modules = names.modules(tensor)
                types = types_of(modules[0]) if tensor.type in FORMATS else ()
                if not types:
                    kind = tensor.name.rpartition(".")[2]
                    values = {kind: mapped.read(tensor, dtype)}
                elif keeps_blocks(modules[0]):
                    values = {"blocks": mapped.read_blocks(tensor)}
                else:
                    values = mapped.read_groups(tensor, common_format(types))
                num_bytes = tensor.num_bytes // len(modules) // len(values)
                for kind, value in values.items():
                    restored = names.restored(tensor, value)
                    parts = restored if _STACKED.search(tensor.name) else (restored,)
                    for module, part in zip(modules, parts, strict=True):
                        # `sinks` is a parameter, not a module with a weight: no `.weight` follows.
                        full = module if module.endswith(".sinks") else f"{module}.{kind}"
                        yield full, part, num_bytes
                mapped.give_back(tensor)


class _Mapped:
    """A file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as opened:
            # Copy on write, because torch does not support read-only tensors.
            self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        # If a caller still holds a view, the mapping ends with that view.
        del self._data

    def read(self, tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
        """The values, in the shape of the file."""
        if tensor.type in FLOAT_TYPES:
            return self._bytes(tensor).view(FLOAT_TYPES[tensor.type]).view(tensor.shape)
        result = torch.empty(math.prod(tensor.shape), dtype=dtype)
        parts = result.split(_CHUNK_VALUES)
        for chunk, part in zip(self._chunks(tensor), parts, strict=True):
            part.copy_(dequantize(tensor.type, chunk).view(-1))
        return result.view(tensor.shape)

    def read_groups(self, tensor: GGUFTensor, form: QuantFormat) -> Mapping[str, Tensor]:
        """The integers, scales and minimums, in the file's shape except for the last dimension."""
        shape = tensor.shape[:-1]
        if tensor.type in BLOCK_LAYOUTS:  # by a kernel, in one piece
            whole = in_format(tensor.type, self._blocks(tensor), form)
            return {kind: value.view(*shape, -1) for kind, value in whole.items()}
        found: dict[str, list[Tensor]] = {}
        for chunk in self._chunks(tensor):
            for kind, part in in_format(tensor.type, chunk, form).items():
                found.setdefault(kind, []).append(part.reshape(-1))
        return {kind: torch.cat(parts).view(*shape, -1) for kind, parts in found.items()}

    def read_blocks(self, tensor: GGUFTensor) -> Tensor:
        """The blocks, in the file's shape except for the last dimension, which has become two."""
        values, num_bytes = _block_sizes(tensor)
        *rows, columns = tensor.shape
        return self._bytes(tensor).view(*rows, columns // values, num_bytes)

    def _bytes(self, tensor: GGUFTensor) -> Tensor:
        return torch.frombuffer(
            self._data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset
        )

    def _chunks(self, tensor: GGUFTensor) -> tuple[Tensor, ...]:
        """The tensor's blocks in pieces [blocks, bytes] of at most `_CHUNK_VALUES` values."""
        return self._blocks(tensor).split(_CHUNK_VALUES // _block_sizes(tensor)[0])

    def _blocks(self, tensor: GGUFTensor) -> Tensor:
        """The tensor as [blocks, bytes]."""
        return self._bytes(tensor).view(-1, _block_sizes(tensor)[1])

    def give_back(self, tensor: GGUFTensor) -> None:
        """Drop a tensor's pages, which count as memory of this process. A view reads them again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._data.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _block_sizes(tensor: GGUFTensor) -> tuple[int, int]:
    """The values and the bytes of a block."""
    return next(sizes[1:] for sizes in TENSOR_TYPES.values() if sizes[0] == tensor.type)


class _Names:
    """The names of one file's tensors, and how to undo the converter's changes."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        metadata, prefix = file.metadata, file.architecture
        self._is_gemma = prefix.startswith("gemma")
        is_mixtral = prefix == "llama" and bool(_count(metadata.get("llama.expert_count")))
        others = _MIXTRAL_NAMES if is_mixtral else _OTHER_NAMES.get(prefix, {})
        self._names = _NAMES | others
        self._expert = _MIXTRAL_EXPERT if is_mixtral else _EXPERT
        self._sides = _MIXTRAL_SIDES if is_mixtral else {}
        self._heads: dict[str, int] = {}
        if prefix == "llama":
            heads = _count(metadata.get("llama.attention.head_count"))
            kv_heads = _count(metadata.get("llama.attention.head_count_kv")) or heads
            self._heads = {"attn_q": heads, "attn_k": kv_heads}

    def modules(self, tensor: GGUFTensor) -> list[str]:
        """The modules that a tensor belongs to; several if it stacks experts.

        Raises:
            GGUFError: its name is not known.
        """
        outside = _OUTSIDE.get(tensor.name)
        if outside is not None:
            return [outside]
        match = _BLOCK.fullmatch(tensor.name)
        layer, name, _ = match.groups() if match else ("", "", "")
        prefix = f"model.layers.{layer}."
        stacked, one = _STACKED.fullmatch(name), _ONE_EXPERT.fullmatch(name)
        if stacked is not None:
            experts = range(tensor.shape[0])
            return [prefix + self._expert_name(stacked[1], expert) for expert in experts]
        if one is not None:
            return [prefix + self._expert_name(one[1], int(one[2]))]
        if name not in self._names:
            raise GGUFError(f"{self._file.path}: {tensor.name!r} is no known name of a tensor")
        return [prefix + self._names[name]]

    def restored(self, tensor: GGUFTensor, value: Tensor) -> Tensor:
        """Values, shape and row order as before the conversion."""
        name = tensor.name.split(".")[-2]
        if self._is_gemma and name.endswith("_norm"):
            return _without_one(value)
        if name in self._heads:
            return _rotary_halves(value, self._heads[name])
        return value[None] if name == "ffn_gate_inp_shexp" and value.dim() == 1 else value

    def _expert_name(self, side: str, expert: int) -> str:
        return self._expert.format(expert=expert, side=self._sides.get(side, side))


def _count(value: object) -> int:
    """A number of the metadata, or the first number of an array. gguf_config.py checks them."""
    if isinstance(value, np.ndarray):
        value = value.tolist()[0] if value.size else 0
    return value if isinstance(value, int) else 0


def _rotary_halves(value: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from llama.cpp's order to that of Hugging Face.

    llama.cpp puts the two rows of a rotary pair side by side, Hugging Face half a head apart.
    """
    pairs = value.view(num_heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _without_one(value: Tensor) -> Tensor:
    """Subtract 1 from a norm of Gemma: GGUF files store the scale, checkpoints `scale - 1`.

    In float64 nothing is lost: adding 1 again gives the same float32.
    """
    return value.double() - 1.0
