"""A group of ranks whose values torch.distributed carries: NCCL between GPUs, gloo between CPUs.

Both run the same code here. So the tests of gloo check everything but NCCL itself.

To connect, ranks need what the others wrote into a store of torch: NCCL's unique id, which the
first rank of the group makes, or the addresses of gloo. Here each rank has a store of its own, and
the stores are made equal through the channel between the ranks (`Share`). On several machines this
channel is encrypted and authenticated. So no port has to be chosen, no further server listens, and
nothing is unpickled.

The values themselves go through NCCL's or gloo's own connections, which are not encrypted.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from ostinato.ops.parallel.exchange import Exchange, Share

__all__ = ("DistributedGroup", "GroupEndedError", "group_at", "has_nccl")

_dist: Any = torch.distributed  # its classes differ from build to build of torch
_CONNECT_S = 60.0  # all ranks connect at the same time, so this is for a rank that hangs
_ROUND_S = 0.005  # between two rounds in which the ranks make their stores equal
_CLOSE_S = 2.0


class GroupEndedError(ConnectionError):
    """Another rank of the group has ended, or the group was ended."""


def has_nccl() -> bool:
    """Whether this build of torch has NCCL."""
    return torch.distributed.is_nccl_available()


class DistributedGroup:
    """One rank's membership in a group. One thread uses it, except `abort`.

    All ranks must call the same methods in the same order. On a GPU the methods start work on the
    current stream and do not wait for it, so their calls can be captured in a CUDA graph.

    Attributes:
        rank: 0 to world - 1.
        world: ranks of the group.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        exchange: Exchange,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 1800.0,
    ) -> None:
        """
        Args:
            rank: the rank of this process.
            world: ranks of the group.
            exchange: nccl or gloo.
            host: the address at which gloo listens. NCCL chooses a network interface itself.
            timeout_s: a wait of gloo that takes longer ends with an error.
        """
        assert exchange.is_distributed, f"{exchange} is not carried by torch.distributed"
        self.rank, self.world = rank, world
        self._exchange = exchange
        self._host = host
        self._timeout_s = timeout_s
        # The GPU of this rank, which is the current one of the thread that makes the group.
        self._device = torch.cuda.current_device() if exchange is Exchange.nccl else -1
        self._backend: Any = None
        self._is_aborted = False

    @property
    def handle(self) -> int:
        """The address of this object, which `group_at` turns into the object.

        The handle keeps no reference, so the object must outlive all calls with it.
        """
        return id(self)

    def connect(self, share: Share, name: str = "") -> None:
        """Connect to the other ranks, which call this too. Makes the communicator.

        Args:
            share: the channel between all ranks that connect now. They can be of several groups.
            name: the group, if there are several.

        Raises:
            GroupEndedError: a rank cannot connect, or not in time, or `abort` was called. All ranks
                of all groups raise it.
        """
        store = _dist.HashStore()
        store.set_timeout(timedelta(seconds=_CONNECT_S))
        errors: list[str] = []
        # A connection is made by code that cannot be interrupted, so this thread does not wait for
        # it. After an error the other thread may remain until the process ends.
        connecting = threading.Thread(
            target=self._make_backend, args=(store, errors), name="connect-ranks", daemon=True
        )
        connecting.start()
        deadline = time.monotonic() + _CONNECT_S
        known: set[str] = set()
        while not self._is_aborted:
            connecting.join(_ROUND_S)
            # This is read before the keys, because a thread that has ended writes no more of them.
            is_connected = not connecting.is_alive()
            own = [key for key in store.list_keys() if key not in known]
            known.update(own)
            if not is_connected and time.monotonic() > deadline:
                errors.append(f"it has not connected within {_CONNECT_S:g} s")
            error = errors[0] if errors else ""
            message = _Introduction(
                name, {key: store.get(key) for key in own}, is_connected and not error, error
            )
            rows = [_decoder.decode(row) for row in share(_encode(message))]
            for number, row in enumerate(rows):
                if row.error:
                    raise GroupEndedError(f"rank {number}: {row.error}")
                if row.group == name:
                    _copy(row.values, store, known)
            if all(row.is_connected for row in rows):
                return
        raise GroupEndedError(f"rank {self.rank}: the group of ranks was ended")

    def _make_backend(self, store: Any, errors: list[str]) -> None:
        """Connect, and compute a first sum, which makes the communicator. Runs on a thread."""
        on_gpu = self._exchange is Exchange.nccl
        place = store, self.rank, self.world
        try:
            if on_gpu:
                torch.cuda.set_device(self._device)  # threads do not share the current device
                self._backend = _nccl(*place, self._timeout_s)
            else:
                self._backend = _gloo(*place, self._host, self._timeout_s)
            first = torch.ones(1, device="cuda" if on_gpu else "cpu")
            self._sum(first)
            if first.item() != self.world:
                errors.append(f"{first.item():g} of {self.world} ranks have joined")
        except RuntimeError as error:  # torch.distributed has no narrower class for all backends
            errors.append(str(error).partition("\n")[0])

    def all_reduce(self, partial: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """As `all_reduce` (collectives.py). Parts are added in the dtype of `partial`.

        The order of the ranks in a sum is the backend's.
        """
        total = partial.clone(memory_format=torch.contiguous_format)
        if total.numel():
            with self._explained():
                self._sum(total)
        if residual is not None:
            total = total.float() + residual.float()
        return total.to(dtype)

    def gather(self, part: Tensor) -> Tensor:
        """[R, V / world] -> [R, V]: the parts of all ranks side by side."""
        rows, width = part.shape
        if self.world == 1:
            return part.clone()
        parts = part.new_empty((self.world * rows, width))
        if parts.numel():
            with self._explained():
                _wait(self._backend._allgather_base(parts, part.contiguous()))
        return parts.view(self.world, rows, width).transpose(0, 1).reshape(rows, self.world * width)

    def abort(self) -> None:
        """End all present and later calls of this rank with an error; from any thread.

        On a GPU the running kernels end, and their results are wrong. The caller must drop them.
        With gloo a present call ends only when the process of another rank ends, or after
        `timeout_s`.
        """
        self._is_aborted = True
        if self._exchange is Exchange.nccl and self._backend is not None:
            # NCCL waits for graphs that hold its kernels, which the caller may have to free.
            threading.Thread(target=self._backend.abort, name="abort-nccl", daemon=True).start()

    def close(self) -> None:
        """Leave the group. Captured graphs with its collectives must have been freed."""
        backend, self._backend = self._backend, None
        if backend is not None and self._exchange is Exchange.nccl and not self._is_aborted:
            # `shutdown` would wait for ranks that have ended.
            thread = threading.Thread(target=backend.abort, name="close-nccl", daemon=True)
            thread.start()
            thread.join(_CLOSE_S)

    def _sum(self, values: Tensor) -> None:
        if self.world == 1:
            return
        options = _dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream
        _wait(self._backend.allreduce([values], options))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A context in which an error of the backend becomes a `GroupEndedError`, unless it is that
        of exhausted GPU memory."""
        if self._is_aborted:
            raise GroupEndedError(f"rank {self.rank}: the group of ranks was ended")
        try:
            yield
        except RuntimeError as error:  # torch.distributed has no narrower class for all backends
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise GroupEndedError(f"rank {self.rank}: {error}") from error


def group_at(handle: Tensor) -> DistributedGroup:
    """The group of a handle.

    Args:
        handle: [1] int64 on the CPU: `DistributedGroup.handle`, of a group that still exists.

    Raises:
        ValueError: no group was joined.
    """
    address = int(handle.item())
    if not address:
        raise ValueError("the model has not joined its group of ranks")
    return ctypes.cast(address, ctypes.py_object).value


class _Introduction(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others in one round while they connect."""

    group: str  # the name of its group
    values: dict[str, bytes]  # entries of its store that are new since the last round
    is_connected: bool
    error: str  # why it cannot connect; empty = no error yet


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Introduction)


def _copy(values: dict[str, bytes], store: Any, known: set[str]) -> None:
    """Write the entries of another rank into the store of this one."""
    for key, value in values.items():
        if key not in known:
            known.add(key)
            store.set(key, value)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _gloo(store: Any, rank: int, world: int, host: str, timeout_s: float) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return _dist.ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Any, rank: int, world: int, timeout_s: float) -> Any:
    """NCCL chooses the network interface itself, or by NCCL_SOCKET_IFNAME."""
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return _dist.ProcessGroupNCCL(store, rank, world, options)
