"""A group of ranks whose values torch.distributed carries: NCCL between GPUs, gloo between CPUs.

Both run the same code here. So the tests of gloo check everything but NCCL itself.

The ranks find each other through a file without a name, which a parent process makes and passes to
them (`create_rendezvous`). So no port has to be chosen, and no other user can join. All ranks are
on one machine.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ostinato.ops.parallel.exchange import Exchange

__all__ = ("DistributedGroup", "GroupEndedError", "group_at", "has_nccl")

_dist: Any = torch.distributed  # its classes differ from build to build of torch
_CONNECT_S = 60.0  # all ranks connect at the same time, so this is only for a rank that hangs
_CLOSE_S = 2.0
_MANY_FILES = 1 << 16  # more than a process opens; the system's limit may be higher


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
        self, fd: int, rank: int, world: int, exchange: Exchange, *, timeout_s: float = 1800.0
    ) -> None:
        """
        Args:
            fd: from `create_rendezvous`; closed with this object. -1 = for a group of one.
            rank: the rank of this process.
            world: ranks of the group.
            exchange: nccl or gloo.
            timeout_s: a wait of gloo that takes longer ends with an error.

        Raises:
            OSError: the system gives no descriptor.
        """
        assert exchange.is_distributed, f"{exchange} is not carried by torch.distributed"
        self.rank, self.world = rank, world
        self._fd = _out_of_the_way(fd) if fd >= 0 else -1
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._backend: Any = None
        self._is_aborted = False

    @property
    def handle(self) -> int:
        """The address of this object, which `group_at` turns into the object.

        It keeps no reference, so the object must outlive all calls with the handle.
        """
        return id(self)

    def connect(self) -> None:
        """Connect to the other ranks, which call this too. It makes the communicator.

        Raises:
            GroupEndedError: a rank has ended, or does not connect in time.
        """
        with self._explained():
            store = _dist.FileStore(f"/proc/self/fd/{self._fd}", -1)
            store.set_timeout(timedelta(seconds=_CONNECT_S))
            if self._exchange is Exchange.nccl:
                self._backend = _nccl(store, self.rank, self.world, self._timeout_s)
            else:
                self._backend = _gloo(store, self.rank, self.world, self._timeout_s)
            on_gpu = self._exchange is Exchange.nccl
            device = torch.device("cuda" if on_gpu else "cpu")
            first = torch.ones(1, device=device)
            self._sum(first)
            if first.item() != self.world:
                raise GroupEndedError(f"{first.item():g} of {self.world} ranks have joined")

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
        With gloo a present call ends only when the process of another rank ends.
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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sum(self, values: Tensor) -> None:
        if self.world == 1:
            return
        options = _dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream
        _wait(self._backend.allreduce([values], options))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A context in which an error of the backend becomes a `GroupEndedError`."""
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


def _out_of_the_way(fd: int) -> int:
    """Move a descriptor to a number that no later file gets; returns it.

    torch opens the file once more when it frees its store, perhaps long after the descriptor was
    closed. If it finds another file, it ends the process. If it finds none, it does nothing.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = most // 2 if 0 < most < _MANY_FILES else _MANY_FILES // 2
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(fd)
    return moved


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _gloo(store: Any, rank: int, world: int, timeout_s: float) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    return _dist.ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Any, rank: int, world: int, timeout_s: float) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return _dist.ProcessGroupNCCL(store, rank, world, options)
