"""The logits of a position have the same bits whether its step computes one position or several.

Speculation relies on it: verifying k guesses at once gives what k + 1 decode steps give. It holds
for our own CPU kernels; weights that PyTorch multiplies make no such promise.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ostinato import LLM
from ostinato.conf.compose import load_config
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput
from tests.runtime.tiny import tiny_config

BLOCK_SIZE = 8
NUM_PROMPT_TOKENS = 40
COUNTS = [2, 3, 4, 5, 8, 9, 16, 32]  # positions of one step
SETTINGS = ["scheduler.max_num_seqs=32", "scheduler.overlap=false"]


@pytest.fixture(params=["demo", "float32", "bfloat16", "int8", "int4"])
def llm(request: pytest.FixtureRequest) -> LLM:
    if request.param == "demo":
        return LLM(
            config=load_config(
                [
                    *SETTINGS,
                    "graphs.mode=eager",
                    "graphs.bundle=false",
                    f"cache.block_size={BLOCK_SIZE}",
                    "cache.memory_gib=0.05",
                    "scheduler.max_num_batched_tokens=64",
                ]
            )
        )
    if request.param in ("int8", "int4"):
        return LLM(
            config=tiny_config(
                *SETTINGS, f"model.quantization={request.param}", "model.dtype=bfloat16"
            )
        )
    return LLM(config=tiny_config(*SETTINGS, f"model.dtype={request.param}"))


@torch.inference_mode()
def logits_of(runner: ModelRunner, entry: ScheduledSequence) -> Tensor:
    """[num_logits, V], as the runner computes them for a step of one sequence."""
    step = runner._batch.build(SchedulerOutput([entry], [], entry.num_new_tokens))
    num_rows = len(step.sampled_rows)
    with runner._hold_threads(step.num_tokens):
        logits = runner.graphs.run(
            step.num_tokens, step.num_seqs, num_rows, tokens_per_seq=step.tokens_per_seq
        )
    return logits[:num_rows].clone()


def test_one_position_a_step_equals_several(llm: LLM) -> None:
    runner = llm._engine._executor._runner
    numbers = random.Random(3)
    ends = [NUM_PROMPT_TOKENS]
    for count in COUNTS:
        ends.append(ends[-1] + count)
    token_ids = [numbers.randrange(3, 300) for _ in range(ends[-1])]
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    request = Request(request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams())
    for row in (0, 1):
        runner._batch.admit(row, request, [])
        first = 1 + row * num_blocks
        prompt = token_ids[:NUM_PROMPT_TOKENS]
        block_ids = list(range(first, first + num_blocks))
        logits_of(runner, ScheduledSequence(row, 0, len(prompt), prompt, block_ids, 1))
    for start, end in pairwise(ends):
        singly = torch.cat(
            [
                logits_of(runner, ScheduledSequence(0, at, 1, token_ids[at : at + 1], [], 1))
                for at in range(start, end)
            ]
        )
        count = end - start
        at_once = logits_of(
            runner, ScheduledSequence(1, start, count, token_ids[start:end], [], count)
        )
        assert torch.equal(at_once, singly), f"{count} positions at once"
        assert not torch.equal(at_once[0], at_once[1])
