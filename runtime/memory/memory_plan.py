"""The memory plan: divides free memory between weights, activations, graphs and the KV cache.

`plan_memory` computes with sizes only and allocates nothing. `run plan` prints its result, and the
engine allocates by it. On CUDA the engine plans once more with measured sizes
(runtime/memory/measured_memory.py). `free_memory` reads the free memory of the GPU, or of this
machine within the limits of its container.

    free memory x device.memory_fraction = budget
    budget - weights - activations - graph pool - buffers of KV tiers = room for the cache

The cache, which is KV blocks and the states of recurrent layers, takes this part of the room:

    cache.memory_gib is set   that size
    CUDA                      all of the room
    CPU                       the size for max_num_seqs sequences of max_model_len, but at most
                              4 GiB. If one such sequence needs more than 4 GiB, its size, but at
                              most half of the room. Other programs need a CPU's memory too.
                              The fewest states that the engine needs are added to this.

runtime/memory/cache_shares.py chooses the number of states. The blocks take the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ostinato.conf.schema import DeviceConfig
from ostinato.conf.sections.cache_schema import CacheConfig
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup, longest_sequence, sequence_blocks
from ostinato.runtime.costs.step_limits import StepLimits, seqs_with_states
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import FreeMemory, free_host_memory
from ostinato.runtime.memory.cache_shares import StateChoice, cache_bytes_of
from ostinato.runtime.memory.footprint import (
    GraphFootprint,
    ModelFootprint,
    graph_bytes,
    step_bytes,
)
from ostinato.runtime.memory.plan_texts import first_reasons, size_text, table_remedies

__all__ = (
    "GIB",
    "MemoryPlan",
    "free_memory",
    "plan_memory",
)

GIB = 1 << 30
_ANY_NUMBER = 1 << 30  # blocks of a stage that keeps none: the other stages decide their number
_SMALLER_STEP = (
    "lower scheduler.max_num_batched_tokens, because layers with a window have blocks for a "
    "whole step"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The shares of the memory in bytes, and what fits in them."""

    # Free memory before the weights are loaded, at most device.memory_gib.
    free_bytes: int
    budget_bytes: int  # the part of `free_bytes` that the plan may use
    weights_bytes: int  # weights of the model and of the draft model
    activation_bytes: int
    graph_bytes: int
    kv_bytes: int  # num_blocks * bytes_per_block
    block_size: int  # tokens
    bytes_per_block: int  # a block in the KV cache of the model, plus one in the draft model's
    bytes_per_token: int  # a token in all layers of the model and of the draft model
    num_blocks: int  # blocks to allocate, the null block included
    max_model_len: int  # tokens; at most the model's own limit
    reasons: tuple[str, ...]  # the decisions and their reasons, one sentence each
    step_tokens: int  # tokens of the largest step
    # Free memory before the weights are loaded, without a limit; no decision depends on it.
    device_free_bytes: int = field(default=0, compare=False)
    tier_bytes: int = 0  # buffers for copies of KV blocks to slower tiers
    groups: tuple[KVGroup, ...] = WHOLE_CACHE
    # Slots for states of recurrent layers to allocate, slot 0 included; 0 = no layer is recurrent.
    num_states: int = 0
    bytes_per_state: int = 0  # a slot's states of all recurrent layers on this rank

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers."""
        return self.num_states * self.bytes_per_state

    def running_seqs(self, most: int) -> int:
        """Sequences that run at once, at most `most`; see `seqs_with_states`."""
        return seqs_with_states(most, self.num_states)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit at once: of sequences of max_model_len, if some layers have a window."""
        if any(group.window for group in self.groups):
            return int(self.num_full_sequences * self.max_model_len)
        return (self.num_blocks - 1) * self.block_size

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits, at most max_model_len."""
        num_usable, most = self.num_blocks - 1, self.max_model_len
        if self.sequence_blocks(most) <= num_usable:
            return most
        return longest_sequence(self.groups, self.block_size, num_usable, self.step_tokens)

    @property
    def num_full_sequences(self) -> float:
        """How many sequences of max_model_len fit at once."""
        num_usable, most = self.num_blocks - 1, self.sequence_blocks(self.max_model_len)
        if num_usable <= most:
            return num_usable / most
        count = 1 + (num_usable - most) / self.decoding_blocks(self.max_model_len)
        return min(count, float(self.running_seqs(self.num_states))) if self.num_states else count

    @property
    def shares(self) -> tuple[int, int, int]:
        """(num_blocks, max_model_len, num_states): of each, ranks agree on the least."""
        return self.num_blocks, self.max_model_len, self.num_states

    def limited(self, num_blocks: int, max_model_len: int, num_states: int) -> MemoryPlan:
        """The plan of a rank, limited to what every rank of the engine has room for.

        Args:
            num_blocks: the least number of blocks of all ranks.
            max_model_len: the least `max_model_len` of all ranks.
            num_states: the least number of slots for states of all ranks.
        """
        return replace(
            self,
            num_blocks=num_blocks,
            kv_bytes=num_blocks * self.bytes_per_block,
            max_model_len=max_model_len,
            num_states=num_states,
        )

    def sequence_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once."""
        return sequence_blocks(self.groups, self.block_size, num_tokens, self.step_tokens)

    def decoding_blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence of `num_tokens` that decodes.

        While its prompt is computed, a sequence holds more blocks of layers with a window: those of
        a whole step. Only one sequence can have a whole step.
        """
        return sequence_blocks(self.groups, self.block_size, num_tokens, 1)

    @property
    def is_step_large(self) -> bool:
        """Whether a longer sequence would fit if the largest step were smaller."""
        more = self.longest_sequence + 1
        return self.decoding_blocks(more) < self.sequence_blocks(more)

    def blocks_of_sequences(self, count: int) -> int:
        """The most blocks that `count` sequences of max_model_len hold at once."""
        length = self.max_model_len
        return self.sequence_blocks(length) + (count - 1) * self.decoding_blocks(length)

    @property
    def unplanned_bytes(self) -> int:
        """Free bytes that the plan does not use. Never negative in the result of `plan_memory`."""
        return self.free_bytes - self.fixed_bytes - self.kv_bytes - self.state_bytes

    @property
    def fixed_bytes(self) -> int:
        """All planned bytes except those of KV blocks and states."""
        return self.weights_bytes + self.activation_bytes + self.graph_bytes + self.tier_bytes


def plan_memory(
    model: ModelFootprint,
    *,
    free_bytes: int,
    is_cpu: bool,
    device: DeviceConfig,
    cache: CacheConfig,
    scheduler: StepLimits,
    max_model_len: int | None = None,
    graphs: GraphFootprint | None = None,
) -> MemoryPlan:
    """Divide a device's free memory.

    Args:
        model: the model's sizes.
        free_bytes: free memory of the device before the weights are loaded.
        is_cpu: use the CPU's rule for the KV cache, not CUDA's.
        device: has the share of the free memory to plan with.
        cache: the block size and, if set, the memory for blocks and the number of states.
        scheduler: the largest step.
        max_model_len: the configured length in tokens; None = the model's own limit, shortened if
            it does not fit.
        graphs: the graphs that will be captured on CUDA.

    Raises:
        StartupError: the weights, one block, the states of the configured sequences,
            cache.memory_gib, or one sequence of the configured length do not fit, or the model does
            not support that length or cache.state_slots. The text has the numbers and the remedies.
    """
    if max_model_len is not None and max_model_len > model.max_model_len:
        raise StartupError(
            f"model.max_model_len={max_model_len}, but the model is made for {model.max_model_len} "
            f"tokens; lower model.max_model_len"
        )
    measured, draft = model.measured, model.draft
    length = model.max_model_len if max_model_len is None else max_model_len
    draft_bytes = draft.kv_bytes_per_token if draft else 0
    bytes_per_block = model.block_bytes(cache.block_size)
    if draft is not None:
        bytes_per_block += draft.block_bytes(cache.block_size)
    plan = MemoryPlan(
        free_bytes=free_bytes,
        budget_bytes=int(free_bytes * device.memory_fraction),
        weights_bytes=(
            (model.weights_bytes if measured is None else measured.used_bytes)
            + (draft.weights_bytes if draft else 0)
        ),
        activation_bytes=step_bytes(model, scheduler.max_num_batched_tokens, is_cpu=is_cpu),
        graph_bytes=0 if graphs is None or is_cpu else graph_bytes(model, graphs),
        kv_bytes=0,
        block_size=cache.block_size,
        bytes_per_block=bytes_per_block,
        bytes_per_token=model.kv_bytes_per_token + draft_bytes,
        num_blocks=0,
        max_model_len=length,
        reasons=first_reasons(model, free_bytes, device),
        step_tokens=scheduler.max_num_batched_tokens,
        tier_bytes=model.tier_bytes,
        groups=model.groups,
        bytes_per_state=model.state_bytes,
    )
    states = StateChoice.of(model, cache, scheduler)
    room = _room(plan, model, states)
    if not (bytes_per_block or states.has_states or model.keeps_no_keys):
        reason = "KV cache: none, an encoder keeps no keys and values"
        return _without_blocks(
            replace(plan, reasons=(*plan.reasons, reason)), scheduler.max_num_seqs
        )
    return _with_cache(
        plan,
        model,
        states,
        room,
        num_seqs=scheduler.max_num_seqs,
        is_cpu=is_cpu,
        memory_gib=cache.memory_gib,
        is_asked=max_model_len is not None,
    )


def _with_cache(
    plan: MemoryPlan,
    model: ModelFootprint,
    states: StateChoice,
    room: int,
    *,
    num_seqs: int,
    is_cpu: bool,
    memory_gib: float | None,
    is_asked: bool,
) -> MemoryPlan:
    """The plan with the memory for blocks and states, divided between them.

    Args:
        plan: the plan without a cache.
        model: the model's sizes.
        states: how many states the engine needs and wants.
        room: bytes that are left of the budget.
        num_seqs: scheduler.max_num_seqs.
        is_cpu: the device is a CPU.
        memory_gib: cache.memory_gib.
        is_asked: whether model.max_model_len is set.

    Raises:
        StartupError: the cache has no room for two blocks or for a sequence of the set length.
    """
    bytes_per_block = plan.bytes_per_block
    one_sequence = (plan.blocks_of_sequences(1) + 1) * bytes_per_block
    all_sequences = (plan.blocks_of_sequences(num_seqs) + 1) * bytes_per_block
    cache_bytes, reason = cache_bytes_of(
        room,
        states,
        one_sequence=one_sequence,
        all_sequences=all_sequences,
        is_cpu=is_cpu,
        memory_gib=memory_gib,
    )
    num_states = states.choose(
        cache_bytes,
        all_sequences=all_sequences,
        one_sequence=one_sequence,
        block_bytes=bytes_per_block,
        is_asked=is_asked,
    )
    plan = replace(plan, num_states=num_states, reasons=(*plan.reasons, reason))
    if states.has_states:
        plan = replace(plan, reasons=(*plan.reasons, states.reason(num_states)))
    if model.keeps_no_keys:
        reason = "KV blocks: none on this stage, whose layers have no attention"
        return replace(plan, num_blocks=_ANY_NUMBER, reasons=(*plan.reasons, reason))
    if not bytes_per_block:
        return _without_blocks(plan, num_seqs)
    return _with_blocks(plan, model, cache_bytes, room, is_asked=is_asked)


def _with_blocks(
    plan: MemoryPlan, model: ModelFootprint, cache_bytes: int, room: int, *, is_asked: bool
) -> MemoryPlan:
    """The plan with the blocks that fit into the cache's memory beside the states.

    Raises:
        StartupError: the states leave no room for two blocks, or `_with_length` raises it.
    """
    size, num_bytes = plan.bytes_per_block, cache_bytes - plan.state_bytes
    if plan.num_states and num_bytes < 2 * size:
        raise StartupError(
            f"not enough memory for the cache: {size_text(cache_bytes)} are planned, states for "
            f"{plan.num_states - 1} slots need {size_text(plan.state_bytes)}, and two KV blocks "
            f"{size_text(2 * size)}; raise cache.memory_gib, or lower scheduler.max_num_seqs or "
            "cache.state_slots"
        )
    num_blocks = num_bytes // size
    plan = replace(plan, num_blocks=num_blocks, kv_bytes=num_blocks * size)
    return _with_length(plan, model, is_asked=is_asked, room=room)


def _without_blocks(plan: MemoryPlan, num_seqs: int) -> MemoryPlan:
    """The plan of a model without keys and values. It has blocks for all sequences, of 0 bytes."""
    per_sequence = plan.sequence_blocks(plan.max_model_len) + 1  # admission needs a spare block
    return replace(plan, num_blocks=num_seqs * per_sequence + 1)


def _room(plan: MemoryPlan, model: ModelFootprint, states: StateChoice) -> int:
    """Bytes that the budget leaves for KV blocks and states.

    Raises:
        StartupError: there is no room for the null block, one usable block and the fewest states.
    """
    room, least = plan.budget_bytes - plan.fixed_bytes, 2 * plan.bytes_per_block
    least += states.least_bytes
    if room < least:
        remedies = [*table_remedies(model, least - room), "use a smaller model"]
        kept = ""
        if states.least_bytes:
            kept = f"states for {states.least - 1} slots {size_text(states.least_bytes)}, "
            if states.can_free(least - room):
                fewer = "scheduler.max_num_seqs" if states.slots is None else "cache.state_slots"
                remedies.insert(0, f"lower {fewer}")
        tiers = f"buffers of KV tiers {size_text(plan.tier_bytes)}, " if plan.tier_bytes else ""
        raise StartupError(
            f"not enough memory: {size_text(plan.budget_bytes)} planned of "
            f"{size_text(plan.free_bytes)} free, weights need {size_text(plan.weights_bytes)}, "
            f"activations {size_text(plan.activation_bytes)}, graphs "
            f"{size_text(plan.graph_bytes)}, {tiers}{kept}"
            f"two KV blocks {size_text(2 * plan.bytes_per_block)}; {', or '.join(remedies)}, "
            f"model.dtype=bfloat16, a higher device.memory_fraction or a lower "
            f"scheduler.max_num_batched_tokens"
        )
    return room


def _with_length(
    plan: MemoryPlan, model: ModelFootprint, *, is_asked: bool, room: int
) -> MemoryPlan:
    """Shorten `max_model_len` of a plan to the longest sequence that fits.

    Raises:
        StartupError: the configured length does not fit, or not even one token does.
    """
    longest = plan.longest_sequence
    if longest >= plan.max_model_len and longest > 0:
        return plan
    if longest > 0 and not is_asked:
        reason = (
            f"context: shortened from {plan.max_model_len} to {longest} tokens, "
            "because the KV cache holds no more; raise cache.memory_gib for longer sequences"
        )
        if plan.is_step_large:
            reason += f", or {_SMALLER_STEP}"
        return replace(plan, max_model_len=longest, reasons=(*plan.reasons, reason))
    length = plan.max_model_len if is_asked else plan.block_size
    need = (plan.sequence_blocks(length) + 1) * plan.bytes_per_block
    remedies: list[str] = []
    kept = plan.state_bytes
    if longest > 0:
        remedies.append(f"lower model.max_model_len to at most {longest}")
    if plan.is_step_large:
        remedies.append(_SMALLER_STEP)
    if need + kept <= room:
        remedies.append(f"set cache.memory_gib={math.ceil((need + kept) / GIB * 1000) / 1000:g}")
    else:
        remedies += table_remedies(model, need + kept - room)
    if kept:
        remedies.append(f"lower scheduler.max_num_seqs, as {size_text(kept)} are for states")
    remedies.append("use a smaller model or a higher device.memory_fraction")
    raise StartupError(
        f"not enough memory for one sequence of {length} tokens: its KV blocks need "
        f"{size_text(need)}, and {size_text(plan.kv_bytes)} are planned; {', or '.join(remedies)}"
    )


def free_memory(*, is_cpu: bool) -> FreeMemory:
    """The memory that this process can still allocate, on the current CUDA device or the host."""
    if is_cpu:
        return free_host_memory()
    import torch

    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return FreeMemory(total_bytes=total, free_bytes=free, source=name)
