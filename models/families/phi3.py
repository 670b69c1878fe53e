"""Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905): Llama with merged matrices in checkpoints."""

from __future__ import annotations

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig, read_object
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.layer_windows import listed_windows
from ostinato.models.decoder import LLAMA_NAMES
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("Phi3ForCausalLM",)

_KEYS = DecoderKeys(default_norm_eps=1e-5, windows=listed_windows)


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama; `qkv_proj` and `gate_up_proj` are stored merged.

    RoPE may cover only a part of each head.
    """

    checkpoint_layout = CheckpointLayout(renamed=LLAMA_NAMES, ignored=(r"rotary_emb\.inv_freq$",))

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        stated = dict(hf_config)
        for form in ("rope_scaling", "rope_parameters"):
            parameters = read_object(stated, form)
            if parameters and "original_max_position_embeddings" not in parameters:
                stated.setdefault("original_max_position_embeddings", 4096)
            if any(parameters.get(key) in ("su", "yarn") for key in ("type", "rope_type")):
                # Early files have `su` or `yarn` for longrope.
                rest = {key: value for key, value in parameters.items() if key != "type"}
                stated[form] = {**rest, "rope_type": "longrope"}
        return read_decoder_config(stated, generation_config, _KEYS)
