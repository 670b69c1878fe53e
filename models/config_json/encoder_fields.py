"""Reads the config.json of an encoder (BERT)."""

from __future__ import annotations

from ostinato.models.config.hf_fields import (
    HFConfig,
    architecture_of,
    read_count,
    read_integer,
    read_name,
    read_number,
    read_object,
    refuse_other_values,
)
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.model_kind import ENCODER
from ostinato.models.config_json.torch_fields import read_activation, stated_dtype

__all__ = ("read_encoder_config",)

# Keys that would change the output if they were ignored, with the only supported value.
_MUST_BE = {
    "add_cross_attention": False,
    "is_decoder": False,
    "position_embedding_type": "absolute",
}


# The function that a cross-encoder applies to its one logit -> whether that is the identity. It is
# in the first of these keys, or in older files in the second one.
_IS_IDENTITY = {
    "torch.nn.modules.activation.Sigmoid": False,
    "torch.nn.modules.linear.Identity": True,
}
_SCORE_KEYS = ("sentence_transformers.activation_fn", "sbert_ce_default_activation_function")


def read_encoder_config(hf_config: HFConfig) -> ModelConfig:
    """Read a BERT config.json.

    Raises:
        ValueError: a key is missing, or has a value that is not supported; the text names it.
    """
    refuse_other_values(hf_config, _MUST_BE)
    hidden_size = read_integer(hf_config, "hidden_size")
    num_heads = read_integer(hf_config, "num_attention_heads")
    num_layers = read_count(hf_config, "num_hidden_layers")
    if hidden_size % num_heads:
        raise ValueError(
            f"config.json: hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}"
        )
    architecture = architecture_of(hf_config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read_integer(hf_config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_integer(hf_config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_model_len=read_integer(hf_config, "max_position_embeddings"),
        norm_eps=read_number(hf_config, "layer_norm_eps", 1e-12, at_least=0),
        activation=read_activation(hf_config, "hidden_act", "gelu"),
        tie_word_embeddings=False,
        rope=None,
        sliding_windows=(0,) * num_layers,
        dtype=stated_dtype(hf_config),
        eos_token_ids=(),
        bos_token_id=None,
        kind=ENCODER,
        num_segments=read_integer(hf_config, "type_vocab_size", default=2),
        num_labels=_num_labels(hf_config) if "SequenceClassification" in architecture else 0,
        has_raw_scores=_has_raw_scores(hf_config),
    )


def _has_raw_scores(hf_config: HFConfig) -> bool:
    newer = read_object(hf_config, "sentence_transformers").get("activation_fn")
    stated = (newer, hf_config.get("sbert_ce_default_activation_function"))
    for key, name in zip(_SCORE_KEYS, stated, strict=True):
        if name is None:
            continue
        return _IS_IDENTITY[read_name({key: name}, key, _IS_IDENTITY, "")]
    return False


def _num_labels(hf_config: HFConfig) -> int:
    """The number of labels, by the rule of transformers: two if the config has none."""
    labels = read_object(hf_config, "id2label")
    return len(labels) if labels else read_integer(hf_config, "num_labels", default=2)
