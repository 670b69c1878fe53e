"""What chooses the weight methods of a model; the base of what changes another's choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ostinato.models.weight_methods.weight_method import MatrixRole, MatrixSpec, WeightMethod

__all__ = ("PolicyOver", "WeightPolicy")


class WeightPolicy(Protocol):
    """Chooses the weight method of each matrix. Its `repr` is in the key of compiled programs."""

    @property
    def uses_cpu_kernels(self) -> bool:
        """Whether this project's CPU kernels multiply the layers' matrices.

        Quantised matrices for CUDA count too, because CPU kernels pack them.
        """
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the bits of a token's products do not depend on the other tokens of the step."""
        ...

    @property
    def quantization(self) -> str:
        """How weights are quantised, as text for users; `none` if they are not."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions for the names of stored tensors that are not needed."""
        ...

    @property
    def has_cache_scales(self) -> bool:
        """Whether the checkpoint has scales for a KV cache of 8 bits."""
        ...

    def method_for(
        self, names: tuple[str, ...], role: MatrixRole, spec: MatrixSpec
    ) -> WeightMethod:
        """The method of one matrix.

        Args:
            names: the names of its modules in a checkpoint, such as `model.layers.0.mlp.down_proj`;
                several if the matrix stacks several modules.
            role: what the matrix does.
            spec: its size on this rank.

        Raises:
            ValueError: the checkpoint's settings do not fit the matrix.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOver:
    """Base of a policy that changes some methods of a quantised checkpoint's policy."""

    as_stored: WeightPolicy

    @property
    def uses_cpu_kernels(self) -> bool:
        return self.as_stored.uses_cpu_kernels

    @property
    def quantization(self) -> str:
        return self.as_stored.quantization

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.as_stored.ignored

    @property
    def has_cache_scales(self) -> bool:
        return self.as_stored.has_cache_scales
