"""The compiled bundle: a directory of compiled programs, step costs and kernels for later starts.

The name of the directory has the model, the device, and a digest of the settings that a program
depends on. The manifest has a digest of the sources that made the bundle, the versions of torch and
Python, and the digest of every file. A bundle can be copied to any place.

A bundle is code. It is loaded only from a directory that belongs to the user or to root, and that
no other user can write to. A bundle that is damaged, or that other sources or versions made, is set
aside with one line in the log, and a new one is built.

This module does not import torch: an engine process looks for kernels while it imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
from filelock import FileLock

__all__ = ("Bundle", "BundleEntry", "digest_of_sources", "made_by", "trusted_directories")

_LOG = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_FORMAT = "1"
_LONGEST_TURN_S = 600.0  # a start that takes longer is not waited for
_MOST_RACES = 10  # attempts to replace a directory that other processes replace too
_PACKAGE = Path(__file__).parent.parent
_CODE = (".py", ".cpp", ".h")


class BundleEntry(msgspec.Struct, frozen=True):
    """A file of a bundle."""

    name: str
    num_bytes: int
    sha256: str


class _Body(msgspec.Struct, frozen=True):
    identity: dict[str, str]
    made_by: dict[str, str]
    entries: list[BundleEntry]


class _Manifest(msgspec.Struct, frozen=True):
    body: _Body
    sha256: str  # the digest of the body's JSON


class _Unfit(Exception):
    """The reason why a bundle is not used, in one line."""


@cache
def digest_of_sources(package: Path = _PACKAGE) -> str:
    """A digest of the sources that programs and kernels depend on: their paths and contents.

    It is computed once, because imported code does not change.

    Args:
        package: the directory of the package.
    """
    files = [package / "conf" / "environment.py"]  # it chooses the compiler and prepares torch's
    for folder in ("graphs", "models", "ops"):
        for directory, _, names in os.walk(package / folder):
            files += [Path(directory, name) for name in names if name.endswith(_CODE)]
    digest = hashlib.sha256()
    for path, file in sorted((file.relative_to(package).as_posix(), file) for file in files):
        data = file.read_bytes()
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:20]


def made_by() -> dict[str, str]:
    """A digest of the sources, and the versions, that programs and kernels depend on."""
    return {
        "format": _FORMAT,
        "sources": digest_of_sources(),
        "torch": version("torch").partition("+")[0],  # without the build: cpu, cu130
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
    }


class Bundle:
    """The programs and tables of one model on one device.

    Args:
        root: directory of bundles; created by the first `save`.
        label: readable beginning of the directory's name.
        identity: everything that a program depends on besides sources and versions.
    """

    def __init__(self, root: Path, label: str, identity: dict[str, str]) -> None:
        digest = hashlib.sha256(msgspec.json.encode(sorted(identity.items()))).hexdigest()
        safe_label = re.sub(r"[^\w.-]+", "-", label)
        self.directory = root / f"{safe_label}-{digest[:16]}"
        self._identity = identity
        self._made_by = made_by()
        self._files: dict[str, bytes] = {}
        self._is_changed = False
        self._is_refused = False
        self._turn = FileLock(root / f".{self.directory.name}.lock")
        self._open()

    @property
    def entries(self) -> list[BundleEntry]:
        """Its files, saved or not."""
        return [_entry(name, data) for name, data in sorted(self._files.items())]

    def get(self, name: str) -> bytes | None:
        """A file's content; None when there is none."""
        return self._files.get(name)

    def put(self, name: str, data: bytes) -> None:
        """Add or replace a file; `save` writes it."""
        if self._files.get(name) != data:
            self._files[name] = data
            self._is_changed = True

    def reject(self, reason: str) -> None:
        """Move the directory aside, because a file in it does not load."""
        self._files.clear()
        self._set_aside(reason)

    @property
    def is_saved(self) -> bool:
        """Whether the directory holds all entries."""
        return not (self._is_changed or self._is_refused)

    def take_turn(self) -> None:
        """Wait while another process makes this bundle, and read the files that it has saved.

        If the bundle is still empty, this process makes it. Other processes wait until `save` or
        `end_turn`. Does nothing if the bundle has files already, if its directory may not be
        loaded, or where no file can be locked.
        """
        if self._files or self._is_refused:
            return
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._turn.acquire(timeout=_LONGEST_TURN_S)
        except (OSError, NotImplementedError) as error:  # the time-out is an OSError too
            _LOG.info("this process does not wait for others that make the bundle: %s", error)
            return
        self._open()
        if self._files:
            self.end_turn()

    def end_turn(self) -> None:
        """Let processes that wait in `take_turn` go on; no-op without a turn."""
        self._turn.release()

    def save(self) -> None:
        """If a file has changed, replace the directory by a new one. End this process's turn.

        If the directory cannot be written, this logs one line.
        """
        try:
            self._save()
        finally:
            self.end_turn()

    def _save(self) -> None:
        if self._is_refused or not self._is_changed:
            return
        root = self.directory.parent
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as scratch:
                new = Path(scratch) / "bundle"
                self._write(new)
                is_replaced = self._replace(new, Path(scratch) / "old")
        except OSError as error:
            _LOG.warning(
                "the compiled bundle is not kept, the next start compiles again: %s cannot be "
                "written: %s; set graphs.bundle_dir to a directory that can be written",
                self.directory,
                error.strerror or error,
            )
            return
        if is_replaced:
            self._is_changed = False
            return
        _LOG.warning(
            "the compiled bundle is not kept: other processes replaced %s %d times while it was "
            "written; the next start loads theirs",
            self.directory,
            _MOST_RACES,
        )

    def _open(self) -> None:
        if not self.directory.exists():
            return
        try:
            reason = _why_not_trusted(self.directory)
        except FileNotFoundError:  # another process is replacing the directory
            return
        if reason is not None:
            self._is_refused = True
            _LOG.warning("the bundle %s is not loaded: %s", self.directory, reason)
            return
        try:
            self._files = self._read()
        except _Unfit as unfit:
            self._set_aside(str(unfit))

    def _read(self) -> dict[str, bytes]:
        try:
            manifest = msgspec.json.decode(
                (self.directory / _MANIFEST).read_bytes(), type=_Manifest
            )
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Unfit(f"its manifest cannot be read: {error}") from error
        body = manifest.body
        if hashlib.sha256(msgspec.json.encode(body)).hexdigest() != manifest.sha256:
            raise _Unfit("its manifest is damaged")
        for what, ours in self._made_by.items():
            theirs = body.made_by.get(what)
            if theirs != ours:
                raise _Unfit(f"it was made with {what} {theirs}, not with {ours}")
        if body.identity != self._identity:
            raise _Unfit(f"it is for {body.identity}")
        files = {}
        for entry in body.entries:
            try:
                data = (self.directory / entry.name).read_bytes()
            except OSError as error:
                raise _Unfit(f"{entry.name} cannot be read: {error.strerror}") from error
            if _entry(entry.name, data) != entry:
                raise _Unfit(f"{entry.name} is damaged")
            files[entry.name] = data
        return files

    def _set_aside(self, reason: str) -> None:
        """Move the directory out of the way; only the last one that was moved is kept."""
        aside = self.directory.with_name(f"{self.directory.name}.set-aside")
        _LOG.warning("the bundle %s is set aside and built anew: %s", self.directory, reason)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            self.directory.rename(aside)
        except OSError as error:
            _LOG.warning("the bundle cannot be moved: %s", error.strerror or error)
        self._is_changed = True

    def _write(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        for name, data in self._files.items():
            (directory / name).write_bytes(data)
        body = _Body(self._identity, self._made_by, self.entries)
        digest = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
        text = msgspec.json.format(msgspec.json.encode(_Manifest(body, digest)))
        (directory / _MANIFEST).write_bytes(text + b"\n")

    def _replace(self, new: Path, old: Path) -> bool:
        """Move the directory to `old`, and `new` to its place.

        If two processes do so at once, the directory of the last one stays.

        Returns:
            Whether `new` is in its place. False if another process was faster `_MOST_RACES` times.

        Raises:
            OSError: a directory cannot be moved.
        """
        for _ in range(_MOST_RACES):
            with contextlib.suppress(FileNotFoundError):
                self.directory.rename(old)
            try:
                new.rename(self.directory)
            except OSError:  # another process was faster
                if not self.directory.exists():
                    raise
                shutil.rmtree(old, ignore_errors=True)
                continue
            return True
        return False


def trusted_directories(root: Path) -> Iterator[Path]:
    """The bundles below `root` whose files may be loaded. Others are skipped without a warning."""
    with contextlib.suppress(OSError):
        for directory in sorted(root.iterdir()):
            if directory.is_dir() and _why_not_trusted(directory) is None:
                yield directory


def _entry(name: str, data: bytes) -> BundleEntry:
    return BundleEntry(name, len(data), hashlib.sha256(data).hexdigest())


def _why_not_trusted(directory: Path) -> str | None:
    """The reason not to run code from this directory, or None."""
    if not hasattr(os, "geteuid"):
        return None
    # A link is trusted if the directory that it points to is.
    for path in dict.fromkeys((directory.parent, directory.resolve().parent, directory)):
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            return (
                f"{path} belongs to another user, and a bundle is code; copy it to a directory "
                "that you own"
            )
        if status.st_mode & 0o022:
            return (
                f"{path} can be written by others (mode {status.st_mode & 0o777:o}), and a bundle "
                f"is code; chmod go-w {path}"
            )
    return None
