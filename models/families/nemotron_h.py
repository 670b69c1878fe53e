"""Nemotron-H (NVIDIA, arXiv:2504.03624): each block is Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.hf_fields import HFConfig, read_integer, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.moe_spec import MoESpec
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.config_json.hybrid_layers import PartKind, read_part_kinds
from ostinato.models.config_json.moe_fields import read_scaled_route
from ostinato.models.config_json.state_space_fields import read_nemotron_state_space
from ostinato.models.decoder import Decoder
from ostinato.models.families.bamba import mamba_names

__all__ = ("NemotronHForCausalLM",)

_KEYS = DecoderKeys(
    norm_eps="layer_norm_epsilon",
    default_norm_eps=1e-5,
    default_positions=4096,
    activation="mlp_hidden_act",
    default_activation="relu2",
    has_rope=False,
)
_DEFAULTS = {"head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2}
# Except for `moe_latent_size`, the class of transformers ignores these keys.
_MUST_BE = {"attention_bias": False, "sliding_window": None, "tie_word_embeddings": False}
_MUST_BE |= {"residual_in_fp32": False, "n_shared_experts": 1, "moe_latent_size": None}


class NemotronHForCausalLM(Decoder):
    """A decoder whose blocks have one part each. Its attention has no positions.

    A checkpoint names the part of every block `mixer`, and stores experts one by one.
    """

    checkpoint_layout = CheckpointLayout(
        prefixes=("backbone.", "model."),
        embedding="embeddings.weight",
        renamed=(
            ("embed_tokens.", "embeddings."),
            ("final_norm.", "norm_f."),
            ("part.score_bias", "mixer.gate.e_score_correction_bias"),
            ("part.shared_expert.", "mixer.shared_experts."),
            *mamba_names("part", "mixer"),
        ),
        merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
        ignored=(r"^mtp\.",),  # layers that predict one token more
    )

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        kinds = read_part_kinds(hf_config)
        refuse_other_values(hf_config, _MUST_BE)
        stated = {**_DEFAULTS, **hf_config, "num_hidden_layers": len(kinds)}
        config = read_decoder_config(stated, generation_config, _KEYS)
        # Some published files state these values again.
        again = {"attention_head_dim": config.head_dim}
        again |= dict.fromkeys(("norm_eps", "rms_norm_eps"), config.norm_eps)
        refuse_other_values(hf_config, again)
        recurrent = tuple(kind is PartKind.mamba for kind in kinds)
        return replace(
            config,
            block=replace(config.block, is_gated=False),
            has_positions=False,
            recurrent=read_nemotron_state_space(hf_config, recurrent, config.norm_eps),
            mlp_layers=tuple(kind in (PartKind.mlp, PartKind.moe) for kind in kinds),
            moe=_read_experts(stated, tuple(kind is PartKind.moe for kind in kinds)),
        )


def _read_experts(hf_config: HFConfig, layers: tuple[bool, ...]) -> MoESpec | None:
    """The experts of the layers that have some; None = no layer has."""
    if not any(layers):
        return None
    return MoESpec(
        route=read_scaled_route(hf_config, group_top=2),
        intermediate_size=read_integer(hf_config, "moe_intermediate_size", default=7688),
        layers=layers,
        has_score_bias=True,
        float32_router=True,
        shared_size=read_integer(hf_config, "moe_shared_expert_intermediate_size", default=7688),
    )
