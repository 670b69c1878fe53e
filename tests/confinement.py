"""Prefixes of command lines that confine a command as containers do: permissions, files, user.

Each prefix replaces its own process by the confined command, so the process id stays the same. A
test is skipped, with the reason, where the system does not allow the prefix.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = (
    "few_files",
    "full",
    "no_execution",
    "no_temporary_files",
    "read_only",
    "unknown_user",
    "without_privileges",
)


def read_only(directory: Path) -> list[str]:
    """Runs the command with an empty read-only file system at an existing directory."""
    script = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
    return _checked("a mount", ["unshare", "--mount", "sh", "-c", script, str(directory)])


def full(directory: Path, kib: int) -> list[str]:
    """Runs the command with an empty file system of `kib` KiB at an existing directory."""
    script = f'mount -t tmpfs -o size={kib}k none "$0" && exec "$@"'
    return _checked("a mount", ["unshare", "--mount", "sh", "-c", script, str(directory)])


def no_execution(directory: Path) -> list[str]:
    """Runs the command with an empty file system at a directory; its files cannot be executed."""
    script = 'mount -t tmpfs -o noexec none "$0" && exec "$@"'
    return _checked("a mount", ["unshare", "--mount", "sh", "-c", script, str(directory)])


def no_temporary_files() -> list[str]:
    """Runs the command with `/` and the directories for temporary files read-only."""
    # The interpreter itself may lie under /tmp, so these directories keep their contents.
    script = (
        "mount -o remount,ro,bind / && "
        "for each in /tmp /var/tmp /dev/shm; do "
        "mount --bind $each $each && mount -o remount,ro,bind $each; done && "
        'exec "$@"'
    )
    return _checked("a mount", ["unshare", "--mount", "sh", "-c", script, "sh"])


def unknown_user() -> list[str]:
    """Runs the command with a user id for which the system has no name and no home directory."""
    return _checked("a user namespace", ["unshare", "--user", "--map-user=4242"])


def without_privileges() -> list[str]:
    """Runs the command without root's right to ignore file permissions."""
    if os.geteuid() != 0:
        return []
    return _checked("setpriv", ["setpriv", "--inh-caps=-all", "--bounding-set=-all"])


def few_files(number: int) -> list[str]:
    """Runs the command with `number` as the soft and the hard limit of open files."""
    return ["sh", "-c", f'ulimit -n {number} && exec "$@"', "sh"]


def _checked(what: str, command: list[str]) -> list[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{what} needs {command[0]}, which is not installed")
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        pytest.skip(f"{what} is not allowed here: {done.stderr.strip()}")
    return command
