"""Measures how much faster or slower drafts make an engine, in turns with plain decoding.

    python -m ostinato.benchmarks.micro.engine.speculation_goals
    python -m ostinato.benchmarks.micro.engine.speculation_goals \\
        model=llama-45m model.quantization=int4
    python -m ostinato.benchmarks.micro.engine.speculation_goals model=demo --starts 3 --json FILE

Every engine runs in a process of its own. It is called as by the server, but without HTTP. Engines
answer each request, or each batch, in turns. The order of the turns changes from round to round. A
turn begins when no engine works: after an answer an engine maps pages for 0.2 s, which made the
next engine up to 10 % slower. Then the engine answers a short request that is not timed, because a
process is slower after a pause. No two rounds have the same prompts. The cases:

    free         tokens drawn at temperature 1, which no drafter predicts; 1 and 32 streams
    chat         the demo model answers questions at temperature 0.7; with 1 and with 32 streams
    replay       a prediction of which each token is wrong with probability 0.3, drafts of 3 tokens
    repeating    one token again and again, which is the only one that the requests allow
    prediction   a prediction of which each token is wrong with probability 0.03
    head         the demo model with its EAGLE-3 head answers questions; its goal is 2 tokens a step

The ratio of a case is that of drafts to plain decoding, in output tokens a second: the median over
all turns, with its 95 % bootstrap interval. In `free` and `chat` the engine with drafts also
answers every request with `speculation: false`. `ratio_off` compares these answers with those of
the plain engine. A difference is due to the process, such as where its memory lies, and not to
drafts. For that reason `--starts` starts the engines several times. `ratio_to_off` compares drafts
with no drafts in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.compose import load_config
from ostinato.models.demo.training import held_out
from ostinato.runtime.async_engine import AsyncEngine
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.client.requests import PreparedParts
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.speculation import SpeculationReport

__all__ = ("Summary", "measure", "summarize")

_DEMO = Path(held_out.__file__).parents[1]
_ENGINES = {
    "plain": ["speculation.method=none"],
    "auto": ["speculation.method=auto"],
    "auto, 3 tokens": ["speculation.method=auto", "speculation.max_tokens=3"],
    "head, 3 tokens": [
        "speculation.method=eagle3",
        f"speculation.model={_DEMO / 'eagle3'}",
        "speculation.max_tokens=3",
        "speculation.adaptive=false",
    ],
}
_PROMPT_TOKENS = 64
_FIRST_TOKENS = 16  # of the request before each turn
_RESAMPLES = 2000
_SETTLE_S, _MOST_SETTLE_S, _IDLE_SHARE = 0.2, 3.0, 0.15


@dataclass(frozen=True, slots=True)
class _Case:
    """Requests that engines answer in turns."""

    name: str
    engine: str
    goal: float | None  # the least ratio
    num_streams: int = 1
    # probability that a token of the prediction is right; None = no prediction
    accuracy: float | None = None
    repeats: bool = False  # only one token is allowed
    chat_temperature: float | None = None  # questions to the demo model; None = random prompts
    step_goal: float | None = None  # the least number of tokens a step

    @property
    def roles(self) -> tuple[str, ...]:
        """The engines that answer. `off` is the engine with drafts, which then makes none."""
        is_loss = self.goal is not None and self.goal < 1.0
        return ("plain", "drafts", "off") if is_loss else ("plain", "drafts")


_CASES = (
    _Case("free, 1 stream", "auto", 0.99),
    _Case("free, 32 streams", "auto", 0.99, num_streams=32),
    _Case("chat, 1 stream", "auto", 0.99, chat_temperature=0.7),
    _Case("chat, 32 streams", "auto", 0.99, num_streams=32, chat_temperature=0.7),
    _Case("replay 0.7", "auto, 3 tokens", 1.8, accuracy=0.7),
    _Case("repeating", "auto", 3.0, repeats=True),
    _Case("prediction 0.97", "auto", 3.0, accuracy=0.97),
    _Case("head", "head, 3 tokens", None, chat_temperature=0.0, step_goal=2.0),
)


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: list[int]
    sampling: SamplingParams
    prepared: PreparedParts = field(default_factory=PreparedParts)
    cache_salt: str = ""


class _Answer(NamedTuple):
    token_ids: list[int]
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(slots=True)
class _Found:
    """What was measured of a case, by turn."""

    rates: dict[str, list[float]]  # by role: output tokens a second
    other_cpu: list[float] = field(default_factory=list)
    is_equal: bool = True
    num_tokens: int = 0  # of answers with drafts, as are the numbers below
    num_steps: int = 0  # the sum over the sequences
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Summary(msgspec.Struct, frozen=True):
    """Ratios of the rates of two engines."""

    median: float
    low: float  # of the 95 % bootstrap interval of the median
    high: float


def summarize(rates: Sequence[float], others: Sequence[float]) -> Summary:
    """The ratios of `rates` to `others`, turn by turn; both have equally many, at least one."""
    ratios = [one / other for one, other in zip(rates, others, strict=True)]
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    edge = round(0.025 * _RESAMPLES)
    found = statistics.median(ratios), medians[edge], medians[-edge - 1]
    return Summary(*(round(one, 3) for one in found))


async def measure(
    overrides: Sequence[str], *, num_tokens: int, turns: int, starts: int, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Measure all cases with one model.

    Args:
        overrides: settings of every engine.
        num_tokens: output tokens of a request, at most.
        turns: rounds of each case, after each start of the engines.
        starts: how often the engines are started.
        only: beginnings of the names of the cases to measure; empty = all.
    """
    model = load_config(overrides).model
    is_demo = not model.path and not model.config
    cases = [
        case
        for case in _CASES
        if (is_demo or case.chat_temperature is None)
        and (not only or any(case.name.startswith(one) for one in only))
    ]
    found = {case.name: _Found({role: [] for role in case.roles}) for case in cases}
    for start in range(starts):
        async with AsyncExitStack() as stack:
            clients: dict[str, EngineClient] = {}
            for case in cases:
                for name in ("plain", case.engine):
                    if name not in clients:
                        config = load_config([*overrides, *_ENGINES[name]])
                        engine = await stack.enter_async_context(AsyncEngine(config=config))
                        assert engine.client is not None, "the engine has started"
                        clients[name] = engine.client
                first = start * (turns + 1)
                for number in range(first, first + turns + 1):
                    await _take_turns(
                        case,
                        {"plain": clients["plain"], "drafts": clients[case.engine]},
                        _Found({role: [] for role in case.roles})  # the first round warms up
                        if number == first
                        else found[case.name],
                        num_tokens,
                        number,
                    )
    return [_result(case, found[case.name]) for case in cases]


async def _take_turns(
    case: _Case, clients: dict[str, EngineClient], found: _Found, num_tokens: int, number: int
) -> None:
    """Let each engine answer the requests of round `number`."""
    plain = clients["plain"]
    requests = _requests(case, plain, num_tokens, number)
    if case.accuracy is not None:
        generator = random.Random(f"{case.name}/{number}/prediction")
        answers = await _answer(plain, requests)
        requests = [
            _predicted(one, answer.token_ids, case.accuracy, plain.model.vocab_size, generator)
            for one, answer in zip(requests, answers, strict=True)
        ]
    orders = list(permutations(case.roles))
    token_ids: list[list[list[int]]] = []
    for role in orders[number % len(orders)]:
        client = clients["plain" if role == "plain" else "drafts"]
        asked = [_without_drafts(one, number) for one in requests] if role == "off" else requests
        await _settle()
        await _answer(client, [_first(client, f"{case.name}/{number}/{role}")])
        load, begin = LoadMeter(), time.perf_counter()
        answers = await _answer(client, asked)
        seconds = time.perf_counter() - begin
        found.other_cpu.append(load.stop())
        num_output = sum(len(one.token_ids) for one in answers)
        found.rates[role].append(num_output / seconds)
        token_ids.append([one.token_ids for one in answers])
        if role == "drafts":
            found.num_tokens += num_output
            found.num_steps += sum(one.num_steps for one in answers)
            found.num_draft_tokens += sum(one.num_draft_tokens for one in answers)
            found.num_accepted_tokens += sum(one.num_accepted_tokens for one in answers)
    found.is_equal &= all(one == token_ids[0] for one in token_ids)


def _result(case: _Case, found: _Found) -> dict[str, Any]:
    rates = found.rates
    result: dict[str, Any] = {
        "case": case.name,
        "goal": case.goal,
        "ratio": msgspec.to_builtins(summarize(rates["drafts"], rates["plain"])),
    }
    if "off" in rates:
        result |= {
            "ratio_to_off": msgspec.to_builtins(summarize(rates["drafts"], rates["off"])),
            "ratio_off": msgspec.to_builtins(summarize(rates["off"], rates["plain"])),
        }
    if case.step_goal is not None:
        result |= {
            "goal_tokens_a_step": case.step_goal,
            "tokens_a_step": round(found.num_tokens / found.num_steps, 3),
        }
    return result | {
        "turns": len(rates["plain"]),
        "plain_tokens_per_s": round(statistics.median(rates["plain"]), 1),
        "tokens_per_s": {role: [round(rate, 1) for rate in one] for role, one in rates.items()},
        "equal_to_plain": found.is_equal,
        "other_cpu": round(statistics.median(found.other_cpu), 3),
        "most_other_cpu": round(max(found.other_cpu), 3),
        "draft_tokens": found.num_draft_tokens,
        "accepted_tokens": found.num_accepted_tokens,
    }


def _requests(case: _Case, client: EngineClient, num_tokens: int, number: int) -> list[_Request]:
    """The requests of a round; those of a chat end by themselves."""
    generator = random.Random(f"{case.name}/{number}")
    found: list[_Request] = []
    if case.chat_temperature is not None:
        assert client.tokenizer is not None, "the demo model has a tokenizer"
        for index, text in enumerate(
            held_out.questions(case.num_streams, generator.getrandbits(62))
        ):
            prompt = client.tokenizer.encode(text, add_special_tokens=False)
            seed, temperature = number * 100 + index, case.chat_temperature
            sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens)
            found.append(_Request(prompt, sampling))
        return found
    for index in range(case.num_streams):
        prompt = [generator.randrange(16, client.model.vocab_size) for _ in range(_PROMPT_TOKENS)]
        sampling = SamplingParams(
            temperature=1.0, seed=number * 100 + index, max_tokens=num_tokens, ignore_eos=True
        )
        if case.repeats:
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=num_tokens,
                ignore_eos=True,
                allowed_token_ids=(prompt[0],),
            )
        found.append(_Request(prompt, sampling))
    return found


def _predicted(
    request: _Request,
    answer: list[int],
    accuracy: float,
    vocab_size: int,
    generator: random.Random,
) -> _Request:
    """The request with a prediction: the answer, in which some tokens are wrong."""
    predicted = [
        token if generator.random() < accuracy else (token + 1) % vocab_size for token in answer
    ]
    parts = PreparedParts(prediction_token_ids=predicted)
    return _Request(request.prompt, request.sampling, parts)


def _without_drafts(request: _Request, number: int) -> _Request:
    """The request without drafts.

    It has another `cache_salt`. So its prompt is not found in the prefix cache, and its answer does
    not become a draft of the request with drafts.
    """
    sampling = msgspec.structs.replace(request.sampling, speculation=False)
    return _Request(request.prompt, sampling, request.prepared, f"off {number}")


async def _settle() -> None:
    """Wait until the processes that this process has started use no processor."""
    end = time.monotonic() + _MOST_SETTLE_S
    while time.monotonic() < end:
        before = _used_seconds()
        await asyncio.sleep(_SETTLE_S)
        if _used_seconds() - before < _IDLE_SHARE * _SETTLE_S:
            return


def _used_seconds() -> float:
    """Processor time of the running processes that this process has started."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def _first(client: EngineClient, name: str) -> _Request:
    """The short request before a turn, which is not timed."""
    generator = random.Random(name)
    prompt = [generator.randrange(16, client.model.vocab_size) for _ in range(_FIRST_TOKENS)]
    sampling = SamplingParams(
        temperature=1.0, seed=0, max_tokens=_FIRST_TOKENS, ignore_eos=True, speculation=False
    )
    return _Request(prompt, sampling)


async def _answer(client: EngineClient, requests: Sequence[_Request]) -> list[_Answer]:
    """The answers to requests that are sent together."""
    return list(await asyncio.gather(*(_generate(client, one) for one in requests)))


async def _generate(client: EngineClient, request: _Request) -> _Answer:
    token_ids: list[int] = []
    num_steps = num_draft_tokens = num_accepted_tokens = 0
    async for output in client.generate(
        f"goal-{time.monotonic_ns()}",
        request.prompt,
        request.sampling,
        cache_salt=request.cache_salt,
        prepared=request.prepared,
    ):
        token_ids += output.new_token_ids
        report = output.speculation or SpeculationReport()
        num_draft_tokens += report.num_draft_tokens
        num_accepted_tokens += report.num_accepted_tokens
        # Accepted tokens after the one that ended the answer are not in `new_token_ids`.
        num_plain = len(output.new_token_ids) - report.num_accepted_tokens
        num_steps += max(report.num_drafts, num_plain)
    return _Answer(token_ids, num_steps, num_draft_tokens, num_accepted_tokens)


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="settings, such as model=llama-45m")
    parser.add_argument("--tokens", type=int, default=192, help="output tokens of a request")
    parser.add_argument("--turns", type=int, default=18, help="of each engine and case, per start")
    parser.add_argument("--starts", type=int, default=1, help="how often the engines are started")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names of cases")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    overrides = options.overrides or ["model=llama-45m"]
    results = asyncio.run(
        measure(
            overrides,
            num_tokens=options.tokens,
            turns=options.turns,
            starts=options.starts,
            only=options.only,
        )
    )
    for one in results:
        print(json.dumps(one), flush=True)
    if options.json is not None:
        conditions = {
            **basic_conditions(),
            "overrides": overrides,
            "tokens": options.tokens,
            "starts": options.starts,
        }
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
