"""FlashInfer's wrappers as their documentation describes them, in plain torch on a CPU.

They check what callers must keep (fixed sizes, causal rows, data types). They compute from the
index buffers alone, as a captured kernel does. So their results show what the planner put into
these buffers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.ops.flashinfer_library import Library


class StandIn:
    """The base of both wrappers."""

    is_causal = False

    def __init__(self, kv_layout: str, use_cuda_graph: bool, buffers: tuple[Any, ...]) -> None:
        assert kv_layout == "HND"
        self.use_cuda_graph = use_cuda_graph
        self.query_indptr, self.kv_indptr, self.indices, self.last_page_len = buffers
        self.is_planned = False
        self.has_workspace = False

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert float_workspace_buffer.numel() >= 1 << 20
        assert int_workspace_buffer.numel() >= 100
        self.has_workspace = True

    def take(self, name: str, source: Tensor) -> None:
        """Copies the source into the fixed buffer. For uncaptured shapes it keeps a clone."""
        buffer = getattr(self, name)
        if not self.use_cuda_graph:
            setattr(self, name, source.clone())
        elif name == "indices":
            assert len(source) <= len(buffer)
            buffer[: len(source)].copy_(source)
        else:
            assert len(source) == len(buffer), "captured shapes must keep their sizes"
            buffer.copy_(source)

    def set_options(self, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim, self.page_size = sizes
        self.window_left = options["window_left"]
        self.soft_cap = options["logits_soft_cap"]
        self.dtypes = options["q_data_type"], options["kv_data_type"]
        self.sm_scale = options["sm_scale"]
        self.is_planned = True

    def attend(self, q: Tensor, caches: tuple[Tensor, Tensor], scale: float, out: Tensor) -> None:
        assert self.is_planned
        assert self.has_workspace
        assert (q.dtype, caches[0].dtype) == self.dtypes
        assert q.shape[1:] == (self.num_heads, self.head_dim)
        assert caches[0].shape[1:] == (self.num_kv_heads, self.page_size, self.head_dim)
        starts = self.query_indptr.tolist()
        pages = self.kv_indptr.tolist()
        assert starts[-1] == q.shape[0], "every query row must belong to a sequence"
        for i, last in enumerate(self.last_page_len.tolist()):
            rows = q[starts[i] : starts[i + 1]].float().transpose(0, 1)
            ids = self.indices[pages[i] : pages[i + 1]].long()
            length = max(0, len(ids) - 1) * self.page_size + last
            keys, values = (
                cache[ids].transpose(0, 1).flatten(1, 2)[:, :length].float() for cache in caches
            )
            if length == 0:
                out[starts[i] : starts[i + 1]] = 0
                continue
            group = self.num_heads // self.num_kv_heads
            logits = rows @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale * self.sm_scale
            if self.soft_cap:
                logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
            position = torch.arange(length - rows.shape[1], length)[:, None]
            key = torch.arange(length)[None, :]
            hidden = (key > position) & self.is_causal
            if self.window_left >= 0:
                hidden = hidden | (key < position - self.window_left)
            weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            sums = weights @ values.repeat_interleave(group, 0)
            out[starts[i] : starts[i + 1]] = sums.transpose(0, 1).to(out.dtype)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        q_scale: float,
        out: Tensor,
        enable_pdl: bool,
    ) -> Tensor:
        self.attend(q, paged_kv_cache, q_scale, out)
        return out


class DecodeStandIn(StandIn):
    """One query row per sequence."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert paged_kv_last_page_len_buffer is not None
        rows = torch.arange(len(paged_kv_last_page_len_buffer) + 1)
        buffers = (
            rows,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        super().__init__(kv_layout, use_cuda_graph, buffers)
        self.use_tensor_cores = use_tensor_cores

    def workspace_size(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        return 1 << 20, 100

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.take("kv_indptr", indptr)
        self.take("indices", indices)
        self.take("last_page_len", last_page_len)
        self.set_options((num_qo_heads, num_kv_heads, head_dim, page_size), options)


class PrefillStandIn(StandIn):
    """Any number of query rows per sequence."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        super().__init__(kv_layout, use_cuda_graph, buffers)
        self.max_rows: int | None = None

    def workspace_size(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        return 32 << 20, 200

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        if self.use_cuda_graph:
            self.max_rows = self.max_rows or int(qo_indptr[-1])
            assert int(qo_indptr[-1]) <= self.max_rows, "the first plan had fewer rows"
        self.take("query_indptr", qo_indptr)
        self.take("kv_indptr", paged_kv_indptr)
        self.take("indices", paged_kv_indices)
        self.take("last_page_len", paged_kv_last_page_len)
        self.is_causal = causal
        self.set_options((num_qo_heads, num_kv_heads, head_dim_qk, page_size), options)


def fast_decode_plan(
    wrapper: DecodeStandIn,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    global_override_indptr_cpu: Tensor,
    **options: Any,
) -> None:
    """Fills no buffer, because the caller has filled them."""
    assert wrapper.is_planned, "the first plan must be a full one"
    wrapper.set_options((num_qo_heads, num_kv_heads, head_dim, page_size), options)


def absent(*arguments: Any, **options: Any) -> None:
    """Stands for the parts of FlashInfer that attention does not call."""
    raise AssertionError("attention does not call it")


STAND_IN = Library(DecodeStandIn, PrefillStandIn, fast_decode_plan, absent, absent)


RECORDED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("flashinfer_signatures.json").read_text()
)
"""Release of FlashInfer -> function -> its parameters.

`name=` is a parameter with a default. Parameters after `*` are keyword-only.
"""


def recorded_library(version: str) -> Library:
    """Classes and a function without bodies, with the signatures of a release of FlashInfer."""
    classes: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    for name, parameters in RECORDED[version].items():
        owner, _, method = name.rpartition(".")

        def empty(*arguments: Any, **options: Any) -> None: ...

        empty.__signature__ = _signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        if owner:
            setattr(classes.setdefault(owner, type(owner, (), {})), method, empty)
        else:
            functions[method] = empty
    return Library(
        classes["BatchDecodeWithPagedKVCacheWrapper"],
        classes["BatchPrefillWithPagedKVCacheWrapper"],
        functions["fast_decode_plan"],
        functions["cutlass_fused_moe"],
        functions["ActivationType"],
    )


def recorded_signature(version: str, name: str) -> inspect.Signature:
    """The signature of a function or method in a release of FlashInfer."""
    return _signature(RECORDED[version][name])


def _signature(parameters: str) -> inspect.Signature:
    found: list[inspect.Parameter] = []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for text in parameters.split(", "):
        if text.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            if text != "*":
                found.append(inspect.Parameter(text[1:], inspect.Parameter.VAR_POSITIONAL))
            continue
        default = None if text.endswith("=") else inspect.Parameter.empty
        found.append(inspect.Parameter(text.rstrip("="), kind, default=default))
    return inspect.Signature(found)


def bound_to(real: Library, calls: list[str]) -> Library:
    """Stand-ins whose calls must all bind to FlashInfer's signatures; `calls` lists them.

    Where a real method passes its keywords on to an `_impl`, they must bind to that function too.
    """

    def bind(function: Callable[..., Any], arguments: tuple[Any, ...], options: Any) -> None:
        signature = inspect.signature(inspect.unwrap(function))
        signature.bind(*arguments, **options)
        names = [name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
        if names:
            owner = inspect.getmodule(inspect.unwrap(function))
            implementation = owner
            for part in (function.__qualname__.rsplit(".", 1)[0], f"_{function.__name__}_impl"):
                implementation = getattr(implementation, part)
            inspect.signature(implementation).bind(*arguments, **options)

    def checked(real_class: Any, stand_in: Any) -> Any:
        def method(name: str) -> Callable[..., Any]:
            def call(self: Any, *arguments: Any, **options: Any) -> Any:
                calls.append(f"{stand_in.__name__}.{name}")
                bind(getattr(real_class, name), (self, *arguments), options)
                return getattr(stand_in, name)(self, *arguments, **options)

            return call

        names = ("__init__", "workspace_size", "reset_workspace_buffer", "plan", "run")
        return type(stand_in.__name__, (stand_in,), {name: method(name) for name in names})

    def fast(*arguments: Any, **options: Any) -> None:
        calls.append("fast_decode_plan")
        bind(real.fast_decode_plan, arguments, options)
        fast_decode_plan(*arguments, **options)

    return Library(
        checked(real.decode_wrapper, DecodeStandIn),
        checked(real.prefill_wrapper, PrefillStandIn),
        fast,
        absent,
        absent,
    )
