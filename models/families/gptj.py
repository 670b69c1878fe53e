"""GPT-J (EleutherAI 2021): attention and MLP share one layer norm, RoPE on a part of each head."""

from __future__ import annotations

from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.checkpoints.row_orders import interleaved_queries_and_keys
from ostinato.models.config.block_spec import BlockSpec, NormKind, Residual
from ostinato.models.config.hf_fields import HFConfig, read_integer, refuse_other_values
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config_json.decoder_fields import DecoderKeys, read_decoder_config
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.ops.rope import Rope

__all__ = ("GPTJForCausalLM",)

_KEYS = DecoderKeys(
    hidden_size=("n_embd", "hidden_size"),
    intermediate_size=("n_inner", "intermediate_size"),
    mlp_ratio=4,
    num_layers=("n_layer", "num_hidden_layers"),
    num_heads=("n_head", "num_attention_heads"),
    max_positions=("n_positions", "max_position_embeddings"),
    norm_eps="layer_norm_epsilon",
    default_norm_eps=1e-5,
    activation="activation_function",
    default_activation="gelu_new",
    has_rope=False,  # its config has other keys for the rotary embedding
)
_LAYOUT = CheckpointLayout(
    prefixes=("transformer.",),
    embedding="wte.weight",
    renamed=(
        ("embed_tokens.", "wte."),
        ("layers.", "h."),
        ("attention_norm.", "ln_1."),
        ("self_attn.", "attn."),
        ("o_proj.", "out_proj."),
        ("mlp.up_proj.", "mlp.fc_in."),
        ("mlp.down_proj.", "mlp.fc_out."),
        ("final_norm.", "ln_f."),
    ),
    # Causal masks and rotary tables, which old checkpoints store.
    ignored=(r"\.attn\.(bias|masked_bias|causal_mask|embed_positions)$",),
)


class GPTJForCausalLM(Decoder):
    """A decoder whose MLP and output head have biases, and whose attention has none."""

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        # A tied head cannot have a bias.
        refuse_other_values(hf_config, {"tie_word_embeddings": False})
        config = read_decoder_config(hf_config, generation_config, _KEYS)
        rotary_dim = read_integer(hf_config, "rotary_dim", default=64)
        if rotary_dim % 2 or rotary_dim > config.head_dim:
            raise ValueError(
                f"config.json: rotary_dim must be even and at most the size of a head, "
                f"{config.head_dim}, got {rotary_dim}"
            )
        block = BlockSpec(
            norm=NormKind.layer, residual=Residual.parallel_one_norm, is_gated=False, mlp_bias=True
        )
        rope = Rope(rotary_dim=rotary_dim, theta=10_000.0)
        return replace(config, block=block, rope=rope, head_bias=True)

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        self.checkpoint_layout = replace(
            _LAYOUT,
            merged=(("qkv_proj", ("q_proj", "k_proj", "v_proj")),),
            row_orders=interleaved_queries_and_keys(config),
        )
