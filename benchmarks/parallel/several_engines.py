"""Measures several engines and several ranks: throughput, prefix hits, pauses after a crash.

    python -m ostinato.benchmarks.parallel.several_engines
    python -m ostinato.benchmarks.parallel.several_engines --parts throughput,death --json FILE
    python -m ostinato.benchmarks.parallel.several_engines --parts throughput,ranks \
        --model qwen3-0.6b --tokens 32

The engines are real processes with one thread for each rank. Only `ranks` also has an engine of one
rank with two threads. Requests go through `EngineClient`, without HTTP. The machine should have two
cores and no other work. An engine with one thread leaves a core to the client, all others share
their cores with it: `client_cores` is the client's processor time divided by the elapsed time. The
parts:

throughput  output tokens a second of one and of two engines, in turns, with as many requests in
            progress as two engines hold
ranks       output tokens a second of one process with two threads, of two ranks and of two stages,
            in turns, with 1, 8 and 32 requests in progress; and in the same rounds what equal
            halves of any work reach of shared work on these cores (`even_division`)
prefixes    share of prompt tokens found in the cache, for two routers: measured, simulated (with
            the same requests, cache sizes and router code), and ideal (each prefix is computed
            once)
death       the longest pause of any stream after SIGKILL of one of two engines
rank_death  the longest pause of any stream after SIGKILL of a rank of the only engine, for two
            ranks and for two stages, beside the time of a start
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.parallel.even_division import EvenDivision
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.tables import median_and_range
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.specs import planned_spec
from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.types.params import SamplingParams

__all__ = ("PARTS", "ideal_share", "longest_gap")

_BLOCK = 16  # tokens
_PREFIX = 16 * _BLOCK  # tokens that prompts share
_OWN = 32  # tokens of each prompt after its prefix
_OUTPUT = 8  # tokens of the answers to prompts with a prefix
_DIVISION_S = 1.0  # time of `even_division` in each round
_STREAMS = 32  # requests that an engine holds
_COUNTS = (1, 8, 32)  # requests in progress for `ranks`
# Settings of engines that have two cores each.
_DIVISIONS = {
    "one process": (),
    "two ranks": ("parallel.tensor=2",),
    "two stages": ("parallel.pipeline=2",),
}
_SIMULATED_DEVICE = "l4"  # any device: its speed does not change the hits


def _config(model: str, num_engines: int, *overrides: str) -> RunConfig:
    return load_config(
        [
            f"model={model}",
            "device.name=cpu",
            "device.threads=1",
            "model.load_format=dummy",
            "model.max_model_len=512",
            f"cache.block_size={_BLOCK}",
            f"scheduler.max_num_seqs={_STREAMS}",
            f"parallel.data={num_engines}",
            *overrides,
        ]
    )


@asynccontextmanager
async def _started(config: RunConfig) -> AsyncIterator[EngineClient]:
    client = EngineClient(config)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


class Asked(NamedTuple):
    """What the command line asks for."""

    model: str  # a preset
    rounds: int
    tokens: int  # output tokens of a request of `throughput` and `ranks`


class Answer(NamedTuple):
    """One request that has ended."""

    num_output: int  # tokens
    num_cached: int  # prompt tokens that were found in the cache


async def _answer(
    client: EngineClient,
    prompt: list[int],
    max_tokens: int,
    on_token: Callable[[], None] = lambda: None,
) -> Answer:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    num_output = num_cached = 0
    async for output in client.generate("bench", prompt, sampling):
        on_token()
        num_output, num_cached = output.num_output_tokens, output.num_cached_tokens
    return Answer(num_output, num_cached)


def _random_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(2, 900) for _ in range(length)]


async def throughput(asked: Asked) -> dict[str, Any]:
    """Output tokens a second of one and of two engines, measured in turns."""
    async with (
        _started(_config(asked.model, 1)) as single,
        _started(_config(asked.model, 2)) as double,
    ):
        clients = {"1": single, "2": double}
        return await _in_turns(clients, 2 * _STREAMS, asked)


async def ranks(asked: Asked) -> dict[str, Any]:
    """By the number of requests: output tokens a second of an engine with two cores, in turns.

    The engine is one process, two ranks or two stages.
    """
    async with AsyncExitStack() as stack:
        cores = stack.enter_context(EvenDivision())
        clients = {
            name: await stack.enter_async_context(
                _started(_config(asked.model, 1, "device.threads=2", *overrides))
            )
            for name, overrides in _DIVISIONS.items()
        }
        return {str(count): await _in_turns(clients, count, asked, cores) for count in _COUNTS}


async def _in_turns(
    clients: dict[str, EngineClient],
    streams: int,
    asked: Asked,
    division: EvenDivision | None = None,
) -> dict[str, Any]:
    """Measures each client once in each round, after a round that does not count.

    Args:
        clients: by a name that the result uses.
        streams: requests in progress.
        asked: its `rounds` count.
        division: measured at the end of each round; None = not measured.

    Returns:
        By name, a list with one value for each round: `tokens_per_s`, `client_cores` (processor
        time of this process divided by time), and `ratio`, the tokens per second divided by those
        of the first client in the same round. `ratio` has no entry for the first client.
        `even_division` has one value for each round, or none.
    """
    draw = random.Random(1)
    rates: dict[str, list[float]] = {name: [] for name in clients}
    cores: dict[str, list[float]] = {name: [] for name in clients}
    limits: list[float] = []
    for number in range(1 + asked.rounds):  # the first round maps memory
        for name, client in clients.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            num_output = await _output_tokens(client, draw, streams, asked.tokens)
            elapsed = time.perf_counter() - begin
            if number:
                rates[name].append(num_output / elapsed)
                cores[name].append((time.process_time() - begin_cpu) / elapsed)
        if number and division is not None:
            limits.append(division.measure(_DIVISION_S))
    first, *others = clients
    ratios = {
        name: [rate / base for rate, base in zip(rates[name], rates[first], strict=True)]
        for name in others
    }
    return {
        "tokens_per_s": rates,
        "client_cores": cores,
        "ratio": ratios,
        "even_division": limits,
    }


async def _output_tokens(
    client: EngineClient, draw: random.Random, streams: int, tokens: int
) -> int:
    """Answers two requests for each stream; returns the number of their output tokens."""
    prompts = [_random_prompt(draw, _OWN) for _ in range(2 * streams)]
    room = asyncio.Semaphore(streams)

    async def one(prompt: list[int]) -> int:
        async with room:
            return (await _answer(client, prompt, tokens)).num_output

    return sum(await asyncio.gather(*map(one, prompts)))


def ideal_share(prompts: Sequence[Sequence[int]]) -> float:
    """The share of prompt tokens that are found if every block of a prefix is computed once."""
    seen: set[tuple[int, ...]] = set()
    found = 0
    for prompt in prompts:
        prefix = tuple(prompt[:_PREFIX])
        found += _PREFIX if prefix in seen else 0
        seen.add(prefix)
    return found / sum(map(len, prompts))


async def prefixes(asked: Asked) -> dict[str, Any]:
    """Shares of prompt tokens found in the caches. No cache is large enough for all prefixes."""
    found: dict[str, Any] = {}
    prompts: list[list[int]] = []
    for router in ("least_load", "prefix_aware"):
        config = _config(asked.model, 2, f"parallel.router={router}", "cache.memory_gib=0.03")
        async with _started(config) as client:
            if not prompts:
                blocks = client.replicas[0].stats.num_blocks - _STREAMS * (_OWN + _OUTPUT) // _BLOCK
                draw, number = random.Random(2), max(2, int(1.3 * blocks * _BLOCK / _PREFIX))
                known = [_random_prompt(draw, _PREFIX) for _ in range(number)]
                prompts = [
                    draw.choice(known) + _random_prompt(draw, _OWN)
                    for _ in range(10 * asked.rounds * number)
                ]
            room = asyncio.Semaphore(_STREAMS // 2)

            async def one(
                prompt: list[int],
                client: EngineClient = client,
                room: asyncio.Semaphore = room,
            ) -> int:
                async with room:
                    return (await _answer(client, prompt, _OUTPUT)).num_cached

            cached = sum(await asyncio.gather(*map(one, prompts)))
        requests = [JobRequest(prompt=prompt, max_tokens=_OUTPUT) for prompt in prompts]
        job = LoadJob(url="", model="", requests=requests, concurrency=_STREAMS // 2)
        spec = planned_spec(config, None, _SIMULATED_DEVICE)
        simulated = simulate_job(spec, job, num_replicas=2, router=router)
        total = sum(map(len, prompts))
        found[router] = {"live": cached / total, "simulated": sum(simulated.num_cached) / total}
    return {"ideal": ideal_share(prompts), "prompts": len(prompts), "share": found}


def longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """The longest pause between two consecutive tokens, in seconds.

    Only pauses that overlap the time from `begin` to `end` count.
    """
    gaps = [
        after - before
        for before, after in itertools.pairwise(times)
        if after > begin and before < end
    ]
    return max(gaps, default=0.0)


async def death(asked: Asked) -> dict[str, Any]:
    """The longest pause of any stream after SIGKILL of one of two engines.

    Only pauses that overlap the two seconds after the signal count.
    """
    config = _config(asked.model, 2, "server.max_restarts=1000", "server.restart_backoff_s=0")
    async with _started(config) as client:

        def victim() -> int:
            assert len(client.replicas[0].requests), "the router left an engine without work"
            assert client.replicas[0].pid is not None, "it serves"
            return client.replicas[0].pid

        gaps = [await _gap_after_kill(client, victim, 2.0) for _ in range(asked.rounds)]
    return {"longest_gap_s": gaps, "median_s": statistics.median(gaps)}


async def rank_death(asked: Asked) -> dict[str, Any]:
    """The longest pause of any stream after SIGKILL of the last rank of the only engine.

    `start_s` has the seconds of complete starts of the engine that load the compiled programs from
    the bundle.
    """
    found: dict[str, Any] = {}
    for name, overrides in _DIVISIONS.items():
        if not overrides:
            continue
        settings = (*overrides, "server.max_restarts=1000", "server.restart_backoff_s=0")
        config = _config(asked.model, 1, "device.threads=2", *settings)
        starts: list[float] = []
        for _ in range(1 + asked.rounds):  # the first one may compile
            begin = time.perf_counter()
            async with _started(config):
                starts.append(time.perf_counter() - begin)
        async with _started(config) as client:

            def victim(client: EngineClient = client) -> int:
                return client.replicas[0].status.ranks[-1].pid

            gaps = [await _gap_after_kill(client, victim, math.inf) for _ in range(asked.rounds)]
        found[name] = {
            "longest_gap_s": gaps,
            "median_s": statistics.median(gaps),
            "start_s": starts[1:],
            "median_start_s": statistics.median(starts[1:]),
        }
    return found


async def _gap_after_kill(
    client: EngineClient, victim: Callable[[], int], within_s: float
) -> float:
    """The longest pause of any of eight streams, after SIGKILL of a process.

    Args:
        client: its engines have no other requests. When this returns, they serve again.
        victim: returns the id of the process; called when every stream has a token.
        within_s: pauses that begin later do not count.
    """
    draw = random.Random(3)
    times: list[list[float]] = [[] for _ in range(8)]

    def note(stream: list[float]) -> None:
        stream.append(time.perf_counter())

    streams = [
        asyncio.create_task(_answer(client, _random_prompt(draw, _OWN), 400, partial(note, stream)))
        for stream in times
    ]
    while not all(times):
        await asyncio.sleep(0.001)
    killed = time.perf_counter()
    os.kill(victim(), signal.SIGKILL)
    await asyncio.gather(*streams)
    while not all(one.is_alive for one in client.replicas):
        await asyncio.sleep(0.01)
    return max(longest_gap(stream, killed, killed + within_s) for stream in times)


PARTS = {
    "throughput": throughput,
    "ranks": ranks,
    "prefixes": prefixes,
    "death": death,
    "rank_death": rank_death,
}


def _rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, figure, goal) for the table."""
    rows: list[tuple[str, str, str]] = []
    if found := results.get("throughput"):
        for count, rates in found["tokens_per_s"].items():
            cores = statistics.median(found["client_cores"][count])
            rows.append(
                (
                    f"{count} engine(s), tokens/s (client: {cores:.2f} cores)",
                    f"{statistics.median(rates):.0f}",
                    "",
                )
            )
        rows.append(("two engines over one", median_and_range(found["ratio"]["2"]), "1.8"))
    for count, found in results.get("ranks", {}).items():
        for name, ratios in found["ratio"].items():
            goal = "0.90" if name == "two ranks" else ""
            what = f"{name} over two threads, {count} requests"
            rows.append((what, median_and_range(ratios), goal))
        limits = median_and_range(found["even_division"])
        rows.append((f"equal halves over shared work, {count} requests", limits, ""))
    if found := results.get("prefixes"):
        rows.append(("prefix hits, ideal", f"{found['ideal']:.1%}", ""))
        for router, share in found["share"].items():
            goal = f"{0.9 * found['ideal']:.1%}" if router == "prefix_aware" else ""
            rows += [(f"{router}, {how}", f"{share[how]:.1%}", goal) for how in share]
    if found := results.get("death"):
        rows.append(("pause after SIGKILL of an engine", f"{found['median_s']:.2f} s", "0.50 s"))
    for name, one in results.get("rank_death", {}).items():
        goal = f"{one['median_start_s'] + 1:.2f} s"
        rows.append((f"pause after SIGKILL, {name}", f"{one['median_s']:.2f} s", goal))
        rows.append((f"start of {name}", f"{one['median_start_s']:.2f} s", ""))
    return rows


def main() -> int:
    """Measure the parts that the command line names, and print a table.

    The results are also written to a file if `--json` names one.
    """
    parser = argparse.ArgumentParser(description="Measures several engines, and several ranks.")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated parts to measure")
    parser.add_argument("--model", default="demo", help="a preset; its weights are random")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, default=96, help="output tokens of a request of throughput and ranks"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    asked = Asked(arguments.model, arguments.rounds, arguments.tokens)
    results: dict[str, Any] = {}
    for part in arguments.parts.split(","):
        print(f"{part} ...", file=sys.stderr)
        results[part] = asyncio.run(PARTS[part](asked))
    table = Table("measured", "figure", "goal", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in _rows(results):
        table.add_row(*row)
    Console(width=80, highlight=False).print(table)
    if arguments.json is not None:
        conditions = {
            **basic_conditions(),
            "load_average": os.getloadavg()[1],
            **asked._asdict(),
        }
        write_json({"conditions": conditions, **results}, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
