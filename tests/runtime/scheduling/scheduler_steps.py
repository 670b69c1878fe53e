"""Makes schedulers and requests, and runs steps with given tokens. Blocks hold 4 tokens, if not said."""

from __future__ import annotations

from ostinato.conf.schema import SchedulerConfig, SchedulingPolicy
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.speculation.proposer import Proposer
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import SchedulerOutput, StepResult

EOS = 2


def make_request(
    request_id: str,
    prompt: range | list[int],
    *,
    priority: int = 0,
    place: int = 0,
    max_tokens: int | None = 20,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=sampling,
        eos_token_ids=(EOS,),
        priority=priority,
        place=place,
    )


def make_scheduler(
    *requests: Request,
    num_blocks: int = 100,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 40,
    policy: SchedulingPolicy = SchedulingPolicy.fcfs,
    prefix_caching: bool = True,
    groups: tuple[KVGroup, ...] = WHOLE_CACHE,
    num_states: int = 0,
    block_size: int = 4,
    proposer: Proposer | None = None,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,
    )
    cache = KVCacheManager(
        num_blocks + 1,
        block_size,
        enable_prefix_caching=prefix_caching,
        groups=groups,
        step_tokens=max_num_batched_tokens,
        num_states=num_states,
    )
    scheduler = Scheduler(config, cache, max_model_len=max_model_len, proposer=proposer)
    for request in requests:
        scheduler.add(request)
    return scheduler


def must_schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    return output


def step(scheduler: Scheduler, *token_ids: int) -> SchedulerOutput:
    """Schedule a step and give it these tokens."""
    output = must_schedule(scheduler)
    scheduler.update(output, StepResult(list(token_ids)))
    scheduler.check_integrity()
    return output


def chunks(output: SchedulerOutput) -> list[tuple[int, int, int]]:
    """(row, start, num_new_tokens) of each entry."""
    return [(entry.row, entry.start, entry.num_new_tokens) for entry in output.scheduled]
