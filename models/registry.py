"""Finds the class of an architecture, reads its configuration and builds the model."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import cast

import torch

from ostinato.conf.schema import ExpertKernels, ModelImplementation
from ostinato.models.base import LanguageModel
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.checkpoints.headers import read_headers
from ostinato.models.checkpoints.slots import bare_name, stored_modules
from ostinato.models.choose_weights import PLAIN
from ostinato.models.config.head_spec import HeadSpec
from ostinato.models.config.hf_fields import architecture_of
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import CrossSpace
from ostinato.models.layers.adapter_slots import AdapterSpace
from ostinato.models.layers.linear_layers import BuildOptions, LinearBase
from ostinato.models.layers.moe import Experts
from ostinato.models.quantized_checkpoints.gguf import GGUFPolicy
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy
from ostinato.models.quantized_checkpoints.rounded_inputs import RoundingPolicy
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.weight_policy import WeightPolicy
from ostinato.ops.parallel.exchange import Exchange

__all__ = ("ARCHITECTURES", "build_model", "class_of", "model_class", "read_model_config")

ARCHITECTURES = {
    "AudioFlamingo3ForConditionalGeneration": (
        "ostinato.models.families.qwen2_audio:Qwen2AudioForConditionalGeneration"
    ),
    "BambaForCausalLM": "ostinato.models.families.bamba:BambaForCausalLM",
    "BertForMaskedLM": "ostinato.models.families.bert:BertModel",
    "BertForSequenceClassification": "ostinato.models.families.bert:BertForSequenceClassification",
    "BertModel": "ostinato.models.families.bert:BertModel",
    "BloomForCausalLM": "ostinato.models.families.bloom:BloomForCausalLM",
    "CodeGenForCausalLM": "ostinato.models.families.codegen:CodeGenForCausalLM",
    "Cohere2ForCausalLM": "ostinato.models.families.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "ostinato.models.families.cohere:CohereForCausalLM",
    "DeepseekV2ForCausalLM": "ostinato.models.families.deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "ostinato.models.families.deepseek_v3:DeepseekV3ForCausalLM",
    "FalconForCausalLM": "ostinato.models.families.falcon:FalconForCausalLM",
    "Gemma2ForCausalLM": "ostinato.models.families.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "ostinato.models.families.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": (
        "ostinato.models.families.gemma3:Gemma3ForConditionalGeneration"
    ),
    "GemmaForCausalLM": "ostinato.models.families.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "ostinato.models.families.glm4:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "ostinato.models.families.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "ostinato.models.families.glm4_moe_lite:Glm4MoeLiteForCausalLM",
    "GPT2LMHeadModel": "ostinato.models.families.gpt2:GPT2LMHeadModel",
    "GPTJForCausalLM": "ostinato.models.families.gptj:GPTJForCausalLM",
    "GPTNeoXForCausalLM": "ostinato.models.families.gpt_neox:GPTNeoXForCausalLM",
    "GptOssForCausalLM": "ostinato.models.families.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "ostinato.models.families.granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "ostinato.models.families.granitemoe:GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": (
        "ostinato.models.families.granitemoehybrid:GraniteMoeHybridForCausalLM"
    ),
    "Idefics3ForConditionalGeneration": (
        "ostinato.models.families.idefics3:Idefics3ForConditionalGeneration"
    ),
    "InternVLForConditionalGeneration": (
        "ostinato.models.families.internvl:InternVLForConditionalGeneration"
    ),
    "Lfm2ForCausalLM": "ostinato.models.families.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "ostinato.models.families.lfm2_moe:Lfm2MoeForCausalLM",
    "Llama4ForCausalLM": "ostinato.models.families.llama4:Llama4ForCausalLM",
    "LlamaForCausalLM": "ostinato.models.families.llama:LlamaForCausalLM",
    "LlavaForConditionalGeneration": "ostinato.models.families.llava:LlavaForConditionalGeneration",
    "Ministral3ForCausalLM": "ostinato.models.families.ministral3:Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration": (
        "ostinato.models.families.mistral3:Mistral3ForConditionalGeneration"
    ),
    "MistralForCausalLM": "ostinato.models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "ostinato.models.families.mixtral:MixtralForCausalLM",
    "MPTForCausalLM": "ostinato.models.families.mpt:MptForCausalLM",  # in published files
    "MptForCausalLM": "ostinato.models.families.mpt:MptForCausalLM",
    "NemotronHForCausalLM": "ostinato.models.families.nemotron_h:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "ostinato.models.families.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "ostinato.models.families.olmo3:Olmo3ForCausalLM",
    "OlmoeForCausalLM": "ostinato.models.families.olmoe:OlmoeForCausalLM",
    "OPTForCausalLM": "ostinato.models.families.opt:OPTForCausalLM",
    "Phi3ForCausalLM": "ostinato.models.families.phi3:Phi3ForCausalLM",
    "PhiForCausalLM": "ostinato.models.families.phi:PhiForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": (
        "ostinato.models.families.qwen2_vl:Qwen2VLForConditionalGeneration"
    ),
    "Qwen2AudioForConditionalGeneration": (
        "ostinato.models.families.qwen2_audio:Qwen2AudioForConditionalGeneration"
    ),
    "Qwen2ForCausalLM": "ostinato.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "ostinato.models.families.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration": (
        "ostinato.models.families.qwen2_vl:Qwen2VLForConditionalGeneration"
    ),
    "Qwen3_5ForCausalLM": "ostinato.models.families.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": (
        "ostinato.models.families.qwen3_5:Qwen3_5ForConditionalGeneration"
    ),
    "Qwen3_5MoeForCausalLM": "ostinato.models.families.qwen3_5_moe:Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": (
        "ostinato.models.families.qwen3_5_moe:Qwen3_5MoeForConditionalGeneration"
    ),
    "Qwen3ForCausalLM": "ostinato.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "ostinato.models.families.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "ostinato.models.families.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration": (
        "ostinato.models.families.qwen3_vl:Qwen3VLForConditionalGeneration"
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "ostinato.models.families.qwen3_vl:Qwen3VLMoeForConditionalGeneration"
    ),
    "SmolLM3ForCausalLM": "ostinato.models.families.smollm3:SmolLM3ForCausalLM",
    "SmolVLMForConditionalGeneration": (
        "ostinato.models.families.idefics3:Idefics3ForConditionalGeneration"
    ),
    "StableLmForCausalLM": "ostinato.models.families.stablelm:StableLmForCausalLM",
    "Starcoder2ForCausalLM": "ostinato.models.families.starcoder2:Starcoder2ForCausalLM",
    "WhisperForConditionalGeneration": (
        "ostinato.models.families.whisper:WhisperForConditionalGeneration"
    ),
}
"""The name under `architectures` in config.json -> module:class."""


def model_class(architecture: str) -> type[LanguageModel]:
    """The class of `architecture`.

    Raises:
        ValueError: the architecture is unknown; the text lists the known ones.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(_why_unknown(architecture))
    module, name = ARCHITECTURES[architecture].split(":")
    return cast(type[LanguageModel], getattr(import_module(module), name))


def _why_unknown(architecture: str) -> str:
    known = ", ".join(ARCHITECTURES)
    return f"architecture {architecture!r} is not supported; supported: {known}"


def class_of(config: ModelConfig) -> type[LanguageModel]:
    """The class of a model whose configuration was read."""
    if isinstance(config.head, HeadSpec):
        from ostinato.models.draft_heads.eagle3 import Eagle3Head

        return Eagle3Head
    if config.head is not None:
        from ostinato.models.draft_heads.next_token import NextTokenHead

        return NextTokenHead
    if config.traced is None:
        return model_class(config.architecture)
    from ostinato.models.traced.traced_model import TracedCausalLM

    return TracedCausalLM


def read_model_config(
    checkpoint: Checkpoint, implementation: ModelImplementation = ModelImplementation.auto
) -> ModelConfig:
    """The configuration of a checkpoint's model.

    Args:
        checkpoint: the checkpoint, with its config.json.
        implementation: this project's code, or that of transformers.

    Raises:
        ValueError: its architecture is unknown, or a value of its config is not supported.
    """
    architecture = architecture_of(checkpoint.hf_config)
    if implementation is not ModelImplementation.transformers and architecture in ARCHITECTURES:
        family = model_class(architecture)
        config = family.read_config(checkpoint.hf_config, checkpoint.generation_config)
        return _with_stored_head(config, checkpoint) if family.head_by_checkpoint else config
    if implementation is ModelImplementation.native:
        raise ValueError(_why_unknown(architecture))
    return _read_traced(checkpoint, architecture)


def _with_stored_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The configuration, whose head is not tied if config.json does not say so and there is one."""
    if "tie_word_embeddings" in checkpoint.hf_config or not config.tie_word_embeddings:
        return config
    layout = class_of(config).checkpoint_layout
    has_head = any(bare_name(name, layout) == layout.head for name in read_headers(checkpoint))
    return replace(config, tie_word_embeddings=not has_head)


def _read_traced(checkpoint: Checkpoint, architecture: str) -> ModelConfig:
    """The configuration of a model that runs through transformers."""
    from ostinato.models.traced.traced_model import TracedCausalLM

    try:
        return TracedCausalLM.read_config(checkpoint.hf_config, checkpoint.generation_config)
    except ValueError as error:
        if architecture in ARCHITECTURES:
            raise ValueError(
                f"model.implementation=transformers, but {architecture} is not served that way: "
                f"{error}; leave model.implementation out"
            ) from error
        own_code = checkpoint.hf_config.get("auto_map")
        code = own_code.get("AutoModelForCausalLM") if isinstance(own_code, dict) else own_code
        brought = f"; the checkpoint's own code for it ({code}) is never run" if own_code else ""
        raise ValueError(
            f"architecture {architecture!r} is not supported: it has no implementation here, and "
            f"through transformers it is not served: {error}{brought}"
        ) from error


def _quantised_modules(weights: WeightPolicy) -> set[str]:
    """The names of all modules of a quantised checkpoint; empty if they are not known."""
    policy = weights.as_stored if isinstance(weights, RoundingPolicy) else weights
    headers = policy.headers if isinstance(policy, CheckpointPolicy) else {}
    return {name.rpartition(".")[0] for name in headers}


def build_model(  # noqa: PLR0913 - what a model is built for
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention_backend: str,
    max_model_len: int | None = None,
    weights: WeightPolicy = PLAIN,
    shard: Shard = WHOLE,
    exchange: Exchange = Exchange.shared_memory,
    has_cache_scales: bool = False,
    experts: ExpertKernels = ExpertKernels.auto,
    adapters: AdapterSpace | None = None,
    num_media_rows: int = 0,
    cross: CrossSpace | None = None,
) -> LanguageModel:
    """The model with unset weights. Their memory is reserved, and not written yet.

    Args:
        config: its hyperparameters.
        dtype: the dtype of weights and activations.
        device: the device of the weights; "meta" gives their shapes without memory.
        attention_backend: a name that `select_backend` returned.
        max_model_len: tokens of the longest context; None = that of the config.
        weights: the weight method of each matrix.
        shard: the part of every layer that this rank holds. If there are several ranks,
            `join_group` (models/layers/linear_layers.py) must be called before the model is run.
        exchange: how this rank exchanges values with the others.
        has_cache_scales: the checkpoint has scales for keys and values, and the cache uses them.
        experts: the kernels of the experts, if the model has any.
        adapters: the room for low-rank adapters; None = no room.
        num_media_rows: embeddings of images or sounds that can be kept at once; 0 = the model takes
            none of them and has no tower for them.
        cross: the room for keys and values of encoder states, for a model with cross attention.

    Raises:
        ValueError: the architecture is unknown, `max_model_len` is above what the model states,
            the model's sizes cannot be divided among the ranks, matrices that the model stacks are
            quantised differently, or the chosen kernels do not support the model's experts.
    """
    length = max_model_len or config.max_model_len
    if length > config.max_model_len:
        raise ValueError(
            f"model.max_model_len must be at most {config.max_model_len}, what the model states, "
            f"got {length}; a longer context needs rotary scaling (model.config.rope_parameters)"
        )
    if (reason := config.why_unshardable(shard.size)) is not None:
        raise ValueError(reason)
    options = BuildOptions(
        dtype=dtype,
        device=device,
        attention_backend=attention_backend,
        max_model_len=length,
        shard=shard,
        exchange=exchange,
        has_cache_scales=has_cache_scales,
        experts=experts,
        adapters=adapters,
        num_media_rows=num_media_rows,
        cross=cross,
    )
    model = class_of(config)(config, options)
    stored = _quantised_modules(weights)
    layout = model.checkpoint_layout.of_checkpoint(stored)
    model.checkpoint_layout = replace(layout, ignored=layout.ignored + weights.ignored)
    layout = model.checkpoint_layout
    if isinstance(weights, GGUFPolicy):
        layout = model.gguf_layout or layout
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            names = stored_modules(name, module, layout, modules=stored)
            module.use(weights.method_for(names, module.role, module.spec))
    for name, module in model.named_modules():
        if isinstance(module, Experts) and (reason := module.why_unsupported) is not None:
            raise ValueError(f"graphs.experts={experts} {reason} ({name}); leave it at auto")
    return model.eval()
