"""The op `ostinato::paged_attention`: write a step's keys and values, attend over block tables.

Callers name the op, never a backend module. A backend is chosen once, by `select_backend`, and its
name is a constant of the compiled graph. Prefill, chunked prefill and decode are one case: sequence
`s` owns the query rows `query_start_loc[s]:query_start_loc[s+1]`, which are the last of its
`seq_lens[s]` tokens.

All keys and values of the step are written before any row attends, so a sequence may read blocks
that another sequence of the same step fills (prefix sharing among requests that arrive together).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ostinato.conf.schema import AttentionBackendName
from ostinato.ops.register import register_op

if TYPE_CHECKING:
    import numpy as np

__all__ = (
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionPlanner",
    "AttentionSpec",
    "HostMetadata",
    "PlanKey",
    "PlannedBackend",
    "PlannedTable",
    "backends_of",
    "first_seen",
    "load_backend",
    "paged_attention",
    "select_backend",
    "workspace_bytes",
)


class AttentionMetadata(NamedTuple):
    """The sequence and the cache slot of each row of a step. B is fixed for an engine.

    Entries past the last sequence are padding: their query range is empty and their `seq_lens` is
    0. Padding tokens have a slot in block 0, the null block. No row attends to that block.
    """

    query_start_loc: Tensor  # [S+1] int32, first query row of each sequence, then the total
    seq_lens: Tensor  # [S] int32, tokens in context, this step's included
    # [S, B] int32, block ids by position // block_size. Blocks outside of the window of all
    # rows of a sequence may be those of other sequences: nothing of them may reach the result.
    block_table: Tensor
    slot_mapping: Tensor  # [T] int64, block_id * block_size + offset where each token's K and V go
    plan: Tensor  # [1] int64 on the CPU: handle of a planned kernel's host state, 0 = none
    # [T] int32; each row sees the keys before this index too, besides those up to its own. They are
    # keys of its own sequence. 0 = no more keys. None = no row sees more.
    visible_ends: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The shapes, dtypes and features that a model needs from a backend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int = 0  # of a head of values, and of the output; 0 = head_dim
    block_size: int
    dtype: torch.dtype  # the dtype of queries, keys, values and output
    device: torch.device
    cache_dtype: torch.dtype | None = None  # the KV cache's dtype; None = `dtype`
    # Tokens that a row sees, itself included; 0 = all; -C = see `paged_attention`.
    sliding_window: int = 0
    soft_cap: float = 0.0  # `logits = cap * tanh(logits / cap)`; 0 = none
    has_alibi: bool = False  # heads have slopes (ALiBi)
    has_sinks: bool = False  # each head has an attention sink: one more logit, without a key
    has_cross: bool = False  # layers also attend to an encoder (ops/cross_attention.py)
    sees_ahead: bool = False  # rows can see later tokens: `AttentionMetadata.visible_ends`

    @property
    def has_two_head_sizes(self) -> bool:
        """Whether the head size of values differs from that of keys."""
        return self.value_dim not in (0, self.head_dim)

    @property
    def converts_cache(self) -> bool:
        """Whether the cache's dtype differs from the dtype of keys and values."""
        return self.cache_dtype not in (None, self.dtype)


class AttentionBackend(Protocol):
    """An implementation of the op: the object `BACKEND` of a module in ops/backends/."""

    name: str
    is_batch_invariant: bool  # the bits of a row do not depend on other rows or sequences
    # Steps with these numbers of sequences together run every kernel of the backend.
    warm_up_seqs: tuple[int, ...]

    def why_unsupported(self, spec: AttentionSpec) -> str | None:
        """The reason this backend cannot serve `spec` on this machine, or None when it can."""
        ...

    def workspace_bytes(
        self, spec: AttentionSpec, *, num_tokens: int, num_seqs: int, max_model_len: int
    ) -> int:
        """Bytes of device memory that a step needs besides its arguments and its result."""
        ...

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
        """Write K and V, attend, return [T, Hq, Dv] contiguous in q's dtype."""
        ...


class PlanKey(Protocol):
    """A step's shape: T tokens, S sequences. `graphs.buckets.GraphKey` is one."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def tokens_per_seq(self) -> int:
        """Query rows of each sequence that has query rows; 0 = the sequences differ."""
        ...


class HostMetadata(Protocol):
    """The host's copy of a step's metadata. Entries past the step's last sequence are undefined."""

    @property
    def query_start_loc(self) -> np.ndarray:
        """[>= S+1] int32."""
        ...

    @property
    def seq_lens(self) -> np.ndarray:
        """[>= S] int32."""
        ...

    @property
    def block_table(self) -> np.ndarray:
        """[>= S, B] int32."""
        ...

    @property
    def window_block_table(self) -> np.ndarray | None:
        """[>= S, B'] int32, the table of the layers with a window; None = `block_table` is."""
        ...


class PlannedTable(NamedTuple):
    """A block table of the steps that are planned."""

    block_size: int  # tokens of a block
    max_blocks: int  # B, blocks of the longest sequence
    # Tokens, the newest included, whose blocks are kept; those of older tokens can have been given
    # to other sequences. 0 = all are kept.
    window: int = 0


class AttentionPlanner(Protocol):
    """Plans the steps of a backend on the host. An engine has one, used by one thread at a time."""

    def plan(self, key: PlanKey, host: HostMetadata, handle: Tensor) -> None:
        """Plan the step that `host` describes, padded to `key`. Called before the step's launch.

        Args:
            key: the step's shape, padding included. A captured key is planned for the first time
                before its capture.
            host: may be overwritten as soon as this returns.
            handle: [1] int64 on the CPU, set to what `AttentionMetadata.plan` must hold.
        """
        ...

    def close(self) -> None:
        """Free all buffers. Handles, and graphs captured with them, must not be used any more."""
        ...


@runtime_checkable
class PlannedBackend(AttentionBackend, Protocol):
    """A backend that plans each step on the host before the step runs."""

    def make_planner(
        self,
        spec: AttentionSpec,
        keys: Iterable[PlanKey],
        *,
        tables: Sequence[PlannedTable],
        sliding_windows: Iterable[int] = (),
    ) -> AttentionPlanner:
        """A planner for one engine.

        Args:
            spec: what the model needs; `why_unsupported(spec)` is None.
            keys: the shapes that will be captured; each gets buffers at fixed addresses.
            tables: the block table of all layers; or that of the layers without a window, then that
                of the layers with one.
            sliding_windows: all the windows of the model's layers; empty = spec.sliding_window.
        """
        ...


_NAMES = tuple(name.value for name in AttentionBackendName if name is not AttentionBackendName.auto)
# The backends that `auto` tries, for each type of device. triton comes before flashinfer for three
# reasons. It needs no host work in a step, so one captured graph serves prefills and decodes in any
# mix. It takes more head sizes and dtypes. Its kernels build in seconds, without a CUDA toolkit.
_PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("triton", "flashinfer", "reference")}
_loaded: dict[str, AttentionBackend] = {}


def first_seen(position: int, sliding_window: int) -> int:
    """The first position whose key the row at `position` sees.

    Args:
        position: of the row, in its sequence.
        sliding_window: of the layer, as for `paged_attention`.
    """
    if sliding_window < 0:
        return position - position % -sliding_window
    return max(0, position + 1 - sliding_window) if sliding_window else 0


def backends_of(device_type: str) -> tuple[str, ...]:
    """Names of the backends for a type of device, such as "cuda"; the preferred one is first."""
    return _PREFERENCE[device_type]


def load_backend(name: str) -> AttentionBackend:
    """The backend in the module `ops/backends/<name>.py`.

    Raises:
        ImportError: a package that it needs is not installed.
        ValueError: there is no such backend.
    """
    if name not in _loaded:
        if name not in _NAMES:
            raise ValueError(f"attention backend {name!r} is not one of {', '.join(_NAMES)}")
        module = import_module(f"ostinato.ops.backends.{name}")
        _loaded[name] = cast(AttentionBackend, module.BACKEND)
    return _loaded[name]


def select_backend(name: str, spec: AttentionSpec) -> str:
    """Resolve a configured backend name to one that can serve `spec`.

    Args:
        name: a backend's name, or "auto" for the first one that can serve `spec` in the device's
            order of preference.
        spec: what the model needs.

    Raises:
        ValueError: the named backend cannot serve `spec`, or with "auto" none can; the reasons are
            in the text.
    """
    candidates = _PREFERENCE[spec.device.type] if name == "auto" else (name,)
    reasons: list[str] = []
    for candidate in candidates:
        try:
            reason = load_backend(candidate).why_unsupported(spec)
        except ImportError as error:
            reason = str(error)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"graphs.attention={name} cannot serve this model: {'; '.join(reasons)}")


def workspace_bytes(
    name: str, spec: AttentionSpec, *, num_tokens: int, num_seqs: int, max_model_len: int
) -> int:
    """Bytes of device memory that the selected backend would need, for `run plan`.

    The device need not be in this machine. With "auto", the backend is the first in the list of
    preference for the device.

    Args:
        name: a backend's name, or "auto".
        spec: what the model needs.
        num_tokens: tokens of the largest step.
        num_seqs: sequences of the largest step.
        max_model_len: tokens of the longest context.
    """
    chosen = _PREFERENCE[spec.device.type][0] if name == "auto" else name
    try:
        backend = load_backend(chosen)
    except ImportError:
        return 0  # `select_backend` raises an error with the reason
    return backend.workspace_bytes(
        spec, num_tokens=num_tokens, num_seqs=num_seqs, max_model_len=max_model_len
    )


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    plan: Tensor,
    visible_ends: Tensor | None,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    metadata = AttentionMetadata(
        query_start_loc, seq_lens, block_table, slot_mapping, plan, visible_ends
    )
    return load_backend(backend).run(
        q, k, v, k_cache, v_cache, metadata, scale, sliding_window, soft_cap, alibi_slopes, sinks
    )


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    plan: Tensor,
    visible_ends: Tensor | None,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


# The dispatch key is CompositeExplicitAutograd, because the native library registers its own kernel
# under the key CPU when it is loaded. That kernel passes calls for other backends to the op of the
# second name. Nothing else calls the second op.
_op, _ = (
    register_op(
        name,
        {"CompositeExplicitAutograd": _kernel},
        fake=_fake,
        mutates=("k_cache", "v_cache"),
    )
    for name in ("paged_attention", "paged_attention_in_python")
)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Write `k`, `v` at `metadata.slot_mapping` and attend causally over each sequence's blocks.

    Args:
        q: [T, Hq, D], last dimension contiguous; rows past `query_start_loc[S]` are padding.
        k: [T, Hkv, D], last dimension contiguous.
        v: [T, Hkv, Dv], last dimension contiguous. Dv may differ from D.
        k_cache: [num_blocks, Hkv, block_size, D] in k's dtype; or in float8_e4m3fn, which
            saturates at 448; or [num_blocks, Hkv, block_size, D + 4] in int8, with a float32 scale
            for each token and head; written in place. Each backend has its own order of elements
            within a block, so a cache belongs to one backend. It is made outside of compiled
            programs, because a view made inside loses its offset (see docs/attention.md).
        v_cache: like `k_cache`, of Dv elements.
        metadata: where each row of the step belongs. `visible_ends` lets tokens of an image see
            each other (Gemma 3, arXiv:2503.19786). A row then sees all keys from the first one that
            it sees without it up to the given end.
        scale: factor on the logits, usually D ** -0.5.
        sliding_window: tokens that a row sees, itself included; 0 = all; -C = tokens of its own
            chunk. The context is then cut into chunks of C tokens, and the row at position p sees
            the keys from `p - p % C` on.
        soft_cap: `logits = cap * tanh(logits / cap)`; 0 = none.
        alibi_slopes: [Hq] float32 (ALiBi, arXiv:2108.12409): slope * (position of the key -
            position of the query) is added to the scaled and capped logits. None = nothing.
        sinks: [Hq] float32 (arXiv:2309.17453): the softmax of each row has one more logit, whose
            value vector is zero. This logit is neither scaled nor capped. None = no sinks.
        backend: a name that `select_backend` returned.

    Returns:
        [T, Hq, Dv] in q's dtype, contiguous. Padding rows hold finite values of no meaning.

    Raises:
        ValueError: the backend refused an argument. The CPU kernel checks all shapes, dtypes and
            strides, and all numbers of the metadata.
    """
    return _op(
        q,
        k,
        v,
        k_cache,
        v_cache,
        *metadata,
        scale,
        sliding_window,
        soft_cap,
        alibi_slopes,
        sinks,
        backend,
    )
