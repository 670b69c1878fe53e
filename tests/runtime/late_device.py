"""A CUDA device for tests that works as late, or as early, as the rules of streams allow.

Tensors claim the device `cuda:0` and hold their data in host memory. Every op on them is queued on
the current stream. In the mode `late`, a stream's work runs only when the host or another stream
waits for it. The host waits, for example, for an event, for a copy to pageable memory, or for a
value that it reads. In the mode `early`, work runs at once. A copy from pinned memory reads this
memory when the copy runs, and compares it with its contents at the call. So a host that rewrites
pinned memory too soon is caught. Copies to pinned memory leave nonsense there until they have run.
CUDA graphs are lists of ops on fixed tensors.

What it does not model: memory that a caching allocator gives out again, and two streams that run
side by side.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ostinato.benchmarks.machine.device_guard import install_device_guard
from ostinato.graphs.compile_monitor import _PROCESS
from tests.runtime.late_streams import Event, Graph, Stream, spoil

__all__ = ("DeviceRaceError", "LateDevice", "LateTensor", "Timing")

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
_MIB = 1 << 20


class Timing(StrEnum):
    """When queued work runs."""

    late = "late"
    early = "early"


class DeviceRaceError(AssertionError):
    """Host memory was changed before a copy from it had run."""


class LateTensor(Tensor):
    """A tensor of the device; `held` is its data."""

    held: Tensor
    owner: LateDevice
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: Tensor, owner: LateDevice) -> LateTensor:
        outline = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        self = Tensor._make_subclass(
            cls, outline, False, dispatch_device=True, device_for_backend_keys=CUDA
        )
        self.held, self.owner = real, owner
        return self

    def __init__(self, real: Tensor, owner: LateDevice) -> None:
        pass

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return CUDA
        if _is_composite(func):
            return func.decompose(*args, **(kwargs or {}))
        owner = next(one.owner for one in _tensors((args, kwargs)) if isinstance(one, LateTensor))
        return owner.dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"LateTensor({tuple(self.held.shape)}, {self.held.dtype})"


class _Mode(TorchDispatchMode):
    """Passes ops to the device if they make tensors on it or get its tensors as arguments."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._late = device

    def __enter__(self) -> TorchDispatchMode:
        # torch.tensor(..., device="cuda") then makes a CPU tensor and copies it, as an op.
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], LateTensor):
            return CUDA
        pinned = kwargs.pop("pin_memory", None)
        wanted = kwargs.get("device")
        if func is aten.is_pinned.default:
            return self._late.is_pinned(args[0])
        is_late = any(isinstance(one, LateTensor) for one in _tensors((args, kwargs)))
        if _is_composite(func) and (is_late or func.overloadpacket is aten.to):
            # In inference mode composite ops arrive undecomposed.
            with _Mode(self._late):
                return func.decompose(*args, **kwargs)
        goes = wanted is not None and torch.device(wanted).type == "cuda"
        stays = wanted is not None and not goes and func is not aten._to_copy.default
        if goes or (is_late and not stays):
            return self._late.dispatch(func, args, kwargs)
        result = func(*_real(args), **kwargs)
        if pinned:
            self._late.pin(result)
        return result


class LateDevice:
    """The simulated CUDA device.

    Attributes:
        timing: when its work runs.
        waits: ops and copies to the host at which the host waited for a value, in order.
        num_late: how many pieces of work were still queued when the call that added them returned.
    """

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.current = Stream(self)
        self.waits: list[str] = []
        self.num_late = 0
        self._graph: Graph | None = None
        self._pinned: list[Tensor] = []
        self._outlines: dict[Any, Any] = {}
        self._lock = threading.RLock()

    def pin(self, tensor: Tensor) -> None:
        """Remember that a host tensor is pinned; it is kept, so that its address is not reused."""
        self._pinned.append(tensor)

    def check_not_capturing(self, what: str) -> None:
        assert self._graph is None, f"{what} while a CUDA graph is captured"

    def submit(self, work: Callable[[], None], stream: Stream | None = None) -> None:
        """Queue work, or add it to the graph that is being captured."""
        if self._graph is not None:
            self._graph.work.append(work)
            return
        chosen = stream or self.current
        chosen.add(work)
        if self.timing is Timing.early:
            chosen.run_until(chosen.num_added)
        else:
            self.num_late += 1

    def synchronize(self, why: str = "synchronize") -> None:
        self.check_not_capturing(why)
        self.current.run_until(self.current.num_added)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue an op on tensors of the device; returns its results, which may not be there yet."""
        with self._lock, torch.inference_mode(), _disable_current_modes():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default and self._crosses(args[0], kwargs):
            return self._move(args[0], **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            return self._now(func, args, kwargs)
        if func.is_view:
            return self._wrap(func(*_real(args), **_real(kwargs)))
        outline = self._outline(func, args, kwargs)
        if outline is None:
            return self._now(func, args, kwargs)
        return self._queue(func, args, kwargs, outline)

    def _queue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outline: Any) -> Any:
        results = tree_map(_allocate, outline)
        # CPU tensors are read at the call, as a kernel launch reads its scalar arguments.
        real_args, real_kwargs = tree_map(_snapshot, (args, kwargs))
        real_args = tuple("reference" if one == "triton" else one for one in real_args)
        targets = _tensors(results)
        if self._graph is not None:
            self._graph.inner += targets

        def work() -> None:
            made = func(*real_args, **real_kwargs)
            for target, value in zip(targets, _tensors(made), strict=False):
                target.copy_(value)

        self.submit(work)
        returns = func._schema.returns
        if not returns:
            return None
        if returns[0].alias_info is not None:  # an op in place
            return args[0] if "out" not in kwargs else kwargs["out"]
        return self._wrap(results)

    def _outline(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results without memory. () for ops in place; None if shapes of results depend on data."""
        returns = func._schema.returns
        if not returns or returns[0].alias_info is not None:
            return ()
        described = tree_map(_describe, (args, kwargs))
        key = (func, repr(described))
        if key not in self._outlines:
            meta_kwargs = {**kwargs, **({"device": "meta"} if "device" in kwargs else {})}
            try:
                made = func(*tree_map(_meta, args), **tree_map(_meta, meta_kwargs))
            except (NotImplementedError, RuntimeError):
                made = None
            self._outlines[key] = made
        return self._outlines[key]

    def _now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose result the host needs. The host waits for the device."""
        self.waits.append(str(func))
        self.synchronize(str(func))
        return self._wrap(func(*_real(args), **_real(kwargs)))

    def _wrap(self, result: Any) -> Any:
        return tree_map(
            lambda one: LateTensor(one, self) if isinstance(one, Tensor) else one, result
        )

    def _crosses(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        wanted = kwargs.get("device")
        is_late = isinstance(source, LateTensor)
        return wanted is not None and (torch.device(wanted).type == "cuda") != is_late

    def _move(
        self, source: Tensor, *, dtype: Any = None, non_blocking: bool = False, **_: Any
    ) -> Tensor:
        """Copy a host tensor to a new device tensor, or a device tensor to a new host tensor."""
        is_late = isinstance(source, LateTensor)
        target = torch.empty(source.shape, dtype=dtype or source.dtype)
        if not is_late:
            return self._copy(LateTensor(target, self), source, non_blocking)
        if non_blocking:
            self.pin(target)
        return self._copy(target, source, non_blocking)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        to, of = _real(target), _real(source)
        if isinstance(target, LateTensor) and isinstance(source, LateTensor):
            self.submit(partial(_put, to, of))
        elif isinstance(target, LateTensor):
            if self.is_pinned(of):
                self._upload(to, of)
                if not non_blocking:
                    self.synchronize("a copy to the device")
            else:
                self.check_not_capturing("a copy from pageable memory")
                held = of.clone()
                self.submit(partial(_put, to, held))
        else:
            asynchronous = non_blocking and self.is_pinned(to)
            if asynchronous:
                spoil(to)
            self.submit(partial(_put, to, of))
            if not asynchronous:
                self.waits.append("a copy to the host")
                self.synchronize("a copy to the host")
        return target

    def _upload(self, to: Tensor, of: Tensor) -> None:
        seen, place = of.clone(), _caller()

        def work() -> None:
            if not torch.equal(of.view(torch.uint8), seen.view(torch.uint8)):
                raise DeviceRaceError(
                    f"pinned memory {tuple(of.shape)} {of.dtype} changed after {place} had started "
                    "to copy it to the device and before the copy ran"
                )
            to.copy_(of)

        self.submit(work)

    def is_pinned(self, tensor: Tensor) -> bool:
        begin = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == begin for one in self._pinned)

    @contextmanager
    def capturing(self, graph: Graph, **_: Any) -> Iterator[None]:
        assert self._graph is None, "two captures at once"
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def installed(self, patch: Any) -> Iterator[LateDevice]:
        """Inside the context, this is the only CUDA device.

        Args:
            patch: pytest's monkeypatch.
        """
        with patch.context() as uncounted:
            # The first call on a machine compiles, which is no work of an engine in this process.
            uncounted.setattr(_PROCESS, "observe", lambda *arguments: None)
            install_device_guard()
        properties = SimpleNamespace(
            multi_processor_count=4, shared_memory_per_block_optin=227 * 1024, name="late"
        )
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda *a: None,
            "get_device_name": lambda *a: "late",
            "get_device_capability": lambda *a: (9, 0),
            "get_device_properties": lambda *a: properties,
            "mem_get_info": lambda *a: (1024 * _MIB, 2048 * _MIB),
            "memory_reserved": lambda *a: 0,
            "max_memory_reserved": lambda *a: 24 * _MIB,
            "reset_peak_memory_stats": lambda *a: None,
            "empty_cache": lambda: None,
            "synchronize": lambda *a: self.synchronize(),
            "graph_pool_handle": lambda: (0, 0),
            "Event": lambda *a, **k: Event(self),
            "Stream": lambda *a, **k: Stream(self),
            "CUDAGraph": lambda *a, **k: Graph(self),
            "current_stream": lambda *a: self.current,
            "stream": self.on_stream,
            "graph": self.capturing,
        }.items():
            patch.setattr(torch.cuda, name, value)
        make = torch.tensor
        get_torch_obj_rule_map()  # Dynamo caches this map, which must name the real `torch.tensor`

        def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            if pin_memory:  # torch.tensor refuses pinned memory before any op is called
                self.pin(made)
            return made

        patch.setattr(torch, "tensor", tensor)
        with self.entered():
            yield self

    def entered(self) -> TorchDispatchMode:
        """A context in which a thread can make tensors of the device."""
        return _Mode(self)


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda one: found.append(one) if isinstance(one, Tensor) else None, values)
    return found


def _real(values: Any) -> Any:
    return tree_map(lambda one: one.held if isinstance(one, LateTensor) else one, values)


def _snapshot(one: Any) -> Any:
    if isinstance(one, LateTensor):
        return one.held
    return one.clone() if isinstance(one, Tensor) else one


def _describe(one: Any) -> Any:
    return (one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else one


def _meta(one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")


def _allocate(one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
    spoil(made)
    return made


def _put(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _caller() -> str:
    """The innermost line of the project on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if "/site-packages/" not in name and not name.endswith("late_device.py"):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a copy"
