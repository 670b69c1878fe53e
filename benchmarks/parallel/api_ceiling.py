"""Measures the API process: how many tokens per second it can send to clients with one core.

    python -m ostinato.benchmarks.parallel.api_ceiling
    python -m ostinato.benchmarks.parallel.api_ceiling --engines 8 --streams 256 --json FILE

The server is real: HTTP, detokenisation, server-sent events, a router. Its engines are processes
without a model, which send a token for each request every 20 ms (fake_engine.py). Tokens are
divided by the processor time of the API process, so that other work on the machine, this client
included, changes the result little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.report.json_file import write_json

__all__ = ("stream",)

_TOKENS = 200  # tokens of a stream
_ENDED = b"data: [DONE]"


def _serve(num_engines: int) -> int:
    """Run the server in this process, with fake engines."""
    from ostinato.api.server.server import serve
    from ostinato.conf.compose import load_config
    from ostinato.runtime.process import engine_child

    engine_child.ENGINE_MODULE = "ostinato.benchmarks.parallel.fake_engine"
    overrides = ["device.name=cpu", "server.port=0", "server.log_level=warning"]
    return serve(load_config([*overrides, f"parallel.data={num_engines}"]))


async def stream(host: str, port: int, number: int) -> int:
    """Ask for one stream and read it to its end; returns the number of its events.

    Raises:
        RuntimeError: the stream ended early.
    """
    body = json.dumps(
        {"prompt": f"Once {number}", "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    data = await reader.read()
    writer.close()
    if _ENDED not in data:
        raise RuntimeError(f"a stream broke off: {data[-300:]!r}")
    return data.count(b"data: {")


async def _measure(url: str, num_streams: int, rounds: int, pid: int) -> list[float]:
    """Tokens for each second of processor time of the API process, one figure for each round."""
    address, process = urlsplit(url), psutil.Process(pid)
    host, port = address.hostname or "", address.port or 0
    rates: list[float] = []
    for _ in range(rounds + 1):
        before = sum(process.cpu_times()[:2])
        await asyncio.gather(*(stream(host, port, number) for number in range(num_streams)))
        rates.append(num_streams * _TOKENS / (sum(process.cpu_times()[:2]) - before))
    return rates[1:]  # the first round imports and compiles


def main() -> int:
    """Start the server, measure, and print or write the result."""
    parser = argparse.ArgumentParser(description="The rate at which the API process sends tokens.")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--serve", action="store_true", help="run the server, not the clients")
    arguments = parser.parse_args()
    if arguments.serve:
        return _serve(arguments.engines)
    command = [sys.executable, "-m", "ostinato.benchmarks.parallel.api_ceiling", "--serve"]
    server = subprocess.Popen(
        [*command, "--engines", str(arguments.engines)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None, "stdout=PIPE"
        lines: list[str] = []
        while not any("ready after" in line for line in lines):
            line = server.stdout.readline()
            if not line:
                raise RuntimeError(f"the server did not start: {''.join(lines)}")
            lines.append(line)
        url = next(line for line in lines if "answers 503 until" in line).split()[2]
        measuring = _measure(url, arguments.streams, arguments.rounds, server.pid)
        rates = asyncio.run(measuring)
    finally:
        server.terminate()
        server.wait(60)
    median = statistics.median(rates)
    print(
        f"{median:,.0f} tokens a second of one core of the API process ({arguments.engines} "
        f"engines, {arguments.streams} streams; rounds {min(rates):,.0f} to {max(rates):,.0f})"
    )
    if arguments.json is not None:
        results: dict[str, Any] = {
            "conditions": {
                **basic_conditions(),
                "load_average": os.getloadavg()[1],
                "engines": arguments.engines,
                "streams": arguments.streams,
            },
            "tokens_per_cpu_second": rates,
            "median": median,
        }
        write_json(results, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
