"""The tensors of towers in checkpoints of LLaVA, Gemma 3, Pixtral, Mistral 3 and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ostinato.models.base import CheckpointLayout
from ostinato.models.config.vision_config import TowerKind, VisionConfig

__all__ = ("SIGLIP_NAMES", "TOWER", "with_names_of", "with_projector", "with_qwen3_tower")

SIGLIP_NAMES = (
    ("vision.blocks.", "vision_tower.encoder.layers."),
    ("vision.patch_embed.", "vision_tower.embeddings.patch_embedding."),
    ("vision.position_embedding", "vision_tower.embeddings.position_embedding.weight"),
    ("vision.final_norm.", "vision_tower.post_layernorm."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.", ".self_attn."),
    (".self_attn.proj.", ".self_attn.out_proj."),
)
"""(our name, the name in checkpoints) of the tensors of CLIP and SigLIP."""

TOWER = r"(^|\.)vision_tower\.(vision_model\.)?"
"""The names of a tower's tensors begin with what this regular expression matches."""

_UNUSED = (r"post_layernorm\.", r"head\.", r"embeddings\.position_ids$")


def with_projector(decoder: CheckpointLayout) -> CheckpointLayout:
    """The layout of a model with a tower and a projector, without the names of a kind of tower.

    Args:
        decoder: the layout of its decoder.
    """
    return replace(
        decoder,
        prefixes=("language_model.model.", "model.", "language_model.", "model."),
        unprefixed=("vision_tower.", "multi_modal_projector."),
        renamed=(*decoder.renamed, ("vision.projector.", "multi_modal_projector.")),
        merged=(*decoder.merged, ("qkv", ("q_proj", "k_proj", "v_proj"))),
        tower=(TOWER, r"(^|\.)multi_modal_projector\."),
    )


def with_qwen3_tower(decoder: CheckpointLayout) -> CheckpointLayout:
    """The layout of a model with this decoder and the tower of Qwen3-VL, as in Qwen3.5 too."""
    return replace(
        decoder,
        prefixes=("model.language_model.", "model.", "language_model.", "model."),
        unprefixed=("visual.",),
        tower=(r"(^|\.)visual\.",),
        renamed=(
            *decoder.renamed,
            ("vision.", "visual."),
            ("visual.patch_embed.", "visual.patch_embed.proj."),
            ("visual.position_embedding", "visual.pos_embed.weight"),
            ("visual.deep_mergers.", "visual.deepstack_merger_list."),
            (".fc1.", ".linear_fc1."),
            (".fc2.", ".linear_fc2."),
        ),
    )


def with_names_of(config: VisionConfig, layout: CheckpointLayout) -> CheckpointLayout:
    """The layout with the names of a tower, of which the layers that are not computed are not used.

    Args:
        config: of the tower: CLIP, SigLIP, Pixtral or Mistral 3.
        layout: of `with_projector`.
    """
    later = range(config.num_used_layers, config.num_layers)
    if config.kind in (TowerKind.pixtral, TowerKind.mistral3):
        return _with_pixtral(config, layout, later)
    named = replace(
        layout,
        aliases=(("vision_tower.", "vision_tower.vision_model."),),
        renamed=(
            *layout.renamed,
            ("vision.class_embedding", "vision_tower.embeddings.class_embedding"),
            ("vision.pre_norm.", "vision_tower.pre_layrnorm."),
            *SIGLIP_NAMES,
        ),
    )
    unused = (*_UNUSED, *(rf"encoder\.layers\.{layer}\." for layer in later))
    return named.without(*(TOWER + each for each in unused))


def _with_pixtral(
    config: VisionConfig, layout: CheckpointLayout, later: Iterable[int]
) -> CheckpointLayout:
    layers = "vision_tower.transformer.layers."
    # The decoder has MLPs too, so the names of those of the tower begin with their layer.
    mlps = ((f"{layers}{n}.mlp.", f"{layers}{n}.feed_forward.") for n in range(config.num_layers))
    named = replace(
        layout,
        renamed=(
            *layout.renamed,
            ("vision.patch_embed.", "vision_tower.patch_conv."),
            ("vision.pre_norm.", "vision_tower.ln_pre."),
            ("vision.merger.norm.", "multi_modal_projector.norm."),
            ("vision.merger.linear.", "multi_modal_projector.patch_merger.merging_layer."),
            ("vision.blocks.", layers),
            (".norm1.", ".attention_norm."),
            (".norm2.", ".ffn_norm."),
            (".attn.", ".attention."),
            (".attention.proj.", ".attention.o_proj."),
            *mlps,
        ),
    )
    return named.without(*(rf"{TOWER}transformer\.layers\.{layer}\." for layer in later))
