"""Measures the demo model with its EAGLE-3 head: one process with two threads, and two ranks.

    python -m ostinato.benchmarks.parallel.head_on_ranks
    python -m ostinato.benchmarks.parallel.head_on_ranks --rounds 5 --json FILE

Both also run without drafts. The four engines are processes that answer held-out questions of the
demo model greedily, in turns, with 1 and with 8 requests in progress. All drafts of 3 tokens are
verified (`speculation.adaptive=false`). The machine should have two cores and no other work.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.compose import load_config
from ostinato.models.demo.training.held_out import questions
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.types.params import SamplingParams

__all__ = ("measure",)

_HEAD = Path(__file__).parents[2] / "models" / "demo" / "eagle3"
_DIVISIONS = {"one process": (), "two ranks": ("parallel.tensor=2",)}
_DRAFTS = {
    "plain": ("speculation.method=none",),
    "head": (
        "speculation.method=eagle3",
        f"speculation.model={_HEAD}",
        "speculation.max_tokens=3",
        "speculation.adaptive=false",
    ),
}
_COUNTS = (1, 8)  # requests in progress
_TOKENS = 64  # tokens of an answer, at most
_SETTLE_S = 0.2  # until the last statistics have arrived


class Round(NamedTuple):
    """One engine's answers to all questions of a round."""

    answers: list[list[int]]  # the token ids
    tokens_per_s: float
    tokens_per_draft: float  # tokens of a sequence in a step with a draft; 0 = no drafts
    drafting_share: float  # seconds of drafting / all seconds


async def _round(client: EngineClient, prompts: list[list[int]], streams: int) -> Round:
    room = asyncio.Semaphore(streams)
    sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS)

    async def one(prompt: list[int]) -> list[int]:
        found: list[int] = []
        async with room:
            async for output in client.generate("bench", prompt, sampling):
                found += output.new_token_ids
        return found

    before = client.replicas[0].stats.speculation
    begin = time.perf_counter()
    answers = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - begin
    await asyncio.sleep(_SETTLE_S)
    after = client.replicas[0].stats.speculation
    rate = sum(map(len, answers)) / seconds
    if before is None or after is None or after.num_drafts == before.num_drafts:
        return Round(list(answers), rate, 0.0, 0.0)
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    drafting = after.drafting_seconds - before.drafting_seconds
    per_draft = 1 + accepted / (after.num_drafts - before.num_drafts)
    return Round(list(answers), rate, per_draft, drafting / seconds)


async def measure(rounds: int) -> dict[str, Any]:
    """Figures by engine and number of requests in progress. All engines must give equal answers."""
    found: dict[str, dict[str, list[Round]]] = {}
    answers: dict[tuple[int, int], list[list[int]]] = {}
    async with AsyncExitStack() as stack:
        clients: dict[str, EngineClient] = {}
        for (division, words), (drafts, more) in itertools.product(
            _DIVISIONS.items(), _DRAFTS.items()
        ):
            config = load_config(["device.name=cpu", "device.threads=2", *words, *more])
            client = EngineClient(config)
            stack.push_async_callback(client.close)
            await client.start()
            clients[f"{division}, {drafts}"] = client
        tokenizer = next(iter(clients.values())).tokenizer
        assert tokenizer is not None, "the demo model has a tokenizer"
        texts = [questions(12, number) for number in range(1 + rounds)]
        for number, streams in itertools.product(range(1 + rounds), _COUNTS):
            prompts = [tokenizer.encode(text) for text in texts[number]]
            for name, client in clients.items():
                one = await _round(client, prompts, streams)
                assert answers.setdefault((number, streams), one.answers) == one.answers, name
                if number:  # the first round maps memory
                    found.setdefault(name, {}).setdefault(str(streams), []).append(one)
    return {
        name: {
            count: {
                "tokens_per_s": statistics.median(one.tokens_per_s for one in series),
                "all_tokens_per_s": [one.tokens_per_s for one in series],
                "tokens_per_draft": statistics.median(one.tokens_per_draft for one in series),
                "drafting_share": statistics.median(one.drafting_share for one in series),
            }
            for count, series in by_count.items()
        }
        for name, by_count in found.items()
    }


def main(arguments: list[str]) -> int:
    """Measure and print a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the record")
    given = parser.parse_args(arguments)
    results = asyncio.run(measure(given.rounds))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("engine", "requests", "tokens/s", "tokens a step with a draft", "drafting share"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for name, by_count in results.items():
        for count, one in by_count.items():
            figures = (one["tokens_per_s"], one["tokens_per_draft"], one["drafting_share"])
            table.add_row(name, count, *(f"{figure:.2f}" for figure in figures))
    Console(width=100, highlight=False).print(table)
    if given.json is not None:
        record = {
            **basic_conditions(),
            "rounds": given.rounds,
            "num_cpus": os.cpu_count(),
            "load_of_the_machine": [round(one, 1) for one in os.getloadavg()],
            "results": results,
        }
        write_json(record, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
