"""Compares requests with low-rank adapters in `run serve` and in llama.cpp's server, in turns.

    python -m ostinato.benchmarks.peers.servers.adapter_rates --model DIR \\
        --llama-cpp SERVER=FILE.gguf --convert PYTHON=convert_lora_to_gguf.py

The adapters have random numbers, rank 16, and adapt all matrices of attention and MLPs. `--convert`
names llama.cpp's script that converts them, and an interpreter that has its packages. Both servers
run all the time. The requests of a case are sent at once, and the rate counts their output tokens
until the last answer. Prompts have 16 random tokens. Drafts are off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.peers.servers.started_server import post_json, started_server
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.tables import median_and_range
from ostinato.benchmarks.workload.random_adapter import write_random_adapter

__all__ = ("CASES", "Case", "measure")

_NUM_ADAPTERS = 4
_PROMPT, _OUTPUT, _RANK = 16, 48, 16


class Case(NamedTuple):
    """Requests that are sent at once, each with the number of its adapter; -1 = none."""

    name: str
    adapters: tuple[int, ...]


CASES = (
    Case("1 request, no adapter", (-1,)),
    Case("1 request, an adapter", (0,)),
    Case("8 requests, no adapter", (-1,) * 8),
    Case("8 requests, one adapter", (0,) * 8),
    Case("8 requests, 4 adapters", tuple(index % _NUM_ADAPTERS for index in range(8))),
)


class _Server(NamedTuple):
    name: str
    port: int
    path: str  # of the endpoint

    def body(self, prompt: list[int], adapter: int) -> dict[str, Any]:
        if self.name == "ostinato":
            chosen = {} if adapter < 0 else {"model": f"adapter-{adapter}"}
            return {"prompt": prompt, "max_tokens": _OUTPUT, "temperature": 0} | chosen
        chosen = {} if adapter < 0 else {"lora": [{"id": adapter, "scale": 1.0}]}
        return {"prompt": prompt, "n_predict": _OUTPUT, "temperature": 0} | chosen

    def complete(self, prompt: list[int], adapter: int) -> str:
        """Generate `_OUTPUT` tokens; returns their text."""
        body = self.body(prompt, adapter) | {"ignore_eos": True, "stream": False}
        content = post_json(self.port, self.path, body)
        is_ours = self.name == "ostinato"
        count = content["usage"]["completion_tokens"] if is_ours else content["tokens_predicted"]
        if count != _OUTPUT:
            raise RuntimeError(f"{self.name} gave {count} tokens instead of {_OUTPUT}")
        return content["choices"][0]["text"] if is_ours else content["content"]


def measure(
    model: Path, llama: str, gguf: str, convert: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Output tokens per second of each case in each server.

    Args:
        model: the directory of a Llama-like model in bfloat16.
        llama: llama.cpp's server.
        gguf: the model as a GGUF file.
        convert: the command that converts adapters.
        rounds: how often each case is measured.
    """
    threads = str(os.cpu_count())
    config = json.loads((model / "config.json").read_text())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = [
            write_random_adapter(folder / str(seed), config, seed=seed, rank=_RANK, size=0.1)
            for seed in range(_NUM_ADAPTERS)
        ]
        files = [str(path / "adapter.gguf") for path in paths]
        for path, file in zip(paths, files, strict=True):
            words = [*convert, str(path), "--base", str(model), "--outfile", file]
            subprocess.run([*words, "--outtype", "bf16"], check=True, capture_output=True)
        given = ",".join(f"adapter-{index}:{path}" for index, path in enumerate(paths))
        run = str(Path(sys.executable).with_name("run"))
        ours = ["serve", f"model.path={model}", "server.port=PORT", f"lora.adapters={{{given}}}"]
        theirs = ["-m", gguf, "--port", "PORT", "-t", threads, "-tb", threads, "-np", "8"]
        theirs += ["-c", str(8 * 128), "--lora", ",".join(files), "--lora-init-without-apply"]
        servers = [
            _Server(name, stack.enter_context(started_server(command)).port, path)
            for name, path, command in (
                ("ostinato", "/v1/completions", [run, *ours, "speculation.method=none"]),
                ("llama.cpp", "/completion", [llama, *theirs]),
            )
        ]
        for server in servers:
            prompt = list(range(300, 300 + _PROMPT))
            if server.complete(prompt, 0) == server.complete(prompt, -1):
                raise RuntimeError(f"an adapter changes no answer of {server.name}")
        return _rates(servers, config["vocab_size"], rounds)


def _rates(servers: Sequence[_Server], vocab_size: int, rounds: int) -> list[dict[str, Any]]:
    numbers, results = random.Random(0), []
    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            for case in CASES:
                prompts = [
                    [numbers.randrange(3, vocab_size) for _ in range(_PROMPT)]
                    for _ in case.adapters
                ]
                for server in servers if number % 2 else reversed(servers):
                    load, begin = LoadMeter(), time.perf_counter()
                    list(pool.map(server.complete, prompts, case.adapters))
                    seconds = time.perf_counter() - begin
                    results.append(
                        {
                            "case": case.name,
                            "engine": server.name,
                            "tokens_per_s": len(prompts) * _OUTPUT / seconds,
                            "other_cpu": load.stop(),
                        }
                    )
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return results


def main(arguments: list[str]) -> int:
    """Measure what the command line names; see --help. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ostinato.benchmarks.peers.servers.adapter_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--llama-cpp", required=True, metavar="SERVER=FILE.gguf")
    parser.add_argument("--convert", required=True, metavar="PYTHON=SCRIPT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    options = parser.parse_args(arguments)
    llama, _, gguf = options.llama_cpp.partition("=")
    convert = options.convert.split("=", 1)
    results = measure(options.model, llama, gguf, convert, options.rounds)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("output tokens/s", "ostinato", "llama.cpp", "ratio"):
        table.add_column(heading, justify="left" if heading[:6] == "output" else "right")
    for case in CASES:
        ours, theirs = (
            [
                each["tokens_per_s"]
                for each in results
                if (each["case"], each["engine"]) == (case.name, name)
            ]
            for name in ("ostinato", "llama.cpp")
        )
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        table.add_row(case.name, *map(median_and_range, (ours, theirs, ratios)))
    Console(highlight=False, width=100).print(table)
    if options.json is not None:
        conditions = basic_conditions() | {"model": options.model.name, "rank": _RANK}
        write_json({"conditions": conditions, "results": results}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
