"""Chooses the weight method of every matrix of a model.

Two settings name a method: `model.quantization` (quantise while loading) and the
`quantization_config` in a checkpoint's config.json (the stored weights are quantised). With each of
them, `model.quantization_head` can name the method of the embeddings and the output head. The name
is that of a module, so a new method is one file (and for `model.quantization` a name in
conf/schema.py):

    models/weight_methods/<quantization>.py         on_load(group_size, symmetric) -> WeightMethod
    models/quantized_checkpoints/<quant_method>.py  from_checkpoint(quantization_config,
                                                        unquantized, headers) -> WeightPolicy
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ostinato.conf.schema import HeadQuantization, ModelSection, Quantization
from ostinato.models import quantized_checkpoints, weight_methods
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.checkpoints.headers import read_headers
from ostinato.models.checkpoints.quantization_files import read_quantization
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy, Headers
from ostinato.models.quantized_checkpoints.rounded_inputs import RoundingPolicy
from ostinato.models.weight_methods.compressed import Compressed
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import MatrixRole, MatrixSpec, WeightMethod
from ostinato.models.weight_policy import PolicyOver, WeightPolicy

__all__ = ("PLAIN", "WeightsByRole", "choose_weights")

# Smaller tables, such as those of positions and segments, are not quantised, because that would
# save almost nothing.
_MIN_TABLE_ROWS = 4096
# Endings of the names of quantised tensors. A checkpoint of one quantization has only one of them.
_MARKERS = (".qweight", ".weight_packed", ".weight_scale_inv", ".weight_scale_2", "_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsByRole:
    """A policy that depends on a matrix's role alone."""

    layers: WeightMethod
    router: WeightMethod  # routers of experts, few weights with much effect; and vision towers
    head: WeightMethod  # output heads, and embeddings that are output heads too
    embedding: WeightMethod  # other large embeddings; small ones are plain

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def has_cache_scales(self) -> bool:
        return False

    @property
    def uses_cpu_kernels(self) -> bool:
        return not isinstance(self.layers, Plain) or self.head.is_quantized

    @property
    def is_batch_invariant(self) -> bool:
        return self.layers.is_batch_invariant and self.head.is_batch_invariant

    @property
    def quantization(self) -> str:
        if not self.layers.is_quantized and not self.head.is_quantized:
            return "none"
        layers, head = (
            each.name if each.is_quantized else "as loaded" for each in (self.layers, self.head)
        )
        return f"{layers}; head {head}"

    def method_for(
        self, names: tuple[str, ...], role: MatrixRole, spec: MatrixSpec
    ) -> WeightMethod:
        if role is MatrixRole.layer:
            return self.layers
        if role is MatrixRole.router or role is MatrixRole.vision:
            return self.router
        if role is not MatrixRole.embedding:
            return self.head
        return self.embedding if spec.out_features >= _MIN_TABLE_ROWS else Plain()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOnLoad(PolicyOver):
    """The methods of a quantised checkpoint, whose embeddings and head are quantised on load."""

    head: WeightMethod

    @property
    def is_batch_invariant(self) -> bool:
        return self.as_stored.is_batch_invariant and self.head.is_batch_invariant

    @property
    def quantization(self) -> str:
        return f"{self.as_stored.quantization}; head {self.head.name}"

    def method_for(
        self, names: tuple[str, ...], role: MatrixRole, spec: MatrixSpec
    ) -> WeightMethod:
        """The method of one matrix.

        Raises:
            ValueError: the checkpoint's head is quantised already, or as for the checkpoint.
        """
        stored = self.as_stored.method_for(names, role, spec)
        if role is MatrixRole.embedding:
            is_large = spec.out_features >= _MIN_TABLE_ROWS
            return self.head if is_large and not stored.is_quantized else stored
        if role not in (MatrixRole.head, MatrixRole.tied):
            return stored
        if stored.is_quantized:
            raise ValueError(
                f"model.quantization_head is set, but the checkpoint's output head is quantised "
                f"already ({stored.name}); leave model.quantization_head out"
            )
        return self.head


PLAIN = WeightsByRole(layers=Plain(), router=Plain(), head=Plain(), embedding=Plain())
"""Every matrix as it is stored."""


def choose_weights(
    section: ModelSection,
    checkpoint: Checkpoint,
    *,
    pack: bool,
    compress: bool | None = False,
    device: torch.device,
    dtype: torch.dtype,
) -> WeightPolicy:
    """The weight methods of a model.

    With `model.quantization`, `quantization_head=auto` keeps the output head at 8 bits. The head
    decides between tokens whose logits are nearly equal. It is a small part of the weights, except
    in the smallest models.

    Args:
        section: the configuration of the model.
        checkpoint: the checkpoint of the model.
        pack: pack unquantised weights for the CPU kernels, if there are such kernels.
        compress: compress packed weights; None = if they can be compressed.
        device: the device of the weights.
        dtype: the dtype of activations.

    Raises:
        ValueError: settings contradict each other or the checkpoint, or no kernel supports them
            with this device and dtype.
    """
    unquantized = _unquantized(device, dtype, pack=pack, compress=compress)
    stated = read_quantization(checkpoint)
    is_cuda = device.type == "cuda"
    if not section.round_activations and not (is_cuda and stated is not None):
        raise ValueError(
            "model.round_activations=false is for quantised checkpoints on CUDA; leave it out"
        )
    if stated is not None:
        policy: WeightPolicy = _from_checkpoint(
            section, stated, unquantized, read_headers(checkpoint)
        )
        if is_cuda and section.round_activations and isinstance(policy, CheckpointPolicy):
            capability = torch.cuda.get_device_capability(device)
            policy = RoundingPolicy(as_stored=policy, capability=capability)
    else:
        layers = unquantized
        if section.quantization is not Quantization.none:
            layers = _on_load(section, "quantization", section.quantization, device, dtype, pack)
        policy = WeightsByRole(
            layers=layers, router=unquantized, head=unquantized, embedding=Plain()
        )
    choice = section.quantization_head
    if choice is HeadQuantization.auto and section.quantization is not Quantization.none:
        choice = HeadQuantization.int8
    if choice in (HeadQuantization.auto, HeadQuantization.none):
        return policy
    head = _on_load(section, "quantization_head", choice, device, dtype, pack)
    if isinstance(policy, WeightsByRole):
        return replace(policy, head=head, embedding=head)
    return HeadOnLoad(as_stored=policy, head=head)


def _unquantized(
    device: torch.device, dtype: torch.dtype, *, pack: bool, compress: bool | None
) -> WeightMethod:
    """The method of weights that are not quantised. The arguments are those of `choose_weights`.

    Raises:
        ValueError: `compress` is True, and the weights cannot be compressed.
    """
    if compress is not False:
        reason = Compressed().why_unusable(device, dtype)
        if not pack:
            reason = "graphs.pack_weights=false keeps weights as they are"
        if reason is None:
            return Compressed()
        if compress:
            raise ValueError(f"graphs.compress_weights=true, but {reason}; leave it out")
    is_packed = pack and Packed().why_unusable(device, dtype) is None
    return Packed() if is_packed else Plain()


def _on_load(
    section: ModelSection,
    setting: str,
    choice: Quantization | HeadQuantization,
    device: torch.device,
    dtype: torch.dtype,
    pack: bool,
) -> WeightMethod:
    """The method that a setting of the model section names.

    Raises:
        ValueError: no kernel supports it with this device, dtype or `pack`.
    """
    make = _entry(weight_methods, choice.value, "on_load")
    if make is None:
        raise ValueError(f"no weight method {choice!r} quantises weights while they are loaded")
    method: WeightMethod = make(section.quantization_group_size, section.quantization_symmetric)
    reason = method.why_unusable(device, dtype)
    if reason is None and not pack and device.type == "cpu":
        reason = "graphs.pack_weights=false keeps weights as they are; leave out one of the two"
    if reason is not None:
        raise ValueError(f"model.{setting}={choice}, but {reason}")
    return method


def _from_checkpoint(
    section: ModelSection, stated: Mapping[str, Any], unquantized: WeightMethod, headers: Headers
) -> WeightPolicy:
    method = stated["quant_method"]
    if section.quantization is not Quantization.none:
        raise ValueError(
            f"model.quantization={section.quantization}, but the checkpoint is quantised already "
            f"({method}); leave model.quantization out. model.quantization_head=int8 quantises a "
            "head of floats"
        )
    make = _entry(quantized_checkpoints, method, "from_checkpoint")
    if make is None:
        raise ValueError(
            f"config.json: quantization_config.quant_method={method!r} is not supported; "
            "use the unquantized checkpoint of the model, with model.quantization=int8 or int4"
        )
    markers = {marker: name for name in headers for marker in _MARKERS if name.endswith(marker)}
    if len(markers) > 1:
        raise ValueError(
            f"the checkpoint has tensors of two quantizations, such as "
            f"{' and '.join(markers.values())}; they cannot be served together"
        )
    return make(stated, unquantized, headers)


def _entry(package: ModuleType, name: str, function: str) -> Callable[..., Any] | None:
    """A function of the module of this name in a package; None when there is none.

    The name may come from a checkpoint, so it is compared with the package's modules and not
    imported as it is.
    """
    name = name.replace("-", "_")
    if name not in {module.name for module in pkgutil.iter_modules(package.__path__)}:
        return None
    return getattr(import_module(f"{package.__name__}.{name}"), function, None)
