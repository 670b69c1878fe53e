"""Compares the starts of `run serve` and of llama.cpp's server with the same GGUF files, in turns.

    python -m ostinato.benchmarks.peers.gguf_start --llama-cpp LLAMA_SERVER FILE.gguf ...

It measures the seconds from the start of the process until a completion of one token has been
answered. The first start of `run serve` with a file is not counted: it makes the programs that
later starts load. The file is in the operating system's file cache. Processes that write no
bytecode (PYTHONDONTWRITEBYTECODE) compile their modules at every start, so the variable is emptied.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.tables import median_and_range
from ostinato.conf.environment import environment_with

__all__ = ("first_answer_s",)

_BODY = json.dumps({"prompt": "Hello", "max_tokens": 1, "temperature": 0})
_START_S = 300.0
_POLL_S = 0.02
_LOG_BYTES = 2000
_OURS, _PEER = "ostinato", "llama.cpp"


def first_answer_s(command: Callable[[int], list[str]]) -> float:
    """Seconds until a new server has answered a completion request; ends the server.

    Args:
        command: the server's command line for a port of the loopback.

    Raises:
        RuntimeError: the server ended, refused the request, or was not ready in time; the text has
            the end of its log.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = environment_with(PYTHONDONTWRITEBYTECODE="")  # as if it were unset
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(command(port), stdout=log, stderr=log, env=environment)
        try:
            while (status := _ask(port)) != 200:
                late = time.monotonic() - began > _START_S
                if late or process.poll() is not None or status not in (None, 503):
                    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
                    text = log.read().decode(errors="replace").strip()
                    raise RuntimeError(
                        f"{' '.join(command(port))} gave no completion (status {status}): {text}"
                    )
                time.sleep(_POLL_S)
            return time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ask(port: int) -> int | None:
    """The status of a completion request; None if the port does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    try:
        connection.request("POST", "/v1/completions", _BODY, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return reply.status


def _commands(file: str, llama_server: str | None) -> dict[str, Callable[[int], list[str]]]:
    """Engine -> its command line for a port."""
    run = str(Path(sys.executable).with_name("run"))
    commands = {_OURS: lambda port: [run, "serve", f"model.path={file}", f"server.port={port}"]}
    if llama_server:
        threads = str(os.cpu_count())
        commands[_PEER] = lambda port: [
            *(llama_server, "-m", file, "--port", str(port), "-t", threads, "-c", "2048")
        ]
    return commands


def _measure(files: list[str], llama_server: str | None, rounds: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for file in files:
        name, commands = Path(file).name, _commands(file, llama_server)
        first_answer_s(commands[_OURS])
        for number in range(rounds):
            for engine, command in commands.items():
                load = LoadMeter()
                seconds = first_answer_s(command)
                print(f"{name}, round {number + 1}: {engine} {seconds:.2f} s", flush=True)
                results.append(
                    {
                        "file": name,
                        "round": number,
                        "engine": engine,
                        "seconds": seconds,
                        "other_cpu": load.stop(),
                    }
                )
    return results


def _print_table(results: list[dict[str, Any]]) -> None:
    engines = list(dict.fromkeys(result["engine"] for result in results))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("seconds until the first answer")
    for name in (*engines, *(["difference"] if len(engines) > 1 else [])):
        table.add_column(name, justify="right")
    for file in dict.fromkeys(result["file"] for result in results):
        values = [
            [each["seconds"] for each in results if (each["file"], each["engine"]) == (file, name)]
            for name in engines
        ]
        if len(engines) > 1:
            values.append([ours - theirs for ours, theirs in zip(*values, strict=True)])
        table.add_row(file, *map(median_and_range, values))
    Console(highlight=False).print(table)


def main(arguments: list[str]) -> int:
    """Measure the files that the command line names; see --help. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ostinato.benchmarks.peers.gguf_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE.gguf")
    parser.add_argument("--llama-cpp", metavar="LLAMA_SERVER", help="measure it too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    options = parser.parse_args(arguments)
    results = _measure(options.files, options.llama_cpp, options.rounds)
    _print_table(results)
    if options.json is not None:
        write_json({"conditions": basic_conditions(), "results": results}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
