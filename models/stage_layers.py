"""Divides the layers of a model among the stages of a pipeline, by the bytes of each layer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ostinato.models.base import LanguageModel
from ostinato.models.sharding import Shard, deal_layers

__all__ = ("num_bytes", "with_layers")


def with_layers(shard: Shard, whole: LanguageModel) -> Shard:
    """The same shard, with the layers of its stage assigned.

    Args:
        shard: the shard of one rank.
        whole: a model with the layers of all stages, divided among tensor ranks like the shard. It
            can be on the meta device.
    """
    others = {
        name: num_bytes(module)
        for name, module in whole.named_children()
        if module is not whole.layers
    }
    others.pop("rotary", None)  # every stage has these tables
    # If the embedding is also the output head, the first and the last stage hold it.
    head = others.pop("lm_head", None) or others.get("embed_tokens", 0)
    dealt = deal_layers(
        [num_bytes(layer) for layer in whole.layers],
        first=sum(others.values()) - others.get("final_norm", 0),
        last=head + others.get("final_norm", 0),
        stages=shard.stage.count,
    )
    return replace(shard, stage=replace(shard.stage, layers=dealt[shard.stage.number]))


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
