"""The process of a rank after the first: `python -m ostinato.runtime.process.rank_main ...`.

A `LocalRank` starts this process: in rank 0's process, or on another machine in that of
rank_host_main.py, which passes the messages of rank 0 on. This process builds its part of the
model, then runs the steps that rank 0 sends. It waits for steps in `recv`, so an idle rank uses no
processor time. When the process that started it ends, for any reason, the socket between them
closes. Then this process ends too.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.process.log_format import configure_logging
from ostinato.runtime.process.parent_death import end_with_parent
from ostinato.runtime.ranks.messages import (
    Answer,
    Call,
    Channel,
    Idle,
    LateCompiles,
    RankFailed,
    Serve,
    StartRank,
    Step,
)

if TYPE_CHECKING:
    from ostinato.runtime.startup.rank_parts import RankParts

__all__ = ("main",)


def main(
    socket_fd: str, stack_fd: str, parent: str, log_level: str, log_format: str, name: str
) -> None:
    """Build a rank and run its steps; ends the process.

    Args:
        socket_fd: descriptor of the socket to the process that started this one.
        stack_fd: descriptor of the file for the stacks of threads, written on SIGUSR1 or a crash.
        parent: id of the process that started this one, if the system is to kill this process when
            that one ends; else 0.
        log_level: the log level of this process.
        log_format: text or json.
        name: the name of this process, in its log.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends this process
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(int(stack_fd))
    faulthandler.register(signal.SIGUSR1, int(stack_fd))
    connection = socket.socket(fileno=int(socket_fd))
    _end_with_rank_0(connection, int(parent))
    configure_logging(log_level, log_format, name)
    channel = Channel(connection)
    code = 0
    try:
        _run(channel)
    except EOFError:
        pass
    except ConnectionError:  # the rank of another stage has ended; rank 0 reports why
        channel.wait_for_end()
    except StartupError as error:
        code = 1
        channel.send(RankFailed(str(error), ""))
    except Exception as error:  # the boundary of the process: rank 0 reports why it ended
        code = 1
        channel.send(RankFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    os._exit(code)  # not `exit`: threads of libraries can wait for a rank for ever


def _end_with_rank_0(connection: socket.socket, parent: int) -> None:
    """End this process when rank 0's process ends, even while a step here waits for rank 0."""
    end_with_parent(parent)

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="watch-rank-0", daemon=True).start()


def _run(channel: Channel) -> None:
    # This import is slow. It runs while rank 0 reads the configuration.
    from ostinato.runtime.startup.rank_group import build_other_rank

    descriptors = channel.receive_descriptors()
    start = channel.receive()
    assert isinstance(start, StartRank), f"{start} came first"
    with ExitStack() as undo:
        _serve(channel, build_other_rank(start, descriptors, channel.meet, undo))


def _serve(channel: Channel, rank: RankParts) -> None:
    executor, runner, monitor = rank.executor, rank.runner, rank.monitor
    late_compiles: list[LateCompile] = []
    while True:
        message = channel.receive()
        if isinstance(message, Step):
            output = message.output
            rows = [entry.row for entry in output.scheduled if not entry.token_ids]
            runner.set_last_tokens(rows, message.last_tokens)
            executor.read(executor.launch(output))
            if (now := monitor.late_compiles) != late_compiles:
                late_compiles = now
                channel.send(LateCompiles(late_compiles))
        elif isinstance(message, Call):
            try:
                [text] = executor.call(message.call)
                channel.send(Answer(text))
            except InvalidRequestError as error:
                channel.send(Answer(str(error), is_refusal=True))
        elif isinstance(message, Idle):
            executor.idle()
        elif isinstance(message, Serve):
            monitor.mark_ready()
            executor.idle()  # the start is over: the cache's next pages are mapped
            gc.collect()
            gc.freeze()
        else:
            raise RuntimeError(f"{message} came after the start")  # noqa: TRY004 - a fault of rank 0


if __name__ == "__main__":
    main(*sys.argv[1:])
