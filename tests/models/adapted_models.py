"""Models with random adapters in their slots, and the same models with merged weights."""

from __future__ import annotations

import copy

import torch

from ostinato.models.base import CausalLM
from ostinato.models.layers.adapter_slots import AdapterSlots, AdapterSpace, ModuleAdapter
from ostinato.models.layers.linear_layers import LinearBase

__all__ = ("SPACE", "fill_slots", "merged")

SPACE = AdapterSpace(num_slots=3, max_rank=9)

Adapters = dict[str, ModuleAdapter]


def slots_of(model: CausalLM) -> dict[str, AdapterSlots]:
    """The slots of a model's modules, by the module's name."""
    return {
        name: module.adapters
        for name, module in model.named_modules()
        if isinstance(module, LinearBase) and module.adapters is not None
    }


def fill_slots(model: CausalLM, seed: int = 0) -> list[Adapters]:
    """Put a random adapter into each slot. Each lacks some modules and some projections."""
    generator = torch.Generator().manual_seed(seed)
    adapters: list[Adapters] = []
    for slot in range(SPACE.num_slots):
        found: Adapters = {}
        for name, slots in slots_of(model).items():
            slots.clear(slot)
            if slot and torch.rand(1, generator=generator) < 0.3:
                continue
            count, in_features = slots.a.shape[1], slots.a.shape[3]
            least = 1 if slot == 0 else 0
            ranks = torch.randint(least, SPACE.max_rank + 1, (count,), generator=generator)
            largest = max(1, int(ranks.max()))
            a = torch.randn(count, largest, in_features, generator=generator) * 0.3
            for output, rank in enumerate(ranks.tolist()):
                a[output, rank:] = 0
            columns = int(slots.bounds[-1])
            b = torch.randn(largest, columns, generator=generator) * 0.3
            scales = torch.rand(count, generator=generator) + 0.5
            found[name] = ModuleAdapter(a, b, tuple(ranks.tolist()), tuple(scales.tolist()))
            slots.write(slot, found[name])
        adapters.append(found)
    return adapters


def merged(base: CausalLM, adapters: Adapters) -> CausalLM:
    """A copy of a model with unquantised, unpacked float32 weights, with an adapter added."""
    model = copy.deepcopy(base)
    for name, module in model.named_modules():
        if (part := adapters.get(name)) is None:
            continue
        assert isinstance(module, LinearBase)
        first = 0
        for output, number in enumerate(module.stacking):
            stop = first + module.outputs[number].size
            rank, scale = part.ranks[output], part.scales[output]
            change = part.b[:rank, first:stop].T @ part.a[output, :rank] * scale
            module.weights["weight"][first:stop] += change
            first = stop
    return model
