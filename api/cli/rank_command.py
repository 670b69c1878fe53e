"""`run rank`: offers this machine to a server on another machine."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

from ostinato.runtime.nodes.node_agent import run_node
from ostinato.runtime.process.log_format import configure_logging

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig

__all__ = ("rank",)


def rank(config: RunConfig, address: str, token: str) -> int:
    """Run engines for a server until the server ends; returns the exit code.

    Args:
        config: has the settings of the log.
        address: the server's address, `tcp://HOST:PORT`.
        token: the server's token; `-` = read it from standard input.

    Raises:
        StartupError: this machine cannot join the server; the message is one line.
    """
    name = socket.gethostname()
    configure_logging(config.server.log_level, config.server.log_format, name)
    if token == "-":
        token = sys.stdin.readline().strip()
    asyncio.run(run_node(address, token, name, _say))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
