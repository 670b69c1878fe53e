"""The `flashinfer` backend: FlashInfer's paged decode and prefill kernels behind the op.

FlashInfer (`ops/flashinfer_library.py`) is imported when a planner is made. Before each step, the
planner that `make_planner` returns must plan it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import torch
from torch import Tensor

from ostinato.ops.attention import AttentionMetadata, AttentionSpec, PlanKey, PlannedTable
from ostinato.ops.backends.flashinfer_plan import WORKSPACE_BYTES, FlashInferPlanner, Plan
from ostinato.ops.backends.triton import write_kv
from ostinato.ops.flashinfer_library import Library, load_library, why_unavailable

__all__ = ("BACKEND", "FlashInferBackend", "why_shape_unsupported")

_HEAD_DIMS = (64, 128, 256)
_LEAST_CAPABILITY = (8, 0)


def why_shape_unsupported(spec: AttentionSpec) -> str | None:
    """The reason the kernels cannot take `spec`'s shapes, whatever the device and the type."""
    if spec.has_two_head_sizes:
        return (
            f"needs keys and values of one size, but the model has {spec.head_dim} and "
            f"{spec.value_dim}"
        )
    if spec.converts_cache:
        return (
            f"keeps keys and values in the model's type {spec.dtype}, but cache.dtype asks for "
            f"{spec.cache_dtype}; graphs.attention=triton serves that"
        )
    if spec.has_cross:
        return "computes no cross attention; graphs.attention=triton does"
    if spec.has_alibi or spec.has_sinks:
        # FlashInfer computes ALiBi slopes from the number of heads, in only one of the ways that
        # models use.
        kind = "ALiBi slopes" if spec.has_alibi else "attention sinks"
        return f"has no {kind}, which the model needs; graphs.attention=triton serves that"
    if spec.sliding_window < 0:
        return (
            "has no chunks of the context, which the model needs; "
            "graphs.attention=triton serves that"
        )
    if spec.head_dim not in _HEAD_DIMS:
        return f"needs a head size in {_HEAD_DIMS}, but the model has {spec.head_dim}"
    return None


class FlashInferBackend:
    """Runs the plan whose handle is in `metadata.plan`.

    This object keeps each plan under its handle, from the plan's first step until the planner
    replaces the plan or is closed. The op takes tensors only, so a step carries the handle and not
    the plan.
    """

    name = "flashinfer"
    is_batch_invariant = False
    warm_up_seqs = (1,)

    def __init__(self, library: Library | None = None) -> None:
        """
        Args:
            library: None = import FlashInfer when a planner is made.
        """
        self._library = library
        self._plans: dict[int, Plan] = {}
        self._handles = count(1)

    def why_unsupported(self, spec: AttentionSpec) -> str | None:
        if (reason := why_unavailable(spec.device, spec.dtype)) is not None:
            return reason
        capability = torch.cuda.get_device_capability(spec.device)
        if capability < _LEAST_CAPABILITY:
            return "needs compute capability {}.{} or newer, but the device has {}.{}".format(
                *_LEAST_CAPABILITY, *capability
            )
        if spec.sees_ahead:
            return "tokens of this model's images see later tokens, which its kernels do not do"
        return why_shape_unsupported(spec)

    def workspace_bytes(
        self, spec: AttentionSpec, *, num_tokens: int, num_seqs: int, max_model_len: int
    ) -> int:
        # This counts one shape. The engine measures the memory of all captured shapes.
        pages = num_seqs * -(-max_model_len // spec.block_size)
        return WORKSPACE_BYTES + 4 * (pages + 3 * num_seqs)

    def make_planner(
        self,
        spec: AttentionSpec,
        keys: Iterable[PlanKey],
        *,
        tables: Sequence[PlannedTable],
        sliding_windows: Iterable[int] = (),
    ) -> FlashInferPlanner:
        if self._library is None:
            self._library = load_library()
        return FlashInferPlanner(
            self._library,
            spec,
            keys,
            tuple(sliding_windows) or (spec.sliding_window,),
            tuple(tables),
            self._register,
            self._release,
        )

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
        if alibi_slopes is not None or sinks is not None:
            raise ValueError("paged_attention: flashinfer has neither ALiBi slopes nor sinks")
        plan = self._plans.get(int(metadata.plan[0]))
        if plan is None:
            raise RuntimeError(
                f"paged_attention: flashinfer has no plan {int(metadata.plan[0])}; call plan() of "
                "the planner before each step, and run no step after close() of the planner"
            )
        wrapper = plan.wrapper(sliding_window, soft_cap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Our own kernel takes the slot mapping. FlashInfer's append_paged_kv_cache takes the
        # sequence and position of every token, two more tensors a step.
        write_kv(out, k, v, k_cache, v_cache, metadata)
        # Programmatic dependent launch is off, because the previous kernel in the stream writes the
        # keys that this kernel reads.
        wrapper.run(q, (k_cache, v_cache), q_scale=scale, out=out, enable_pdl=False)
        return out

    def _register(self, plan: Plan) -> int:
        handle = next(self._handles)
        self._plans[handle] = plan
        return handle

    def _release(self, handle: int) -> None:
        del self._plans[handle]


BACKEND = FlashInferBackend()
