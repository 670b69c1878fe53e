"""StableLM 2 and 3B (arXiv:2402.17834): Llama with layer norms, a quarter of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.config.block_spec import BlockSpec, NormKind, Residual
from ostinato.models.config.hf_fields import HFConfig, read_flag, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.families.llama import LlamaForCausalLM

__all__ = ("StableLmForCausalLM",)

_KEYS = DecoderKeys(norm_eps="layer_norm_eps", default_norm_eps=1e-5, rotary_fraction=0.25)


class StableLmForCausalLM(LlamaForCausalLM):
    """Llama with layer norms. In some models attention and MLP are parallel and share a norm."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        refuse_other_values(hf_config, {"qk_layernorm": False})
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        is_parallel = read_flag(hf_config, "use_parallel_residual", False)
        block = BlockSpec(
            norm=NormKind.layer,
            residual=Residual.parallel_one_norm if is_parallel else Residual.sequential,
            qkv_bias=read_flag(hf_config, "use_qkv_bias", False),
        )
        return replace(config, block=block)
