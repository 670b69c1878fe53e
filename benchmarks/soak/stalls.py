"""Measures how long other clients wait while one client sends a very large request.

    python -m ostinato.benchmarks.soak.stalls
    python -m ostinato.benchmarks.soak.stalls --only 'chat' --json FILE scheduler.itl_target_ms=50
    python -m ostinato.benchmarks.soak.stalls model.path=DIRECTORY          # an embedding model

A real `run serve` answers a plain stream, polls of `/health` and ordinary requests of 12 kB during
each case of `stall_cases`. The table shows, for each case, its status, the longest gap between two
tokens of the stream, the longest time of an answer to `/health` and to an ordinary request, and the
memory of the API process afterwards. The first row is measured without a large request. With an
embedding model, short texts are embedded instead of a stream, and the gap is the longest time of
one of them.

The client of a case disconnects after 8 s, and the status of the case then ends with "left". Cases
that measure the writing of an answer are small enough to end earlier.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.soak.soak_server import SoakServer
from ostinato.benchmarks.soak.stall_cases import StallCase, generation_cases, pooling_cases

__all__ = ("measure_stalls",)

_POLL_S = 0.01  # seconds between two polls of /health
_ORDINARY_S = 0.2  # seconds between two ordinary requests
_IDLE_S = 6.0  # duration of the first row
_BEFORE_S, _AFTER_S = 0.3, 0.7  # measured before a case begins and after its end
_CASE_S = 8.0  # the client of a case disconnects after this time
_END_S = 30.0  # the longest wait until the server has dropped a request whose client has left
_ANSWER_S = 300.0  # the longest wait for the answer to another client
_TEXT = "A melody that is learned once can be repeated under everything. "
_OVERRIDES = ("server.port=0",)


@dataclass(slots=True)
class _Waits:
    """The waits of the other clients during one case, in seconds.

    A client chooses its list when a wait begins. So a wait that began before the case is not
    counted. Such a wait would include up to 0.15 s in which this process makes the requests of the
    case and holds its own interpreter lock.
    """

    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    ordinary: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Begin new lists."""
        self.gaps, self.health, self.ordinary = [], [], []


class _Others:
    """The clients beside the hostile one; `waits` collects their waits."""

    def __init__(self, url: str, *, generates: bool) -> None:
        self.waits = _Waits()
        self._url = url
        self._address = urlsplit(url)
        self._generates = generates
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> _Others:
        work = [self._poll(), self._ask()]
        work.append(self._stream() if self._generates else self._embed())
        self._tasks = [asyncio.create_task(one) for one in work]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """If an error has ended one of the clients, raise it."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self) -> None:
        """Read one stream after the other; the wait for the first token counts as a gap."""
        fields = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
        body = json.dumps({**fields, "temperature": 0.7, "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        while True:
            reader, writer = await asyncio.open_connection(
                self._address.hostname, self._address.port
            )
            writer.write(head.encode() + body)
            last, gaps = time.perf_counter(), self.waits.gaps
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last, gaps = now, self.waits.gaps
            writer.close()

    async def _embed(self) -> None:
        """Embed one short text after the other."""
        async with httpx.AsyncClient(base_url=self._url, timeout=_ANSWER_S) as client:
            for number in itertools.count():
                begin, gaps = time.perf_counter(), self.waits.gaps
                body = {"input": f"A melody that is learned {number} times."}
                response = await client.post("/v1/embeddings", json=body)
                gaps.append(time.perf_counter() - begin)
                response.raise_for_status()
                await asyncio.sleep(_POLL_S)

    async def _poll(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=_ANSWER_S) as client:
            while True:
                begin, health = time.perf_counter(), self.waits.health
                response = await client.get("/health")
                health.append(time.perf_counter() - begin)
                response.raise_for_status()
                await asyncio.sleep(_POLL_S)

    async def _ask(self) -> None:
        """Send ordinary requests, which are too long to be handled on the event loop."""
        body = {"prompt": _TEXT * (12_000 // len(_TEXT))}
        async with httpx.AsyncClient(base_url=self._url, timeout=_ANSWER_S) as client:
            while True:
                begin, ordinary = time.perf_counter(), self.waits.ordinary
                response = await client.post("/tokenize", json=body)
                ordinary.append(time.perf_counter() - begin)
                response.raise_for_status()
                await asyncio.sleep(_ORDINARY_S)


def _send(address: tuple[str, int], requests: Sequence[bytes], until: float) -> str:
    """Send requests, each on a new connection; returns the statuses of the answers.

    Runs in a thread; sending and receiving release the interpreter's lock.

    Args:
        address: the server's address.
        requests: sent one after the other.
        until: when the client leaves, by `time.perf_counter`.
    """
    statuses: dict[str, None] = {}
    for request in requests:
        data, status = b"", "closed"
        try:
            with suppress(ConnectionError), socket.create_connection(address) as connection:
                _set_limit(connection, until)
                with suppress(ConnectionError):
                    connection.sendall(request)
                while part := connection.recv(1 << 20):
                    data = data[-64:] + part if status != "closed" else data + part
                    if status == "closed" and (match := re.match(rb"HTTP/1.1 (\d+)", data)):
                        status = match[1].decode()
                    _set_limit(connection, until)
        except TimeoutError:
            statuses[status if status != "closed" else "left"] = None
            statuses["left"] = None
            break
        statuses[status] = None
    return ", ".join(statuses)


def _set_limit(connection: socket.socket, until: float) -> None:
    """Let the next operation end at `until`. Raises TimeoutError after that time."""
    left = until - time.perf_counter()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


async def _run_case(case: StallCase, url: str, others: _Others) -> dict[str, Any]:
    requests = await asyncio.to_thread(lambda: list(case.requests()))
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    others.waits.clear()
    await asyncio.sleep(_BEFORE_S)
    begin = time.perf_counter()
    statuses = await asyncio.gather(
        *(
            asyncio.to_thread(_send, address, requests, begin + _CASE_S)
            for _ in range(case.num_at_once)
        )
    )
    seconds = time.perf_counter() - begin
    await asyncio.sleep(_AFTER_S)
    if any("left" in status for status in statuses):
        await _wait_for_the_end(url)
    others.check()
    return {
        "case": case.name,
        "status": ", ".join(dict.fromkeys(statuses)),
        "seconds": round(seconds, 2),
        **_longest(others.waits),
    }


async def _wait_for_the_end(url: str) -> None:
    """Wait until the server has no request but those of the other clients.

    Raises:
        RuntimeError: the server still has another request after `_END_S`.
    """
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_S) as client:
        end = time.perf_counter() + _END_S
        while (await client.get("/load")).json()["server_load"] > 1:
            if time.perf_counter() > end:
                raise RuntimeError(
                    f"a client has left, but its request still runs {_END_S:g} s later"
                )
            await asyncio.sleep(_POLL_S)


def _longest(waits: _Waits) -> dict[str, float | None]:
    """The longest waits in milliseconds; None if nothing was measured."""
    return {
        name: round(1e3 * max(series), 1) if series else None
        for name, series in (
            ("gap_ms", waits.gaps),
            ("health_ms", waits.health),
            ("ordinary_ms", waits.ordinary),
        )
    }


async def _measure(url: str, server: SoakServer, only: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        probe = {"prompt": "Hi", "max_tokens": 1}
        generates = (await client.post("/v1/completions", json=probe)).status_code == 200
    cases = generation_cases(model["max_model_len"]) if generates else pooling_cases()
    cases = [case for case in cases if re.search(only, case.name)]
    rows = []
    async with _Others(url, generates=generates) as others:
        await asyncio.sleep(1.0)
        others.waits.clear()
        await asyncio.sleep(_IDLE_S)
        rows.append({"case": "idle", "status": "", "seconds": _IDLE_S, **_longest(others.waits)})
        rows[-1]["memory_mib"] = server.rss_mib()
        with Progress(
            TextColumn("{task.description:<50}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        ) as progress:
            task = progress.add_task("", total=len(cases))
            for case in cases:
                progress.update(task, description=case.name)
                rows.append(await _run_case(case, url, others))
                rows[-1]["memory_mib"] = server.rss_mib()
                progress.advance(task)
    return rows


def measure_stalls(overrides: Sequence[str] = (), only: str = "") -> dict[str, Any]:
    """Run all cases once.

    Args:
        overrides: overrides of the server's configuration.
        only: a regular expression; cases whose name does not match are left out.

    Returns:
        A record with a row for each case and the conditions.

    Raises:
        RuntimeError: the server did not start, or did not drop the request of a client that left.
    """
    server = SoakServer([*_OVERRIDES, *overrides])
    try:
        url = server.wait_until_ready()
        rows = asyncio.run(_measure(url, server, only))
        code = server.stop()
    finally:
        server.kill()
    return {
        "rows": rows,
        "exit_code": code,
        "conditions": {
            **basic_conditions(),
            "overrides": [*_OVERRIDES, *overrides],
        },
    }


def _print(record: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case")
    table.add_column("status")
    for name in ("answer s", "gap ms", "/health ms", "12 kB ms", "API MiB"):
        table.add_column(name, justify="right")
    for row in record["rows"]:
        table.add_row(
            row["case"],
            row["status"],
            f"{row['seconds']:.2f}",
            *(
                "" if row[name] is None else f"{row[name]:.0f}"
                for name in ("gap_ms", "health_ms", "ordinary_ms")
            ),
            f"{row['memory_mib']['api']:.0f}",
        )
    Console(width=110, highlight=False).print(table)


def main(arguments: list[str]) -> int:
    """Run the measurement and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("overrides", nargs="*", help="configuration of the server")
    options = parser.parse_args(arguments)
    record = measure_stalls(options.overrides, options.only)
    if options.json is not None:
        write_json(record, options.json)
    _print(record)
    return record["exit_code"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
