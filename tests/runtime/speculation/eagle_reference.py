"""An EAGLE-3 head in plain torch, and random heads in the layout of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

AUX_LAYERS = [1, 2, 4]


def write_head(directory: Path, target: dict[str, Any], **changes: object) -> dict[str, Tensor]:
    """Writes a random head for a target; returns its tensors.

    Args:
        directory: gets config.json and model.safetensors.
        target: the target's config.json.
        changes: values to change in the head's config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"] // 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
    } | changes
    (directory / "config.json").write_text(json.dumps(config))
    size, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    draft_vocab = config["draft_vocab_size"]
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    layer = "midlayer."
    tensors = {
        "fc.weight": matrix(size, 3 * config.get("target_hidden_size", size)),
        f"{layer}self_attn.q_proj.weight": matrix(queries, 2 * size),
        f"{layer}self_attn.k_proj.weight": matrix(keys, 2 * size),
        f"{layer}self_attn.v_proj.weight": matrix(keys, 2 * size),
        f"{layer}self_attn.o_proj.weight": matrix(size, queries),
        f"{layer}mlp.gate_proj.weight": matrix(inner, size),
        f"{layer}mlp.up_proj.weight": matrix(inner, size),
        f"{layer}mlp.down_proj.weight": matrix(size, inner),
        "lm_head.weight": matrix(draft_vocab, size) * 4,
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)
    tensors["norm.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)
    ids = torch.randperm(config["vocab_size"], generator=generator)[:draft_vocab].sort().values
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, directory / "model.safetensors")
    return tensors


class ReferenceHead:
    """Computes a head over a whole sequence at once, in float32.

    Args:
        tensors: the head's tensors by their names in a checkpoint.
        embedding: [V, D] of the target.
        head_dim: the head size of the attention.
        norm_before_residual: as in config.json.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        embedding: Tensor,
        *,
        head_dim: int = 32,
        norm_before_residual: bool = False,
    ) -> None:
        self.tensors = {
            name: value.float() if value.is_floating_point() else value
            for name, value in tensors.items()
        }
        self.embedding = embedding.float()
        self.head_dim = head_dim
        self.norm_before_residual = norm_before_residual

    def draft_logits(self, token_ids: list[int], hidden: Tensor, drafts: list[int]) -> list[Tensor]:
        """The logits over the target's vocabulary, [V], from which each draft is drawn.

        Args:
            token_ids: the sequence, n tokens.
            hidden: [n - 1, 3 D], the target's hidden states.
            drafts: the drafts. Each is the input of the next.
        """
        features = hidden.float() @ self.tensors["fc.weight"].T
        tokens = token_ids[1:]
        found: list[Tensor] = []
        for draft in drafts:
            out = self._layer(features, tokens)
            found.append(self._logits(out[-1]))
            features, tokens = torch.cat([features, out[-1:]]), [*tokens, draft]
        return found

    def _layer(self, features: Tensor, tokens: list[int]) -> Tensor:
        def weight(name: str) -> Tensor:
            return self.tensors[f"midlayer.{name}.weight"]

        embedded = _norm(self.embedding[torch.tensor(tokens)], weight("input_layernorm"))
        normal = _norm(features, weight("hidden_norm"))
        pair = torch.cat([embedded, normal], 1)
        q, k, v = (
            (pair @ weight(f"self_attn.{name}_proj").T)
            .view(len(tokens), -1, self.head_dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        q, k = _rotate(q), _rotate(k)
        shared = len(q) // len(k)
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0), is_causal=True
        )
        residual = normal if self.norm_before_residual else features
        merged = attended.transpose(0, 1).reshape(len(tokens), -1)
        hidden = residual + merged @ weight("self_attn.o_proj").T
        normal = _norm(hidden, weight("post_attention_layernorm"))
        gated = F.silu(normal @ weight("mlp.gate_proj").T) * (normal @ weight("mlp.up_proj").T)
        return hidden + gated @ weight("mlp.down_proj").T

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.tensors["lm_head.weight"] @ _norm(hidden, self.tensors["norm.weight"])
        whole = torch.full((len(self.embedding),), -torch.inf)
        whole[torch.arange(len(logits)) + self.tensors["d2t"]] = logits
        return whole


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )
