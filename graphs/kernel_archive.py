"""Carries compiled Triton kernels in a bundle, from Triton's cache to that of another machine.

Triton's cache has a folder for each kernel. The folder's name is a digest of the kernel's source
and constants, of the compute capability, and of Triton and its assembler. A start that needs a
kernel finds it there and compiles nothing.
"""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ostinato.conf.environment import triton_cache
from ostinato.graphs.bundle import Bundle

__all__ = ("adopt_triton_kernels", "pack_triton_kernels", "triton_entry", "unpack_triton_kernels")

_LOG = logging.getLogger(__name__)

_GROUP = "__grp__"  # files that name the files of a kernel by their paths
_MOST_SHOWN = 200  # bytes of such a file in an error
# Endings of the files that a start reads. The compiler's intermediate texts are left out.
_KEPT = (".cubin", ".json")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the date of all files, so that equal kernels are equal bytes


def triton_entry() -> str | None:
    """The name of the archive in a bundle; None where Triton is not installed."""
    try:
        return f"triton-{version('triton')}.zip"
    except PackageNotFoundError:
        return None


def pack_triton_kernels(cache: Path) -> bytes:
    """The kernels in a cache of Triton as one archive.

    Args:
        cache: a directory that has only finished kernels.

    Raises:
        OSError, ValueError: a file cannot be read, or is not one of Triton's.
    """
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(cache.glob("*/*")):
            if path.suffix not in _KEPT or not path.is_file():
                continue
            content = path.read_bytes()
            if path.name.startswith(_GROUP):
                content = _with_paths(content, None)
            name = zipfile.ZipInfo(f"{path.parent.name}/{path.name}", _EPOCH)
            archive.writestr(name, content, zipfile.ZIP_DEFLATED)
    return data.getvalue()


def unpack_triton_kernels(data: bytes, cache: Path) -> int:
    """Put the kernels of an archive into a cache of Triton. Files that the cache has are kept.

    Args:
        data: from `pack_triton_kernels`.
        cache: the directory; made if it is not there.

    Returns:
        The number of kernels that were added.

    Raises:
        OSError, ValueError, zipfile.BadZipFile: the data are not such an archive, or a file cannot
            be written.
    """
    added = 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # The group's file comes last: with it, a kernel is complete.
        names = sorted(archive.namelist(), key=lambda name: _GROUP in name)
        for name in names:
            folder, _, file = name.partition("/")
            if not folder.isalnum() or not file or "/" in file:
                raise ValueError(f"{name!r} is not a file of a kernel's folder")
            target = cache / folder / file
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.read(name)
            if file.startswith(_GROUP):
                content = _with_paths(content, target.parent)
                added += 1
            scratch = target.with_name(f".{os.getpid()}-{file}")
            scratch.write_bytes(content)
            scratch.replace(target)
    return added


def _with_paths(group: bytes, folder: Path | None) -> bytes:
    """A group's file with its paths moved to `folder`; None = file names without a folder.

    Files that an archive leaves out are not named.

    Raises:
        ValueError: `group` is not the content of such a file.
    """
    match json.loads(group):
        case {"child_paths": dict(paths)} as content:
            names = [name for name in paths if name.endswith(_KEPT)]
        case _:
            text = group[:_MOST_SHOWN].decode(errors="replace")
            raise ValueError(
                f"a kernel's file of paths must hold an object with child_paths, got {text}"
            )
    content["child_paths"] = {
        name: name if folder is None else str(folder / name) for name in names
    }
    return json.dumps(content).encode()


def adopt_triton_kernels(bundle: Bundle) -> None:
    """Give this process's Triton the kernels of a bundle that another machine compiled."""
    name, cache = triton_entry(), triton_cache()
    data = None if name is None else bundle.get(name)
    if data is None or cache is None:
        return
    try:
        added = unpack_triton_kernels(data, cache)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        _LOG.warning("the bundle's kernels are not used: %s", error)
        return
    if added:
        _LOG.info("Triton kernels from the bundle: %d", added)
