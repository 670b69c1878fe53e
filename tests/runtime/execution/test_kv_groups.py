"""A second KV cache group reaches the step tensors. A model with one group has no such tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ostinato import LLM
from ostinato.models.registry import ARCHITECTURES
from ostinato.models.step_tensors import StepTensors, num_kv_groups
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.executor import Pending
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput
from tests.runtime.execution.cross_llama import MAX_ENCODER_TOKENS, CrossLlama, CrossTensors
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
BLOCK_SIZE = 8
NUM_BLOCKS = 24
BYTES_PER_BLOCK = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4


def make_requests(seed: int) -> list[Request]:
    numbers = random.Random(seed)
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=[
                numbers.randrange(2, VOCAB_SIZE) for _ in range(numbers.randint(1, 20))
            ],
            sampling=GREEDY,
            num_encoder_tokens=numbers.randint(0, MAX_ENCODER_TOKENS),
        )
        for index in range(10)
    ]


def run(llm: LLM, requests: list[Request]) -> tuple[dict[str, list[int]], list[SchedulerOutput]]:
    """Tokens by request, and the steps as the scheduler decided them."""
    engine, steps = llm._engine, []
    executor = engine._executor
    launch = executor.launch

    def keeping(output: SchedulerOutput) -> Pending:
        steps.append(output)
        return launch(output)

    executor.launch = keeping  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.check_integrity()
    return tokens, steps


@pytest.fixture
def cross() -> Iterator[LLM]:
    """An engine with few blocks: sequences are preempted, and get other blocks when they resume."""
    with pytest.MonkeyPatch.context() as patch:
        where = f"{CrossLlama.__module__}:{CrossLlama.__name__}"
        patch.setitem(ARCHITECTURES, "CrossForCausalLM", where)
        config = tiny_config(
            model__config={**MODEL, "architectures": ["CrossForCausalLM"]},
            model__max_model_len=64,
            cache__memory_gib=NUM_BLOCKS * BYTES_PER_BLOCK / 2**30,
        )
        with LLM(config=config) as llm:
            yield llm


def test_every_step_has_the_second_groups_blocks_of_its_sequences(cross: LLM) -> None:
    requests = make_requests(seed=3)
    CrossLlama.seen.clear()
    tokens, steps = run(cross, requests)
    assert cross.stats().num_preemptions > 0
    assert len(CrossLlama.seen) == len(steps)
    lengths: dict[int, int] = {}
    tables: dict[int, list[int]] = {}
    for output, seen in zip(steps, CrossLlama.seen, strict=True):
        for admitted in output.admitted:
            lengths[admitted.row] = admitted.request.num_encoder_tokens
            (tables[admitted.row],) = admitted.other_block_ids
        rows = [entry.row for entry in output.scheduled]
        assert seen.cross_seq_lens == [lengths[row] for row in rows]
        for row, block_ids in zip(rows, seen.cross_block_table, strict=True):
            count = -(-lengths[row] // BLOCK_SIZE)
            assert len(block_ids) == MAX_ENCODER_TOKENS // BLOCK_SIZE
            assert block_ids[:count] == tables[row]
            assert 0 not in block_ids[:count]
            assert not any(block_ids[count:])
        used = [block_id for row in rows for block_id in tables[row]]
        assert len(used) == len(set(used)), "two sequences share a block of the second group"
    with LLM(config=tiny_config(model__max_model_len=64)) as plain:
        assert run(plain, requests)[0] == tokens, "the second group changes tokens"


def test_more_encoder_tokens_than_the_cache_has_room_for_are_refused(cross: LLM) -> None:
    request = Request(
        request_id="r", prompt_token_ids=[3], sampling=GREEDY, num_encoder_tokens=1000
    )
    with pytest.raises(InvalidRequestError, match="1000 encoder tokens need 125 blocks"):
        cross._engine.add_request(request)


@pytest.mark.usefixtures("cross")
def test_the_memory_plan_counts_the_second_group() -> None:
    config = tiny_config(
        model__config={**MODEL, "architectures": ["CrossForCausalLM"]},
        cache__memory_gib=NUM_BLOCKS * BYTES_PER_BLOCK / 2**30,
    )
    memory = make_plan(config.engine, 1).memory
    usable, encoder_blocks = NUM_BLOCKS - 1, MAX_ENCODER_TOKENS // BLOCK_SIZE
    assert memory.max_model_len == (usable - encoder_blocks) * BLOCK_SIZE


def test_with_one_group_nothing_is_added() -> None:
    assert (num_kv_groups(StepTensors), num_kv_groups(CrossTensors)) == (1, 2)
    with LLM(config=tiny_config()) as llm:
        _, steps = run(llm, make_requests(seed=1)[:2])
        assert all(not one.other_block_ids for step in steps for one in step.admitted)
        executor = llm._engine._executor
        assert isinstance(executor, InlineExecutor)
        assert executor._runner._batch._group_tensors == []
        assert type(executor._runner._buffers.host) is StepTensors
