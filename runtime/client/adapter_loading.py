"""`AdapterLoader`: loads adapters into all engines of a server, at its start or while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from ostinato.conf.environment import expand_user
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.models.checkpoints.hub import HubName, download_adapter
from ostinato.runtime.client.adapter_registry import AdapterRegistry
from ostinato.runtime.errors import EngineError, InvalidRequestError, StartupError
from ostinato.runtime.replicas.replica_set import ReplicaSet
from ostinato.runtime.types.adapters import ServedAdapter

__all__ = (
    "AdapterLoader",
    "allowed_directory",
    "check_runtime_loading",
    "digest_of",
    "find_adapter",
)


def find_adapter(path: str) -> Path:
    """The absolute path of an adapter's directory; an adapter of a hub is downloaded.

    Args:
        path: a local directory or a hub id.

    Raises:
        ValueError: there is no such directory, and the hub does not give it; one line.
    """
    local = expand_user(path)
    try:
        if path and local.is_dir():
            return local.absolute()
        is_there = bool(path) and local.exists()
    except (OSError, ValueError) as error:  # a path that is too long, or with a null character
        raise ValueError(f"{path[:200]!r} cannot be read: {error}") from error
    name = HubName.parse(path)
    if is_there or name is None or name.gguf:
        raise ValueError(f"{path[:200]!r} is neither a directory nor a hub id")
    return download_adapter(name.repository)


def check_runtime_loading(lora: LoraConfig) -> None:
    """Raises InvalidRequestError (403) if clients may not load and unload adapters."""
    if not lora.allow_runtime_loading:
        raise InvalidRequestError(
            "lora.allow_runtime_loading=false: start the server with"
            " lora.allow_runtime_loading=true and lora.directory=DIRECTORY to load and unload"
            " adapters while it runs",
            code="call_refused",
            status=403,
        )


def allowed_directory(path: str, lora: LoraConfig) -> Path:
    """The directory of an adapter that a client of the server asks for, without links.

    Args:
        path: what the client sent; a relative path begins in `lora.directory`.
        lora: says whether clients may load adapters, and from where.

    Raises:
        InvalidRequestError: clients may not load adapters; or the directory does not exist, cannot
            be read, or is not in `lora.directory`, or one of its files is a link that leads out.
    """
    check_runtime_loading(lora)
    shown, where = repr(path[:200]), f"lora.directory={lora.directory}"
    try:
        root = expand_user(lora.directory).resolve()
        directory = (root / path).resolve()
        if not directory.is_relative_to(root):
            raise _wrong_path(f"{shown} is not in {where}; adapters are only loaded from there")
        if not directory.is_dir():
            raise _wrong_path(
                f"{shown}: there is no such directory in {where}; name the directory that has "
                "adapter_config.json"
            )
        for file in directory.iterdir():
            if not file.resolve().is_relative_to(root):
                raise _wrong_path(
                    f"{shown}: {file.name!r} is a link that leads out of {where}; copy the file"
                )
    except (OSError, ValueError, RuntimeError) as error:  # null characters, loops of links
        raise _wrong_path(f"{shown} cannot be read: {error}") from error
    return directory


def digest_of(directory: Path) -> str:
    """The digest of an adapter's files.

    Raises:
        InvalidRequestError: a file is missing or cannot be read.
    """
    try:
        return adapter_digest(directory)
    except ValueError as error:
        raise _wrong_path(str(error)) from error


def _wrong_path(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="lora_path", code="invalid_value")


class AdapterLoader:
    """Loads adapters, and keeps the registry. All methods run on one event loop.

    Args:
        lora: the section `lora` of the configuration.
        replicas: the engines; each gets every adapter.

    Attributes:
        registry: the adapters that are loaded.
    """

    def __init__(self, lora: LoraConfig, replicas: ReplicaSet) -> None:
        self._lora = lora
        self._replicas = replicas
        self._tasks: set[asyncio.Task[ServedAdapter]] = set()
        self.registry = AdapterRegistry(lora.num_slots, replicas.forget_adapter)

    async def load_configured(self) -> None:
        """Load the adapters of `lora.adapters`.

        Raises:
            StartupError: one cannot be loaded.
        """
        for name, path in self._lora.adapters.items():
            try:
                await self.load_own(name, path)
            except EngineError as error:
                raise StartupError(f"lora.adapters, {name}={path}: {error}") from error

    async def load_for_client(self, name: str, path: str, *, in_place: bool) -> ServedAdapter:
        """Load an adapter that a client of the server asks for; see `allowed_directory`, `load`."""
        directory = await asyncio.to_thread(allowed_directory, path, self._lora)
        return await self.load(name, directory, in_place=in_place)

    async def load_own(
        self,
        name: str,
        path: str,
        *,
        in_place: bool = False,
        make_room: Callable[[], None] | None = None,
    ) -> ServedAdapter:
        """Load an adapter that this process asks for; see `find_adapter` and `load`."""
        try:
            directory = await asyncio.to_thread(find_adapter, path)
        except ValueError as error:
            raise _wrong_path(str(error)) from error
        return await self.load(name, directory, in_place=in_place, make_room=make_room)

    async def load(
        self,
        name: str,
        directory: Path,
        *,
        in_place: bool = False,
        make_room: Callable[[], None] | None = None,
    ) -> ServedAdapter:
        """Load an adapter into all engines; returns when requests can name it.

        The load goes on if the call is cancelled, because an engine cannot end a load early.

        Args:
            name: requests name the adapter so.
            directory: the directory of its files.
            in_place: replace an adapter of this name. If it has the same files, it is kept, and
                loaded into the engines that could not load it after a restart.
            make_room: called before a slot is needed; it can unload an adapter.

        Raises:
            InvalidRequestError: the name or the directory is not valid, the name is taken, no slot
                is free, or an engine cannot load the adapter.
            EngineDeadError: no engine runs, or one ended each time it loaded the adapter.
        """
        registry = self.registry
        if make_room is None:  # a refusal comes before files are read, which takes time
            registry.check(name, in_place=in_place)
        digest = await asyncio.to_thread(digest_of, directory)
        before = registry.get(name)
        if in_place and before is not None:
            files = before.path, before.digest
            if files == (str(directory), digest):
                return await self.run_to_end(self._complete(before))
        if make_room is not None:
            make_room()
        adapter = registry.begin(
            name, str(directory), digest, in_place=in_place, created=int(time.time())
        )
        return await self.run_to_end(self._load(adapter))

    async def run_to_end(self, load: Coroutine[None, None, ServedAdapter]) -> ServedAdapter:
        """Run a load, which goes on if this call is cancelled; returns its result."""
        task = asyncio.create_task(load)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    async def _load(self, adapter: ServedAdapter) -> ServedAdapter:
        try:
            await self._replicas.load_adapter(adapter)
        except BaseException:
            self.registry.cancel(adapter)
            raise
        self.registry.finish(adapter)
        return adapter

    async def _complete(self, adapter: ServedAdapter) -> ServedAdapter:
        """Load a served adapter into the engines that do not have it."""
        self.registry.hold(adapter)  # so that no other adapter gets its slot meanwhile
        try:
            await self._replicas.load_adapter(adapter)
        finally:
            self.registry.release(adapter)
        return adapter

    def _end(self, task: asyncio.Task[ServedAdapter]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # read, because asyncio logs errors that are never read
