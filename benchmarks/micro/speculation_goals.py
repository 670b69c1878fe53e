"""Measures what drafts gain or lose through an engine process, in turns with plain decoding.

    python -m ostinato.benchmarks.micro.speculation_goals
    python -m ostinato.benchmarks.micro.speculation_goals model=llama-45m model.quantization=int4
    python -m ostinato.benchmarks.micro.speculation_goals model=qwen3-0.6b --tokens 48 --json FILE

Every engine runs in a process of its own and is used as the server uses it, without HTTP. A round
sends the same requests to one engine after the other. The rounds of a case have different prompts.

    free         tokens drawn at temperature 1, which nothing predicts; with 1 and with 32 streams
    replay       a prediction of which each token is wrong with probability 0.3, drafts of 3 tokens
    repeating    one token again and again, which is the only one that the requests allow
    prediction   a prediction of which each token is wrong with probability 0.03

The ratio of a case is that of output tokens a second, the median of its rounds.
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
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ostinato
from ostinato.benchmarks.machine.probes import LoadMeter, commit_of
from ostinato.conf.compose import load_config
from ostinato.runtime.async_engine import AsyncEngine
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.client.requests import PreparedParts
from ostinato.runtime.machine_info import cpu_name, package_versions
from ostinato.runtime.types.params import SamplingParams

__all__ = ("measure",)

_ENGINES = {
    "plain": ["speculation.method=none"],
    "auto": ["speculation.method=auto"],
    "auto, 3 tokens": ["speculation.method=auto", "speculation.max_tokens=3"],
}
_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Case:
    """Requests that two engines answer in turns."""

    name: str
    engine: str
    goal: float  # the least ratio
    num_streams: int = 1
    accuracy: float | None = None  # of the tokens of a prediction; None = there is none
    repeats: bool = False  # one token is allowed


_CASES = (
    _Case("free, 1 stream", "auto", 0.99),
    _Case("free, 32 streams", "auto", 0.99, num_streams=32),
    _Case("replay 0.7", "auto, 3 tokens", 1.8, accuracy=0.7),
    _Case("repeating", "auto", 3.0, repeats=True),
    _Case("prediction 0.97", "auto", 3.0, accuracy=0.97),
)


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: list[int]
    sampling: SamplingParams
    prepared: PreparedParts


@dataclass(frozen=True, slots=True)
class _Round:
    answers: list[list[int]]
    seconds: float
    other_cpu: float  # share of the cores that other programs used

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.answers)) / self.seconds


async def measure(
    overrides: Sequence[str], *, num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """All cases with one model.

    Args:
        overrides: settings of every engine.
        num_tokens: output tokens of a request.
        repeats: rounds of each case.
    """
    async with AsyncExitStack() as stack:
        clients: dict[str, EngineClient] = {}
        for name, words in _ENGINES.items():
            config = load_config([*overrides, *words])
            engine = await stack.enter_async_context(AsyncEngine(config=config))
            assert engine.client is not None, "the engine has started"
            clients[name] = engine.client
        return [await _run_case(case, clients, num_tokens, repeats) for case in _CASES]


async def _run_case(
    case: _Case, clients: dict[str, EngineClient], num_tokens: int, repeats: int
) -> dict[str, Any]:
    plain, drafting = clients["plain"], clients[case.engine]
    rounds: list[tuple[_Round, _Round]] = []
    before = drafting.stats.speculation
    for number in range(repeats + 1):
        requests = _requests(case, plain.model.vocab_size, num_tokens, number)
        if case.accuracy is not None:
            answers = (await _answer(plain, requests)).answers
            requests = [
                _predicted(one, answer, case.accuracy, plain.model.vocab_size)
                for one, answer in zip(requests, answers, strict=True)
            ]
        order = (plain, drafting) if number % 2 else (drafting, plain)
        found = {id(client): await _answer(client, requests) for client in order}
        rounds.append((found[id(plain)], found[id(drafting)]))
    after = drafting.stats.speculation
    ratios = [drafted.rate / base.rate for base, drafted in rounds[1:]]  # the first warms up
    result: dict[str, Any] = {
        "case": case.name,
        "goal": case.goal,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "plain_tokens_per_s": round(statistics.median(base.rate for base, _ in rounds[1:]), 1),
        "equal_to_plain": all(base.answers == drafted.answers for base, drafted in rounds),
        "other_cpu": round(max(one.other_cpu for pair in rounds for one in pair), 3),
    }
    if after is not None:
        drafted, right = after.num_draft_tokens, after.num_accepted_tokens
        if before is not None:
            drafted, right = drafted - before.num_draft_tokens, right - before.num_accepted_tokens
        # The last steps may be missing: an engine process sends its counters every 50 ms.
        result |= {"draft_tokens": drafted, "accepted_tokens": right}
    return result


def _requests(case: _Case, vocab_size: int, num_tokens: int, number: int) -> list[_Request]:
    generator = random.Random(f"{case.name}/{number}")
    found: list[_Request] = []
    for index in range(case.num_streams if case.num_streams > 1 else 3):
        prompt = [generator.randrange(16, vocab_size) for _ in range(_PROMPT_TOKENS)]
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
        found.append(_Request(prompt, sampling, PreparedParts()))
    return found


def _predicted(request: _Request, answer: list[int], accuracy: float, vocab_size: int) -> _Request:
    """The request with a prediction: the answer, in which some tokens are wrong."""
    generator = random.Random(request.sampling.seed)
    predicted = [
        token if generator.random() < accuracy else (token + 1) % vocab_size for token in answer
    ]
    parts = PreparedParts(prediction_token_ids=predicted)
    return _Request(request.prompt, request.sampling, parts)


async def _answer(client: EngineClient, requests: Sequence[_Request]) -> _Round:
    """Send the requests one after the other, or together if they are many."""
    load, begin = LoadMeter(), time.perf_counter()
    if len(requests) > 3:
        answers = await asyncio.gather(*(_generate(client, one) for one in requests))
    else:
        answers = [await _generate(client, one) for one in requests]
    seconds = time.perf_counter() - begin
    return _Round(list(answers), seconds, load.stop())


async def _generate(client: EngineClient, request: _Request) -> list[int]:
    token_ids: list[int] = []
    async for output in client.generate(
        f"goal-{time.monotonic_ns()}", request.prompt, request.sampling, prepared=request.prepared
    ):
        token_ids += output.new_token_ids
    return token_ids


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="settings, such as model=llama-45m")
    parser.add_argument("--tokens", type=int, default=192, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each case")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    overrides = options.overrides or ["model=llama-45m"]
    results = asyncio.run(measure(overrides, num_tokens=options.tokens, repeats=options.repeats))
    for one in results:
        print(json.dumps(one), flush=True)
    if options.json is not None:
        conditions = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit_of(Path(ostinato.__file__).parent),
            "cpu": cpu_name(),
            "versions": package_versions(),
            "overrides": overrides,
            "tokens": options.tokens,
        }
        record = {"conditions": conditions, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
