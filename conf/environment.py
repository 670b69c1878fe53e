"""Environment variables, the cache directory and temporary directories.

All other settings are Hydra configuration.

| variable | meaning | default |
|---|---|---|
| `OSTINATO_CACHE_DIR` | where compiled kernels and graphs are kept | `~/.cache/ostinato` |
| `CXX` | the C++ compiler for CPU kernels and torch's generated code | `g++`, `clang++` on macOS |
| `CUDA_VISIBLE_DEVICES` | the GPUs that may be used, as for every CUDA program | all |
| `NCCL_SOCKET_IFNAME` | the network interface of NCCL between machines | that of `parallel.host` |

If `XDG_CACHE_HOME` is set, the default cache directory is `ostinato` in it. `TMPDIR` has its usual
meaning. Shells that complete a command line pass it in `COMP_LINE`. The caches of torch, Triton and
FlashInfer are folders in this cache directory, unless their own variables (`_LIBRARY_CACHES`) are
set.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Generator
from pathlib import Path

from ostinato.conf.errors import ConfigError

__all__ = (
    "TemporaryDirectory",
    "cache_dir",
    "choose_nccl_interface",
    "completion_line",
    "cxx",
    "environment_with",
    "expand_user",
    "forbids_execution",
    "prepare_cache",
    "prepare_compiler",
    "require_writable",
    "triton_cache",
    "triton_cache_in",
    "visible_gpus",
    "with_own_caches",
    "with_temporary_files",
    "with_visible_gpus",
)

_LIBRARY_CACHES = {  # variable -> folder in our cache directory
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_TEMPORARY_PREFIX = "ostinato-run-"
_LEAST_FREE_BYTES = 16 << 20  # kernels and programs of a small model, and room to write them


def expand_user(path: str | Path) -> Path:
    """The path with a leading `~` replaced.

    If the home directory is not known, the path is unchanged. `Path.expanduser` would raise
    RuntimeError.
    """
    return Path(os.path.expanduser(path))


def require_writable(file: Path, key: str) -> None:
    """Check, before a long run, that its result can be written. Makes the folder of the file.

    Args:
        file: where the result will be written. An existing file is not changed.
        key: the setting that names the file, for the message.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        if file.exists():
            file.open("ab").close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{key}: {file} cannot be written ({reason}); name a file that can be written"
        ) from error


def cache_dir() -> Path:
    """The directory for compiled kernels and programs, and for bundles of these (graphs/bundle.py).

    It need not exist yet.
    """
    explicit = os.environ.get("OSTINATO_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = expand_user("~")
        # In containers, a user id that is not in /etc/passwd has the home directory /.
        base = (home if home.is_absolute() else Path("/")) / ".cache"
    return Path(base) / "ostinato"


class TemporaryDirectory:
    """A new directory, mode 0700, for temporary files of this process.

    It is removed by `remove`, and when this object or the program ends. A process that is killed
    leaves its directory. The next process that makes one in the same place removes it. A process
    holds a lock on its directory, which tells others that the process runs.

    Args:
        name: the directory's name begins with `ostinato-run-` and this.
        root: where the directory is made; None = the usual place for temporary files.

    Attributes:
        path: the directory.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, name: str = "", root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        for abandoned in root.glob(f"{_TEMPORARY_PREFIX}*"):
            _remove_if_abandoned(abandoned)
        # It gets its name when it is locked, so that no other process can remove it before.
        hidden = Path(tempfile.mkdtemp(prefix=f".{_TEMPORARY_PREFIX}{name}", dir=root))
        descriptor = os.open(hidden, os.O_RDONLY)
        with contextlib.suppress(OSError):  # without locks, nothing is removed as abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = hidden.rename(root / hidden.name.removeprefix("."))
        self._finalize = weakref.finalize(self, _remove_locked, self.path, descriptor)

    def remove(self) -> None:
        """Remove the directory with its content; safe to call twice."""
        self._finalize()


def _remove_locked(directory: Path, descriptor: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(descriptor)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a temporary directory of this user whose process has ended."""
    with contextlib.suppress(OSError):  # it is locked, another user's, or was removed meanwhile
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def prepare_cache() -> str | None:
    """Make sure that `cache_dir` can be written, in this process and in the processes it starts.

    If it cannot be written or is nearly full, `cache_dir` becomes a `TemporaryDirectory`, which is
    removed when this process ends. That directory has links to the bundles of the original
    one. Call this function before torch is imported. A second call has no effect.

    Returns:
        A line for the log if the temporary directory was made, else None.

    Raises:
        OSError: no temporary directory can be made either.
    """
    wanted = cache_dir()
    reason = _why_not_writable(wanted)
    if reason is None and _free_bytes(wanted) < _LEAST_FREE_BYTES <= _free_bytes(_temporary_root()):
        reason = f"less than {_LEAST_FREE_BYTES >> 20} MiB are free"
    line = None
    if reason is not None:
        directory = TemporaryDirectory("cache-", _temporary_root())
        atexit.register(directory.remove)
        temporary = directory.path
        _link_bundles(wanted, temporary)
        os.environ["OSTINATO_CACHE_DIR"] = str(temporary)
        line = (
            f"the cache directory {wanted} cannot be used ({reason}): {temporary} is used instead "
            "and removed at the end; the next start compiles again what no bundle has; set "
            "OSTINATO_CACHE_DIR to a directory that can be written"
        )
    for variable, folder in _LIBRARY_CACHES.items():
        os.environ.setdefault(variable, str(cache_dir() / folder))
    return line


def forbids_execution(path: Path) -> bool:
    """Whether the file system of an existing path is mounted `noexec`, so that no library loads."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    return False


def _why_not_writable(directory: Path) -> str | None:
    """Make the directory if it is missing. Returns why it cannot be written, or None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except FileExistsError:
        return "it is a file"
    except OSError as error:
        return error.strerror or str(error)


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _temporary_root() -> Path:
    """The directory for temporary files; another one if the usual one is mounted `noexec`.

    `docker run --tmpfs /tmp` mounts `/tmp` with `noexec`. Compiled kernels cannot be loaded from
    there.
    """
    usual = Path(tempfile.gettempdir())
    others = [Path("/var/tmp"), Path("/dev/shm")]
    for root in (usual, *others):
        if os.access(root, os.W_OK | os.X_OK) and not forbids_execution(root):
            return root
    return usual


def _link_bundles(source: Path, target: Path) -> None:
    """Link each bundle of `source` into `target`.

    A new bundle there replaces the link. The original bundle stays.
    """
    folder = target / "bundles"
    folder.mkdir(mode=0o700)
    with contextlib.suppress(OSError):
        for bundle in (source / "bundles").resolve().iterdir():
            (folder / bundle.name).symlink_to(bundle)


def completion_line() -> str:
    """The command line so far when a shell completes it; empty otherwise."""
    return os.environ.get("COMP_LINE", "")


def cxx() -> str:
    """The C++ compiler: a command or a path. It need not exist."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def environment_with(**changes: str) -> dict[str, str]:
    """This process's environment, and the variables of `changes` that it does not set."""
    return {**changes, **os.environ}


def triton_cache() -> Path | None:
    """The folder in which Triton keeps compiled kernels; None = Triton's own choice."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    return None if folder is None else Path(folder)


@contextlib.contextmanager
def triton_cache_in(folder: Path) -> Generator[None]:
    """A context in which Triton keeps compiled kernels in this folder."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before


def choose_nccl_interface(name: str | None) -> None:
    """Let NCCL use this network interface in this process, unless the user has chosen one.

    Call this before NCCL connects for the first time. None = the choice is NCCL's.
    """
    if name is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # `=`: the whole name, no prefix


def visible_gpus() -> list[str] | None:
    """The GPUs that the user allows, by index or UUID; None = all."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]


def with_visible_gpus(gpus: str | None) -> dict[str, str]:
    """The environment for a child process that sees only some GPUs.

    Args:
        gpus: their indices or UUIDs, separated by commas; None = all GPUs of this process.
    """
    return {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})}


def with_own_caches(directory: Path) -> dict[str, str]:
    """The environment for a child process that keeps its compiled files in `directory`."""
    environment = {**os.environ, "OSTINATO_CACHE_DIR": str(directory)}
    for variable in _LIBRARY_CACHES:
        environment.pop(variable, None)
    return environment


def with_temporary_files(directory: Path) -> dict[str, str]:
    """The environment for a child process that writes its temporary files to `directory`."""
    return {**os.environ, "TMPDIR": str(directory)}


def prepare_compiler(*, kernel_pool: bool) -> None:
    """Set environment variables of torch's compiler. Variables that are set already are kept.

    Args:
        kernel_pool: whether torch may keep a pool of processes that compile Triton kernels. On a
            machine without a GPU the pool is not used, and its imports of torch cost seconds of
            processor time at every start.
    """
    if not kernel_pool:
        os.environ.setdefault("TORCH_WARM_POOL", "0")
