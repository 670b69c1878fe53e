"""Writes the tables of docs/models.md: what is served, and which config values are refused.

    python docs/list_models.py

The rows of the first table follow from models/registry.py and the first lines of the families'
modules. The refused values, and the models that run through transformers, are listed here.
tests/models/config_json/test_refused.py checks that the list of refused values is complete.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.models.registry import ARCHITECTURES

__all__ = ("PAGE", "REFUSED", "Refused", "with_table")

_ROOT = Path(__file__).resolve().parents[1]
PAGE = _ROOT / "docs/models.md"


class Refused(NamedTuple):
    """A value in a config.json with which the model is refused."""

    key: str  # `a.b` = the key `b` of the object `a`
    value: Any
    why: str
    beside: tuple[str, Any] | None = None  # refused only if this further key has this value

    def shown(self) -> str:
        """The value as a cell of the table."""
        text = _pair(self.key, self.value)
        return text if self.beside is None else f"{text} with {_pair(*self.beside)}"


def _pair(key: str, value: Any) -> str:
    return f"`{key}={str(value).lower() if isinstance(value, bool) else value}`"


_QK_LAYER_NORM = "a layer norm of queries and keys is not implemented"
_NO_MODEL = "no published model has it"
_TIED_BIAS = "a tied head would have to do without its bias"
_THREE_COLOURS = "images have three colours"
_TWO_SIDED = "it makes an encoder of the decoder"
_OTHER_ENCODER = "another encoder is not implemented for this family"
_NO_SCALE = "the class of transformers does not read it, and Whisper has no such scale"
_ONLY_QWEN2 = "only Qwen2 is implemented as the decoder"
_LLAMA_OR_QWEN = "it needs the blocks of Llama or Qwen"
_OF_IDEFICS = (
    Refused("vision_config.num_channels", 1, _THREE_COLOURS),
    Refused("text_config.model_type", "mistral", "only Llama is implemented as the decoder"),
)
_OF_GATED_DELTA = (
    Refused("hidden_act", "gelu", "the convolution before the delta rule has SiLU too"),
    Refused("attn_output_gate", False, _NO_MODEL),
    Refused("mamba_ssm_dtype", "bfloat16", "states are kept in float32"),
)
_OF_QWEN3_5 = (
    *_OF_GATED_DELTA,
    Refused("rope_parameters.mrope_interleaved", False, "the axes of positions alternate"),
)
_NO_KEY = "the class of transformers ignores it"
_OF_QWEN3_5_IMAGES = (
    *(one._replace(key=f"text_config.{one.key}") for one in _OF_QWEN3_5),
    Refused("vision_config.in_channels", 1, _THREE_COLOURS),
    Refused("vision_config.deepstack_visual_indexes", [1], _NO_KEY),
)
_OF_LFM2 = (
    Refused("block_use_swiglu", False, _NO_MODEL),
    Refused("use_pos_enc", False, _NO_MODEL),
    Refused("conv_dim", 1, "a convolution has the channels of the hidden state"),
)
_OF_SOUNDS = (
    Refused("audio_config.model_type", "whisper", _OTHER_ENCODER),
    Refused("audio_config.scale_embedding", True, _NO_SCALE),
    Refused("text_config.model_type", "llama", _ONLY_QWEN2),
)
_OF_MAMBA = (Refused("hidden_act", "gelu", "the kernels of Mamba-2 have SiLU"),)
_OF_MPT = (
    Refused("no_bias", False, "checkpoints with biases are not read"),
    Refused("logit_scale", 2.0, _NO_MODEL),
    Refused("attn_config.alibi", False, "learned positions are not implemented for MPT"),
    Refused("attn_config.attn_type", "multiquery_attention", _NO_MODEL),
    Refused("attn_config.attn_uses_sequence_id", True, "it is for packed training texts"),
    Refused("attn_config.prefix_lm", True, "tokens of the prefix would see later ones"),
    Refused("attn_config.qk_ln", True, _QK_LAYER_NORM),
)
_OF_NEMOTRON = (
    Refused("mamba_hidden_act", "gelu", "the kernels of Mamba-2 have SiLU"),
    Refused("mamba_ssm_cache_dtype", "bfloat16", "states are kept in float32"),
    Refused("moe_latent_size", 1024, "experts in a smaller space (Nemotron 3 Super) are missing"),
    Refused("n_shared_experts", 2, _NO_KEY),
    Refused("attention_bias", True, _NO_KEY),
    Refused("mamba_proj_bias", True, _NO_KEY),
    Refused("residual_in_fp32", True, _NO_KEY),
    Refused("sliding_window", 4096, _NO_KEY),
    Refused("tie_word_embeddings", True, _NO_KEY),
)
REFUSED: dict[str, tuple[Refused, ...]] = {
    "AudioFlamingo3ForConditionalGeneration": _OF_SOUNDS,
    "BambaForCausalLM": _OF_MAMBA,
    "BloomForCausalLM": (
        Refused(
            "apply_residual_connection_post_layernorm",
            True,
            "the residual stream would be the normalised one; no published model has it",
        ),
    ),
    "CodeGenForCausalLM": (Refused("tie_word_embeddings", True, _TIED_BIAS),),
    "Cohere2ForCausalLM": (Refused("use_qk_norm", True, _QK_LAYER_NORM),),
    "CohereForCausalLM": (Refused("use_qk_norm", True, _QK_LAYER_NORM + "; Command R+ has it"),),
    "DeepseekV2ForCausalLM": (
        Refused("attention_bias", True, _NO_MODEL),
        Refused("norm_topk_prob", True, _NO_MODEL),
    ),
    "DeepseekV3ForCausalLM": (Refused("attention_bias", True, _NO_MODEL),),
    "FalconForCausalLM": (
        Refused(
            "parallel_attn",
            False,
            "no published model has both",
            beside=("new_decoder_architecture", True),
        ),
    ),
    "GPT2LMHeadModel": (
        Refused("scale_attn_by_inverse_layer_idx", True, "layers would have scales of their own"),
        Refused("scale_attn_weights", False, _NO_MODEL),
    ),
    "GPTJForCausalLM": (Refused("tie_word_embeddings", True, _TIED_BIAS),),
    "Gemma2ForCausalLM": (Refused("use_bidirectional_attention", True, _TWO_SIDED),),
    "Gemma3ForCausalLM": (Refused("use_bidirectional_attention", True, _TWO_SIDED),),
    "Gemma3ForConditionalGeneration": (
        Refused("vision_config.num_channels", 1, _THREE_COLOURS),
        Refused("vision_config.model_type", "clip_vision_model", _OTHER_ENCODER),
        Refused("text_config.use_bidirectional_attention", True, _TWO_SIDED),
    ),
    "GemmaForCausalLM": (Refused("use_bidirectional_attention", True, _TWO_SIDED),),
    "Glm4MoeLiteForCausalLM": (Refused("attention_bias", True, _NO_MODEL),),
    "GptOssForCausalLM": (
        Refused("hidden_act", "gelu", "the model always uses its clamped SwiGLU"),
        Refused("swiglu_alpha", 1.0, "every published model has 1.702"),
        Refused("swiglu_limit", 5.0, "every published model has 7.0"),
    ),
    "GraniteMoeHybridForCausalLM": _OF_MAMBA,
    "Idefics3ForConditionalGeneration": _OF_IDEFICS,
    "InternVLForConditionalGeneration": (
        Refused("vision_config.num_channels", 1, _THREE_COLOURS),
        Refused("vision_config.norm_type", "batch_norm", "the norms are layer or RMS norms"),
        Refused("vision_feature_select_strategy", "full", "the class token lies in no square"),
        Refused("downsample_ratio", 0.3, "whole squares of patches are merged"),
        Refused("text_config.model_type", "gemma", _LLAMA_OR_QWEN),
    ),
    "Lfm2ForCausalLM": _OF_LFM2,
    "Lfm2MoeForCausalLM": _OF_LFM2,
    "LlavaForConditionalGeneration": (
        Refused("vision_config.model_type", "dinov2", "CLIP, SigLIP and Pixtral are implemented"),
        Refused("vision_config.num_channels", 1, _THREE_COLOURS),
        Refused("text_config.model_type", "gemma", _LLAMA_OR_QWEN),
    ),
    "Mistral3ForConditionalGeneration": (
        Refused("vision_config.model_type", "dinov2", "Mistral AI's models have Pixtral's tower"),
        Refused("vision_config.num_channels", 1, _THREE_COLOURS),
        Refused("text_config.model_type", "llama", "Mistral AI's models have no other decoders"),
    ),
    "MPTForCausalLM": _OF_MPT,
    "MptForCausalLM": _OF_MPT,
    "NemotronHForCausalLM": _OF_NEMOTRON,
    "OPTForCausalLM": (
        Refused("do_layer_norm_before", False, "OPT-350M alone normalises afterwards"),
        Refused("_remove_final_layer_norm", True, "it is for checkpoints from before 2022"),
        Refused(
            "layer_norm_elementwise_affine", False, "norms without weights are not implemented"
        ),
        Refused("word_embed_proj_dim", 32, "OPT-350M alone projects its embeddings"),
    ),
    "OlmoeForCausalLM": (Refused("clip_qkv", 8.0, _NO_MODEL),),
    "PhiForCausalLM": (
        Refused("qk_layernorm", True, _QK_LAYER_NORM),
        Refused("tie_word_embeddings", True, _TIED_BIAS),
    ),
    "Qwen2AudioForConditionalGeneration": _OF_SOUNDS,
    "Qwen2VLForConditionalGeneration": (Refused("vision_config.in_channels", 1, _THREE_COLOURS),),
    "Qwen2_5_VLForConditionalGeneration": (
        Refused("vision_config.in_channels", 1, _THREE_COLOURS),
    ),
    "Qwen3NextForCausalLM": _OF_GATED_DELTA,
    "Qwen3_5ForCausalLM": _OF_QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _OF_QWEN3_5_IMAGES,
    "Qwen3_5MoeForCausalLM": (*_OF_QWEN3_5, Refused("norm_topk_prob", False, _NO_MODEL)),
    "Qwen3_5MoeForConditionalGeneration": (
        *_OF_QWEN3_5_IMAGES,
        Refused("text_config.norm_topk_prob", False, _NO_MODEL),
    ),
    "Qwen3VLForConditionalGeneration": (
        Refused("vision_config.in_channels", 1, _THREE_COLOURS),
        Refused("text_config.use_sliding_window", True, _NO_MODEL),
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        Refused("vision_config.in_channels", 1, _THREE_COLOURS),
        Refused("text_config.norm_topk_prob", False, _NO_MODEL),
        Refused("text_config.use_sliding_window", True, _NO_MODEL),
    ),
    "SmolVLMForConditionalGeneration": _OF_IDEFICS,
    "StableLmForCausalLM": (Refused("qk_layernorm", True, _QK_LAYER_NORM),),
}
"""Architecture -> the refused values of its own keys."""

TRACED = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BitNetForCausalLM",
    "CwmForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "GPTBigCodeForCausalLM",
    "GlmForCausalLM",
    "GraniteSWAForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM",
    "MellumForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "OlmoForCausalLM",
    "PersimmonForCausalLM",
    "PhimoeForCausalLM",
    "SeedOssForCausalLM",
)
"""Architectures that run through transformers and are tested (tests/models/traced/)."""

_OWN_ATTENTION = (
    "its class computes attention itself and has no interface for another implementation"
)
NOT_TRACED = {
    "DiffLlamaForCausalLM": "its layers make two attention calls",
    "Gemma4ForCausalLM": "its layers differ in the size of heads",
    "Mamba2ForCausalLM": _OWN_ATTENTION,
    "MiniCPM3ForCausalLM": "its keys are assembled in place",
    "T5ForConditionalGeneration": "it is an encoder-decoder",
}
"""Architectures that transformers has and that are refused, with the reason."""

_HEADING = "| architecture | models | refused | why |\n|---|---|---|---|\n"


def _summary(module: str) -> str:
    """The first line of a module's docstring, as a cell."""
    file = _ROOT / (module.removeprefix("ostinato.").replace(".", "/") + ".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].rstrip(".").replace("|", "\\|")


def table() -> str:
    """The table of docs/models.md."""
    rows = []
    for architecture, place in sorted(ARCHITECTURES.items(), key=lambda item: item[0].lower()):
        module = place.split(":")[0]
        refused = REFUSED.get(architecture, ())
        keys = "<br>".join(one.shown() for one in refused)
        reasons = "<br>".join(one.why for one in refused)
        rows.append(f"| `{architecture}` | {_summary(module)} | {keys} | {reasons} |\n")
    return _HEADING + "".join(rows)


_TRACED_HEADING = "| architecture | through `transformers` |\n|---|---|\n"


def traced_table() -> str:
    """The table of architectures in transformers: those that are served, and those refused."""
    states = dict.fromkeys(TRACED, "served") | {
        name: f"refused: {why}" for name, why in NOT_TRACED.items()
    }
    rows = [f"| `{name}` | {states[name]} |\n" for name in sorted(states, key=str.lower)]
    return _TRACED_HEADING + "".join(rows)


def with_table(document: str) -> str:
    """`document`, the text of docs/models.md, with its two tables written anew."""
    for heading, written in ((_HEADING, table()), (_TRACED_HEADING, traced_table())):
        before, after = document.split(heading)
        rest = after[after.index("\n\n") + 1 :]
        document = before + written + rest
    return document


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
