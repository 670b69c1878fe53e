"""`Variant`: a small model of a family, as data; and the sizes that most variants share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

SHARED = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": None,
}
TWO_KV_HEADS = {**SHARED, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Variant:
    """A configuration, and how its checkpoint is stored."""

    model_type: str
    settings: dict[str, Any]
    shard_size: str = "1GB"
    pickled: bool = False
    attention: str = "eager"  # the attention that transformers uses

    def as_one_file(self) -> Variant:
        """The same model in one safetensors file."""
        return replace(self, shard_size="1GB", pickled=False)
