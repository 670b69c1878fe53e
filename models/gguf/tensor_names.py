"""The names of a GGUF file's tensors in Hugging Face checkpoints, and how to undo the conversion.

llama.cpp's converter renames tensors and stacks experts. It also changes values:

- rows of queries and keys of `_PAIRED` architectures: the two rows of a rotary pair side by side;
- norms of Gemma, and of Qwen3-Next and Qwen3.5 except in recurrent mixers: 1 is added;
- decays of recurrent mixers: `-exp(A_log)` in place of `A_log`;
- Qwen3.5: the heads of values that share a head of keys are no longer beside each other;
- Qwen3-Next: queries, keys and values of all heads, and the gates, become two matrices.
"""

from __future__ import annotations

import re

import numpy as np
from torch import Tensor

from ostinato.models.gguf.gguf_file import GGUFFile, GGUFTensor
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.gguf.restored_values import (
    decay_logarithms,
    heads_by_key,
    parts_by_key,
    rotary_halves,
    without_one,
)

__all__ = ("PARAMETERS", "TensorNames", "is_matrix")

PARAMETERS = (".A_log", ".D", ".dt_bias", ".expert_bias", ".e_score_correction_bias", ".sinks")
"""Ends of names that are parameters, not modules with a weight: no `.weight` follows."""

# Tensors that are not weights. gguf_config.py reads some of them.
_WITHOUT_WEIGHTS = re.compile(r"rope_freqs|rope_factors|attn_rot_embd")
# Tensors of two dimensions that are not multiplied as matrices. The biases of all experts are one.
_NO_MATRIX = re.compile(r"\.(ssm_(a|d|conv1d|norm)|shortconv\.conv)\b|\.bias$")
_BLOCK = re.compile(r"blk\.(\d+)\.(?:(.+)\.(?:weight|bias)|(ssm_[ad]))")  # number, name
_STACKED = re.compile(r"ffn_(gate|up|down)_exps")
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # in early files of Mixtral

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens",
    "token_embd_norm.weight": "model.embedding_norm",  # LFM2; it follows the last layer
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
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "exp_probs_b": "feed_forward.expert_bias",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_GATED_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.gate_proj",
    "ffn_up_shexp": "mlp.up_proj",
    "ffn_down_shexp": "mlp.down_proj",
}
_STATE_SPACE = {
    **_SHARED_EXPERT,
    "ssm_a": "mamba.A_log",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "ssm_in": "mamba.in_proj",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_OLMO = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_GLM_EXPERTS = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# Architectures whose rotary pairs are two rows side by side.
_PAIRED = {"llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid"}
# `general.architecture` -> the names that differ from the common names above.
_OTHER_NAMES = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": _GLM,
    "glm4moe": _GLM_EXPERTS,
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
    "granitehybrid": _STATE_SPACE,
    "granitemoe": _SHARED_EXPERT,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "olmo2": _OLMO,
    "qwen35": _GATED_DELTA,
    "qwen35moe": _GATED_DELTA,
    "qwen3next": _GATED_DELTA,
}
# Qwen3-Next: a tensor -> the modules among which its rows are divided. Newer files do not have
# `ssm_in`.
_DIVIDED = {
    "ssm_in": ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
    "ssm_ba": ["linear_attn.in_proj_b", "linear_attn.in_proj_a"],
}
_EXPERT = "mlp.experts.{expert}.{side}_proj"
_MIXTRAL_NAMES = {"ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERT = "block_sparse_moe.experts.{expert}.{side}"
_LFM2_EXPERT = "feed_forward.experts.{expert}.{side}"
_NUMBERED_SIDES = {"gate": "w1", "up": "w3", "down": "w2"}


def is_matrix(tensor: GGUFTensor) -> bool:
    """Whether a tensor is a matrix or a stack of matrices, or the table of embeddings."""
    return (
        len(tensor.shape) > 1
        and not _WITHOUT_WEIGHTS.search(tensor.name)
        and not _NO_MATRIX.search(tensor.name)
    )


class TensorNames:
    """The names of one file's tensors, and how to undo the converter's changes."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        kind = file.architecture
        self._is_gemma = kind.startswith("gemma")
        self._is_gated_delta = _OTHER_NAMES.get(kind) is _GATED_DELTA
        self._groups_heads = kind in ("qwen35", "qwen35moe")
        is_mixtral = kind == "llama" and bool(self._count("expert_count"))
        self._names = _NAMES | (_MIXTRAL_NAMES if is_mixtral else _OTHER_NAMES.get(kind, {}))
        self._divided = _DIVIDED if kind == "qwen3next" else {}
        self._expert, self._sides = _EXPERT, {}
        if is_mixtral or kind == "lfm2moe":
            self._expert = _MIXTRAL_EXPERT if is_mixtral else _LFM2_EXPERT
            self._sides = _NUMBERED_SIDES
        self._heads: dict[str, int] = {}
        if kind in _PAIRED:
            heads = self._count("attention.head_count")
            kv_heads = self._count("attention.head_count_kv") or heads
            self._heads = {"attn_q": heads, "attn_k": kv_heads}
        self._num_layers = self._count("block_count") - self._count("nextn_predict_layers")
        self._k_heads = self._v_heads = self._v_dim = self._k_dim = 0
        if self._is_gated_delta:
            self._k_dim = self._count("ssm.state_size")
            self._k_heads, self._v_heads = map(
                self._count, ("ssm.group_count", "ssm.time_step_rank")
            )
            self._v_dim = self._count("ssm.inner_size") // max(1, self._v_heads)

    def is_used(self, tensor: GGUFTensor) -> bool:
        """Whether a tensor is a weight of the model, and not of layers after its last one."""
        match = _BLOCK.match(tensor.name)
        is_unused = match is not None and int(match[1]) >= self._num_layers
        return not is_unused and not _WITHOUT_WEIGHTS.search(tensor.name)

    def stacks_experts(self, tensor: GGUFTensor) -> bool:
        """Whether a tensor has a matrix for each expert."""
        return _STACKED.fullmatch(_place(tensor)[1]) is not None

    def reorders_columns(self, tensor: GGUFTensor) -> bool:
        """Whether the columns of a matrix have another order than in a checkpoint."""
        is_grouped = self._groups_heads and 1 < self._k_heads < self._v_heads
        return is_grouped and _place(tensor)[1] == "ssm_out"

    def modules(self, tensor: GGUFTensor) -> list[str]:
        """The modules that a tensor belongs to; several if it stacks experts or is divided.

        Raises:
            GGUFError: its name is not known.
        """
        outside = _OUTSIDE.get(tensor.name)
        if outside is not None:
            return [outside]
        layer, name = _place(tensor)
        prefix = f"model.layers.{layer}."
        stacked, one = _STACKED.fullmatch(name), _ONE_EXPERT.fullmatch(name)
        if stacked is not None:
            experts = range(tensor.shape[0])
            return [prefix + self._expert_name(stacked[1], expert) for expert in experts]
        if one is not None:
            return [prefix + self._expert_name(one[1], int(one[2]))]
        if name in self._divided:
            return [prefix + part for part in self._divided[name]]
        if name not in self._names:
            raise GGUFError(f"{self._file.path}: {tensor.name!r} is no known name of a tensor")
        return [prefix + self._names[name]]

    def restored(self, tensor: GGUFTensor, value: Tensor) -> list[Tensor]:
        """Values, shapes and row orders as before the conversion: one for each of `modules`.

        Args:
            tensor: a tensor of the file.
            value: its values; or its blocks, integers, scales or minimums, in rows like the values.

        Raises:
            GGUFError: the shape contradicts the metadata, or a value cannot come from a checkpoint.
        """
        name = _place(tensor)[1] or tensor.name.removesuffix(".weight")
        try:
            if _STACKED.fullmatch(name):
                return list(value)
            if name in self._divided:
                return parts_by_key(value, self._k_heads, self._part_sizes(name))
            return [self._restored(name, value)]
        except ValueError as error:
            raise GGUFError(f"{self._file.path}: {tensor.name}: {error}") from error

    def _restored(self, name: str, value: Tensor) -> Tensor:
        if name.endswith("_norm") and (self._is_gemma or self._is_gated_delta):
            return value if name == "ssm_norm" else without_one(value)
        if name in self._heads:
            return rotary_halves(value, self._heads[name])
        if name in ("ssm_conv1d", "shortconv.conv") and value.dim() == 2:
            value = value[:, None]
        elif name in ("ssm_a", "ssm_d", "ssm_norm"):
            value = value.reshape(-1)
        elif name == "ffn_gate_inp_shexp" and value.dim() == 1:
            value = value[None]
        if name == "ssm_a":
            value = decay_logarithms(value)
        return self._with_grouped_heads(name, value) if self._groups_heads else value

    def _with_grouped_heads(self, name: str, value: Tensor) -> Tensor:
        """The heads of values that share a head of keys beside each other, as in checkpoints."""
        k_heads, v_heads = self._k_heads, self._v_heads
        if name in ("ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt"):
            return heads_by_key(value, k_heads, v_heads, 1)
        if name == "attn_gate":
            return heads_by_key(value, k_heads, v_heads, self._v_dim)
        if name in ("attn_qkv", "ssm_conv1d"):
            first = 2 * k_heads * self._k_dim
            return heads_by_key(value, k_heads, v_heads, self._v_dim, first=first)
        if name == "ssm_out" and 1 < k_heads < v_heads:
            if value.shape[1] % v_heads:
                raise ValueError(
                    f"heads of {self._v_dim} values do not consist of whole groups of quantised "
                    "weights; use a file in which this tensor is F16 or BF16"
                )
            rows = heads_by_key(value.t(), k_heads, v_heads, value.shape[1] // v_heads)
            return rows.t().contiguous()
        return value

    def _part_sizes(self, name: str) -> list[int]:
        """The rows that a head of keys has in each part of a divided tensor."""
        shared = self._v_heads // max(1, self._k_heads)
        if name == "ssm_ba":
            return [shared, shared]
        keys, values = self._k_dim, shared * self._v_dim
        return [keys, keys, values, values]

    def _expert_name(self, side: str, expert: int) -> str:
        return self._expert.format(expert=expert, side=self._sides.get(side, side))

    def _count(self, key: str) -> int:
        """A number of the metadata, or the largest of an array. gguf_config.py checks them."""
        value = self._file.metadata.get(f"{self._file.architecture}.{key}")
        if isinstance(value, np.ndarray):
            value = int(value.max()) if value.size and value.dtype.kind in "iu" else 0
        return value if isinstance(value, int) else 0


def _place(tensor: GGUFTensor) -> tuple[str, str]:
    """The number of a tensor's block and its name there; ("", "") if it is in no block."""
    match = _BLOCK.fullmatch(tensor.name)
    return (match[1], match[2] or match[3]) if match else ("", "")
