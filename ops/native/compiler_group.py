"""`CompilerGroup`: compiler processes and their scratch directory, which end with this process.

A compiler starts processes of its own, and a signal to this process does not reach them. Without a
group they would run on for seconds, and leave files behind. This module imports no torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ostinato.conf.environment import with_temporary_files

__all__ = ("CompilerGroup",)

# Waits until its standard input is closed, then ends its process group and removes the directory.
# The compilers can have inherited that SIGINT and SIGTERM are ignored. SIGKILL would end the shell
# too. The shell itself ignores signals that are sent to all processes of a service.
_LEADER = "trap '' HUP INT TERM USR1; read -r line; kill -USR1 0; rm -rf -- \"$1\""


class CompilerGroup:
    """Runs compilers in a process group that ends when this object is closed or this process ends.

    A shell leads the group. If this process ends without closing this object, such as by SIGKILL,
    the system closes the shell's standard input, and the shell ends the group.

    Args:
        parent: an existing directory; the scratch directory is made in it.

    Attributes:
        scratch: the directory for the results and the temporary files of the compilers. Removed at
            the end.

    Raises:
        ChildProcessError: /bin/sh cannot be started.
        OSError: the directory cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        self.scratch = Path(tempfile.mkdtemp(dir=parent, prefix="build-"))
        try:
            self._leader = subprocess.Popen(
                ["/bin/sh", "-c", _LEADER, "sh", str(self.scratch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            self.scratch.rmdir()
            raise ChildProcessError(f"/bin/sh cannot be started: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the compilers that still run, and remove the scratch directory."""
        # The shell keeps its id, also after its end, until `communicate` has waited for it.
        os.killpg(self._leader.pid, signal.SIGKILL)
        self._leader.communicate()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a compiler to its end. Threads may call this at the same time.

        Args:
            command: the program and its arguments.

        Returns:
            Its exit code, negative for a signal, and its output.

        Raises:
            OSError: the system cannot start it.
        """
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=with_temporary_files(self.scratch),
            process_group=self._leader.pid,
        )
