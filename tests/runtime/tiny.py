"""A tiny random model as an engine configuration; starts in a second when it is not compiled."""

from __future__ import annotations

from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig

VOCAB_SIZE = 300
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "dtype": "float32",
}


def tiny_config(*overrides: str, **values: object) -> RunConfig:
    """Eager mode with a small cache. In the names of `values`, `__` stands for a dot."""
    return load_config(
        [
            "model.load_format=dummy",
            "graphs.mode=eager",
            "graphs.bundle=false",
            "cache.block_size=8",
            "cache.memory_gib=0.01",
            "scheduler.max_num_seqs=8",
            "scheduler.max_num_batched_tokens=64",
            *overrides,
        ],
        values={
            "model.config": MODEL,
            **{key.replace("__", "."): value for key, value in values.items()},
        },
    )
