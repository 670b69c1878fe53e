"""Chooses the weight method of every matrix of a model.

Two settings name a method: `model.quantization` (quantise while loading) and the
`quantization_config` in a checkpoint's config.json (the stored weights are quantised). The name is
that of a module in this folder, so a new method is one file:

    on_load(group_size, symmetric) -> WeightMethod           for `model.quantization=<module>`
    from_checkpoint(quantization_config, unquantized)        for `quant_method: <module>`
        -> WeightPolicy
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from ostinato.conf.schema import HeadQuantization, ModelSection, Quantization
from ostinato.models import weight_methods
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import MatrixRole, MatrixSpec, WeightMethod

__all__ = ("PLAIN", "WeightPolicy", "WeightsByRole", "choose_weights")

# Smaller tables, those of positions and segments, would save nothing.
_MIN_TABLE_ROWS = 4096


class WeightPolicy(Protocol):
    """Which weight method each matrix of a model has. Its `repr` is part of a bundle's key."""

    @property
    def uses_cpu_kernels(self) -> bool:
        """Whether this project's CPU kernels compute the layers' products."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the bits of a token's products do not depend on the other tokens of the step."""
        ...

    @property
    def quantization(self) -> str:
        """How weights are quantised, as text for users; `none` if they are not."""
        ...

    def method_for(self, name: str, role: MatrixRole, spec: MatrixSpec) -> WeightMethod:
        """The method of one matrix.

        Args:
            name: of its module in the model, such as `layers.0.mlp.down_proj`.
            role: what the matrix does.
            spec: its size on this rank.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsByRole:
    """A policy that depends on a matrix's role alone."""

    layers: WeightMethod
    router: WeightMethod  # of experts: few weights that decide much
    head: WeightMethod  # of output heads, and of embeddings that are output heads too
    embedding: WeightMethod  # of other large embeddings; small ones are plain

    @property
    def uses_cpu_kernels(self) -> bool:
        return not self.layers.is_in_place

    @property
    def is_batch_invariant(self) -> bool:
        return self.layers.is_batch_invariant and self.head.is_batch_invariant

    @property
    def quantization(self) -> str:
        if not self.layers.is_quantized:
            return "none"
        head = self.head.name if self.head.is_quantized else "as loaded"
        return f"{self.layers.name}; head {head}"

    def method_for(self, name: str, role: MatrixRole, spec: MatrixSpec) -> WeightMethod:
        if role is MatrixRole.layer:
            return self.layers
        if role is MatrixRole.router:
            return self.router
        if role is not MatrixRole.embedding:
            return self.head
        return self.embedding if spec.out_features >= _MIN_TABLE_ROWS else Plain()


PLAIN = WeightsByRole(layers=Plain(), router=Plain(), head=Plain(), embedding=Plain())
"""Every matrix as it is stored."""


def choose_weights(
    section: ModelSection,
    hf_config: Mapping[str, Any],
    *,
    pack: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> WeightPolicy:
    """The weight methods of a model.

    `quantization_head=auto` keeps the output head at 8 bits. The head decides between tokens that
    are near each other, and is a small part of all but the smallest models.

    Args:
        section: the configuration of the model.
        hf_config: its config.json.
        pack: pack unquantised weights for the CPU kernels where there are such kernels.
        device: where the weights live.
        dtype: of activations.

    Raises:
        ValueError: no kernel supports the request with this device, dtype or setting.
    """
    packed = Packed()
    is_packed = pack and packed.why_unusable(device, dtype) is None
    unquantized = packed if is_packed else Plain()
    stated = hf_config.get("quantization_config")
    if stated:
        return _from_checkpoint(section, stated, unquantized)
    if section.quantization is Quantization.none:
        return WeightsByRole(
            layers=unquantized, router=unquantized, head=unquantized, embedding=Plain()
        )
    asked = f"model.quantization={section.quantization}"
    layers = _on_load(section, section.quantization.value)
    reason = layers.why_unusable(device, dtype)
    if reason is None and not pack:
        reason = "graphs.pack_weights=false keeps weights as they are; leave one out"
    if reason is not None:
        raise ValueError(f"{asked}, but {reason}")
    if section.quantization_head is HeadQuantization.none:
        return WeightsByRole(layers=layers, router=unquantized, head=unquantized, embedding=Plain())
    is_auto = section.quantization_head is HeadQuantization.auto
    head = _on_load(section, "int8" if is_auto else section.quantization_head.value)
    return WeightsByRole(layers=layers, router=unquantized, head=head, embedding=head)


def _on_load(section: ModelSection, name: str) -> WeightMethod:
    make = _entry(name, "on_load")
    if make is None:
        raise ValueError(f"no weight method {name!r} quantises weights while they are loaded")
    return make(section.quantization_group_size, section.quantization_symmetric)


def _from_checkpoint(
    section: ModelSection, stated: Mapping[str, Any], unquantized: WeightMethod
) -> WeightPolicy:
    method = str(stated.get("quant_method", "unknown"))
    make = _entry(method, "from_checkpoint")
    if make is None:
        raise ValueError(
            f"config.json: quantization_config.quant_method={method!r} is not supported; "
            "use the checkpoint before quantization"
        )
    if section.quantization is not Quantization.none:
        raise ValueError(
            f"model.quantization={section.quantization}, but the checkpoint is quantised already "
            f"({method}); leave it out"
        )
    return make(stated, unquantized)


def _entry(name: str, function: str) -> Callable[..., Any] | None:
    """A function of the module of this name in this folder; None when there is none.

    The name may come from a checkpoint, so it is compared with the modules of this folder and not
    imported as it is.
    """
    name = name.replace("-", "_")
    if name not in {module.name for module in pkgutil.iter_modules(weight_methods.__path__)}:
        return None
    return getattr(import_module(f"{weight_methods.__name__}.{name}"), function, None)
