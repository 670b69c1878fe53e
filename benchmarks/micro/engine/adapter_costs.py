"""Measures what low-rank adapters cost: decode steps and first tokens with and without them.

    python -m ostinato.benchmarks.micro.engine.adapter_costs \\
        model=qwen3-0.6b model.load_format=dummy

One engine has room for adapters and one has none. In each round all cases are measured, in a
changing order. Every adapter has random numbers and adapts all matrices of attention and MLPs.
Drafts are off. The ratio divides the seconds of the case by those of the engine without room.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.statistics import bootstrap_ratio
from ostinato.benchmarks.workload.random_adapter import write_random_adapter
from ostinato.conf.compose import load_config
from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.startup.plan.model_source import open_model
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

__all__ = ("CASES", "Case", "measure")

_STEPS = 24  # decode steps of a measurement
_SHORT, _LONG = 16, 512  # tokens of prompts


class Case(NamedTuple):
    """Sequences that run at once, and the slots of their adapters."""

    name: str
    slots: tuple[int, ...]  # -1 = the base model
    has_room: bool = True  # whether the engine has room for adapters


CASES = [
    Case("1 sequence, no room", (-1,), has_room=False),
    Case("1 sequence, base", (-1,)),
    Case("1 sequence, adapter", (0,)),
    Case("8 sequences, no room", (-1,) * 8, has_room=False),
    Case("8 sequences, base", (-1,) * 8),
    Case("8 sequences, one adapter", (0,) * 8),
    Case("8 sequences, 8 adapters", tuple(range(8))),
]


def measure(overrides: Sequence[str], *, rank: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a decode step and of the first token after a long prompt, for each case.

    Args:
        overrides: settings of both engines.
        rank: of the adapters.
        rounds: how often each case is measured.
    """
    own = [*overrides, "speculation.method=none", "scheduler.max_num_seqs=8"]
    own.append(f"model.max_model_len={_LONG + 2 * _STEPS}")
    room = ["lora.max_adapters=8", f"lora.max_rank={rank}"]
    engines = {
        has: build_engine(load_config([*own, *(room if has else [])])) for has in (False, True)
    }
    digests = _load_adapters(engines[True], [*own, *room], rank)
    found: dict[str, dict[str, list[float]]] = {
        case.name: {"decode_s": [], "first_token_s": []} for case in CASES
    }
    numbers = random.Random(0)
    meter = LoadMeter().start()
    for number in range(rounds + 1):
        for turn in range(len(CASES)):
            case = CASES[(number + turn) % len(CASES)]
            decode_s, first_s = _run(engines[case.has_room], case, digests, numbers)
            if number:  # the first round warms up
                found[case.name]["decode_s"].append(decode_s)
                found[case.name]["first_token_s"].append(first_s)
        print(f"round {number} of {rounds}", file=sys.stderr)
    others = meter.stop()
    results = []
    for case in CASES:
        without = next(c for c in CASES if len(c.slots) == len(case.slots) and not c.has_room)
        result: dict[str, Any] = {"case": case.name, **found[case.name]}
        for key, seconds in found[case.name].items():
            ratio, interval = bootstrap_ratio(seconds, found[without.name][key])
            result[f"{key}_ratio"], result[f"{key}_interval"] = ratio, list(interval)
        results.append(result | {"other_programs": round(others, 3)})
    for engine in engines.values():
        engine.close()
    return results


def _load_adapters(engine: Engine, overrides: Sequence[str], rank: int) -> list[str]:
    """Fill eight slots; returns the digests."""
    config = load_config(list(overrides))
    hf_config = open_model(config).checkpoint.hf_config
    digests: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for slot in range(8):
            path = write_random_adapter(Path(folder, str(slot)), hf_config, seed=slot, rank=rank)
            digests.append(adapter_digest(path))
            engine.begin_adapter(slot, str(path), digests[-1])
        while engine.has_work:
            engine.step()
    failed = [failure for _, failure in engine.take_adapters() if failure]
    if failed:
        raise ValueError(failed[0])
    return digests


def _run(
    engine: Engine, case: Case, digests: Sequence[str], numbers: random.Random
) -> tuple[float, float]:
    """Mean seconds of a decode step, and seconds of the first token after a long prompt."""
    _add(engine, case, digests, numbers, _SHORT)
    waiting = set(range(len(case.slots)))
    while waiting:
        waiting -= {int(output.request_id) for output in engine.step()}
    begin = time.perf_counter()
    for _ in range(_STEPS):
        engine.step()
    decode_s = (time.perf_counter() - begin) / _STEPS
    engine.abort_all()
    while engine.has_work:
        engine.step()
    _add(engine, Case("", case.slots[:1]), digests, numbers, _LONG)
    begin = time.perf_counter()
    while not engine.step():
        pass
    first_s = time.perf_counter() - begin
    engine.abort_all()
    while engine.has_work:
        engine.step()
    return decode_s, first_s


def _add(
    engine: Engine, case: Case, digests: Sequence[str], numbers: random.Random, length: int
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * _STEPS, ignore_eos=True)
    for index, slot in enumerate(case.slots):
        prompt = [numbers.randrange(engine.model.vocab_size) for _ in range(length)]
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=sampling,
                adapter_slot=slot,
                cache_keys=() if slot < 0 else (digests[slot],),
            )
        )


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="settings, such as model=qwen3-0.6b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(arguments)
    results = measure(options.overrides, rank=options.rank, rounds=options.rounds)
    conditions = {
        **basic_conditions(),
        "command": shlex.join(
            ["python", "-m", "ostinato.benchmarks.micro.engine.adapter_costs", *arguments]
        ),
        "threads": torch.get_num_threads(),
        "rank": options.rank,
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("case", "decode, ms", "ratio", "95 %", "first token, ms", "ratio", "95 %"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for result in results:
        cells = []
        for key in ("decode_s", "first_token_s"):
            low, high = result[f"{key}_interval"]
            cells += [
                f"{1e3 * statistics.median(result[key]):.2f}",
                f"{result[f'{key}_ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        table.add_row(result["case"], *cells)
    console = Console(width=100, highlight=False)
    console.print(json.dumps(conditions, indent=1), markup=False)
    console.print(table)
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
