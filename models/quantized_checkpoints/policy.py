"""Decides which weight method each module of a quantised checkpoint has; base of all formats.

A format's settings say which modules are quantised and how, by their names in the checkpoint. If
the checkpoint's tensors are known, they decide whether a module is quantised. It is an error if a
setting excludes a module from quantisation although its stored tensors are quantised.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import ClassVar, NamedTuple

import torch

from ostinato.models.weight_methods.plain import Plain
from ostinato.models.weight_methods.weight_method import MatrixRole, MatrixSpec, WeightMethod

__all__ = ("CheckpointPolicy", "Headers", "TensorHeader", "names_module")

_CACHE_SCALES = r"\.(k|v|q|kv|prob)_(scale|zero_point)$"


class TensorHeader(NamedTuple):
    """A stored tensor without its values."""

    dtype: torch.dtype | None  # None = a dtype that no loader of this project reads
    shape: tuple[int, ...]


Headers = Mapping[str, TensorHeader]
"""A checkpoint's tensors by their full names; empty when they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy(ABC):
    """The weight methods of a quantised checkpoint."""

    # a stored tensor that quantised modules have, and float modules do not have
    marker: ClassVar[str]
    uses_cpu_kernels: ClassVar[bool] = True
    is_batch_invariant: ClassVar[bool] = True
    # Stored scales that are ignored if nothing reads them: of activations and of an 8-bit KV cache.
    ignored: ClassVar[tuple[str, ...]] = (
        r"\.(input_(scale|zero_point|global_scale)|activation_scale)$",
        _CACHE_SCALES,
    )

    unquantized: WeightMethod  # the method of modules that are floats
    headers: Headers = field(repr=False, compare=False)

    @property
    @abstractmethod
    def quantization(self) -> str:
        """How weights are quantised, as text for users."""

    @abstractmethod
    def rule_for(self, name: str) -> WeightMethod | str | None:
        """The settings' statement about a module.

        Args:
            name: the name of the module in the checkpoint.

        Returns:
            Its weight method. None = it is not quantised. A text = the setting that excludes it
            from quantisation.
        """

    def marker_of(self, name: str) -> str:
        """The name of the stored tensor that tells whether a module is quantised."""
        return f"{name}.{self.marker}"

    @property
    def has_cache_scales(self) -> bool:
        """Whether the checkpoint has scales for a KV cache of 8 bits."""
        return any(re.search(_CACHE_SCALES, name) for name in self.headers)

    def method_for(
        self, names: tuple[str, ...], role: MatrixRole, spec: MatrixSpec
    ) -> WeightMethod:
        """The method of one matrix.

        Raises:
            ValueError: stacked modules are quantised differently, a setting says "float" of a
                quantised module, or no kernel of the method supports the device and dtype.
        """
        if role is MatrixRole.embedding or role is MatrixRole.tied:
            return Plain() if role is MatrixRole.embedding else self.unquantized
        found = [self._method_of(name, role) for name in names]
        for name, method in zip(names, found, strict=True):
            if method != found[0]:
                raise ValueError(
                    f"{names[0]} and {name} are stacked into one matrix, and the checkpoint has "
                    f"{_text(found[0])} of one and {_text(method)} of the other; quantise them "
                    "alike"
                )
        method = found[0]
        if method is None:
            return self.unquantized
        reason = method.why_unusable(spec.device, spec.dtype)
        if reason is not None and spec.device.type != "meta":
            raise ValueError(f"the checkpoint is quantised ({method.name}), but {reason}")
        return method

    def _method_of(self, name: str, role: MatrixRole) -> WeightMethod | None:
        rule = self.rule_for(name)
        if not self.headers and role is MatrixRole.vision:
            return None
        if not self.headers:
            is_stored = role is MatrixRole.layer or not isinstance(rule, str)
            return rule if isinstance(rule, WeightMethod) and is_stored else None
        if self.marker_of(name) not in self.headers:
            return None
        if not isinstance(rule, str):
            return rule
        raise ValueError(
            f"config.json: {rule} says that {name} is not quantised, but the checkpoint has "
            f"{self.marker_of(name)}"
        )


def names_module(pattern: str, name: str) -> bool:
    """Whether an entry of a list of modules names a module.

    Args:
        pattern: successive parts of the name, such as `mlp.gate`; `*` stands for anything.
        name: the name of the module in the checkpoint.
    """
    if "*" in pattern:
        return fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*")
    return f".{pattern}." in f".{name}."


def _text(method: WeightMethod | None) -> str:
    return "floats" if method is None else method.name
