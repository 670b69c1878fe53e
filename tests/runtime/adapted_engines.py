"""Loads adapters into an engine and runs requests with them, without a client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ostinato import LLM, SamplingParams
from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.types.request import Request

__all__ = ("adapted_answers", "load_adapters", "run_requests")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def load_adapters(engine: Engine, directories: Sequence[Path]) -> list[str]:
    """Load adapters into the first slots; returns their digests."""
    digests = [adapter_digest(directory) for directory in directories]
    for slot, (directory, digest) in enumerate(zip(directories, digests, strict=True)):
        engine.begin_adapter(slot, str(directory), digest)
    while engine.has_work:
        engine.step()
    assert sorted(engine.take_adapters()) == [(slot, "") for slot in range(len(directories))]
    return digests


def run_requests(
    engine: Engine,
    prompts: Sequence[list[int]],
    slots: Sequence[int],
    digests: Sequence[str],
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """The tokens of requests that run at once. Slot -1 = the base model."""
    for index, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=sampling,
                adapter_slot=slot,
                cache_keys=() if slot < 0 else (digests[slot],),
            )
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            tokens[int(output.request_id)] += output.new_token_ids
    return tokens


def adapted_answers(
    llm: LLM, directories: Sequence[Path], prompts: Sequence[list[int]]
) -> list[list[int]]:
    """Tokens of prompts that have the adapters and the base model in turns, in shared steps."""
    digests = load_adapters(llm._engine, directories)
    slots = [index % (len(directories) + 1) - 1 for index in range(len(prompts))]
    return run_requests(llm._engine, prompts, slots, digests)
