"""The C++ attention kernel of one instruction set as a backend that tests can call."""

from __future__ import annotations

from torch import Tensor

from ostinato.ops.attention import AttentionMetadata, AttentionSpec
from ostinato.ops.backends.cpu import BACKEND as CPU
from tests.ops.kernel_checks import ops_of

__all__ = ("LevelBackend",)


class LevelBackend:
    """The C++ kernel of one instruction set level."""

    name = "cpu"

    def __init__(self, isa: str) -> None:
        self.isa = isa
        self._op = ops_of("core", isa, attend="paged_attention").attend

    def why_unsupported(self, spec: AttentionSpec) -> str | None:
        return CPU.why_unsupported(spec)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        return self._op(
            *(q, k, v, k_cache, v_cache, *metadata, scale, sliding_window, soft_cap),
            *(alibi_slopes, sinks, self.name),
        )
