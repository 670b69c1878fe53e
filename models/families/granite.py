"""Granite 3 (IBM 2024): Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.hf_fields import HFConfig, read_number
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import read_decoder_config
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("GraniteForCausalLM", "with_multipliers")


def with_multipliers(config: ModelConfig, hf_config: HFConfig) -> ModelConfig:
    """A Llama's configuration with Granite's four multipliers.

    They scale embeddings, attention logits, residual branches and output logits.

    The branches' multiplier m is moved into the embeddings. The model computes
    `h = e + m * (f_1 + f_2 + ...)`, and every branch reads an RMS norm of h. The norm of `h / m` is
    the same if its eps is divided by m squared. So the blocks compute `e / m + f_1 + f_2 + ...`.

    Raises:
        ValueError: a multiplier is not positive.
    """
    embedding, attention, residual, logits = (
        read_number(hf_config, key, 1.0, above=0)
        for key in (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        )
    )
    return replace(
        config,
        embedding_scale=embedding / residual,
        attention_scale=attention,
        norm_eps=config.norm_eps / residual**2,
        logit_scale=1.0 / logits,
    )


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama with multipliers, which cost nothing in its blocks."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        return with_multipliers(read_decoder_config(hf_config, generation_config), hf_config)
