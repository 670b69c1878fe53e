"""Measures the first token after a restart, with and without the KV blocks of the run before.

    python -m ostinato.benchmarks.peers.servers.prefix_restart --model DIR \\
        --llama-cpp SERVER=FILE.gguf

In each round each server is started, computes a prompt, is ended with SIGTERM, is started again and
gets the same prompt. Each start gets a warm-up request first. `run serve` uses `cache.disk_dir`, in
a directory that each round begins anew. llama.cpp's server is told to save its slot before the end
(`POST /slots/0?action=save`) and to restore it after the start; the seconds of restoring count.
`computed` is the first prompt of each server. Prompts are random tokens. The page cache has the
files, as after a restart of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.peers.servers.started_server import (
    first_token_s,
    post_json,
    started_server,
)
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.tables import median_and_range

__all__ = ("Restart", "measure")

_SLOT = {"filename": "slot.bin"}


class Restart(NamedTuple):
    """The seconds of one server in one round."""

    engine: str
    num_tokens: int
    computed_s: float  # first token of the prompt before the restart
    kept_s: float  # first token of the same prompt after the restart, restoring included
    ready_s: float  # start of the process until it is ready, with the files of the run before
    other_cpu: float


def measure(
    model: Path, llama: str, gguf: str, lengths: Sequence[int], rounds: int
) -> list[Restart]:
    """Run all servers in turns.

    Args:
        model: the directory of the model.
        llama: llama.cpp's server; empty = only `run serve`.
        gguf: the model as a GGUF file.
        lengths: tokens of the prompts.
        rounds: how often each is measured.
    """
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    numbers = random.Random(0)
    results: list[Restart] = []
    for number in range(rounds):
        for length in lengths:
            prompt = [numbers.randrange(3, vocab_size) for _ in range(length)]
            for engine in ("ostinato", "llama.cpp") if llama else ("ostinato",):
                load = LoadMeter()
                with tempfile.TemporaryDirectory() as folder:
                    if engine == "ostinato":
                        times = _ours(model, folder, prompt)
                    else:
                        times = _theirs(llama, gguf, folder, prompt)
                results.append(Restart(engine, length, *times, load.stop()))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return results


def _ours(model: Path, folder: str, prompt: list[int]) -> tuple[float, float, float]:
    run = str(Path(sys.executable).with_name("run"))
    words = [run, "serve", f"model.path={model}", "server.port=PORT", "speculation.method=none"]
    words += [f"cache.disk_dir={folder}", f"model.max_model_len={len(prompt) + 32}"]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    warm = {**body, "prompt": prompt[::-1]}
    with started_server(words) as server:
        # The digest of the weights is being computed during the first start.
        first_token_s(server.port, "/v1/completions", warm)
        computed_s = first_token_s(server.port, "/v1/completions", body)
    with started_server(words) as server:
        first_token_s(server.port, "/v1/completions", warm)
        kept_s = first_token_s(server.port, "/v1/completions", body)
        return computed_s, kept_s, server.ready_s


def _theirs(llama: str, gguf: str, folder: str, prompt: list[int]) -> tuple[float, float, float]:
    threads = str(os.cpu_count())
    words = [llama, "-m", gguf, "--port", "PORT", "-t", threads, "-tb", threads, "-np", "1"]
    words += ["-c", str(len(prompt) + 32), "--slot-save-path", folder]
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "cache_prompt": True}
    warm = {**body, "prompt": prompt[::-1]}
    with started_server(words) as server:
        first_token_s(server.port, "/completion", warm)
        computed_s = first_token_s(server.port, "/completion", body)
        post_json(server.port, "/slots/0?action=save", _SLOT)
    with started_server(words) as server:
        first_token_s(server.port, "/completion", warm)
        begin = time.perf_counter()
        post_json(server.port, "/slots/0?action=restore", _SLOT)
        restore_s = time.perf_counter() - begin
        kept_s = restore_s + first_token_s(server.port, "/completion", body)
        return computed_s, kept_s, server.ready_s


def main(arguments: list[str]) -> int:
    """Measure what the command line names; see --help. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ostinato.benchmarks.peers.servers.prefix_restart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--llama-cpp", default="", metavar="SERVER=FILE.gguf")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    options = parser.parse_args(arguments)
    llama, _, gguf = options.llama_cpp.partition("=")
    results = measure(options.model, llama, gguf, options.tokens, options.rounds)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("tokens", "engine", "computed, ms", "after a restart, ms", "ratio", "ready, s"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for length in options.tokens:
        for engine in dict.fromkeys(one.engine for one in results):
            own = [one for one in results if (one.engine, one.num_tokens) == (engine, length)]
            table.add_row(
                str(length),
                engine,
                median_and_range([1e3 * one.computed_s for one in own]),
                median_and_range([1e3 * one.kept_s for one in own]),
                median_and_range([one.computed_s / one.kept_s for one in own]),
                median_and_range([one.ready_s for one in own]),
            )
    Console(highlight=False, width=100).print(table)
    if options.json is not None:
        conditions: dict[str, Any] = basic_conditions() | {"model": options.model.name}
        records = [one._asdict() for one in results]
        write_json({"conditions": conditions, "results": records}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
