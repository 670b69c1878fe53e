"""The memory plan: divides free memory between weights, activations, graphs and the KV cache.

`plan_memory` computes with sizes only and allocates nothing. `run plan` prints its result, and the
engine allocates by it. On CUDA the engine plans once more with measured sizes
(runtime/memory/measured_memory.py). `free_memory` reads the free memory of the GPU, or of this
machine within the limits of its container.

    free memory x device.memory_fraction = budget
    budget - weights - activations - graph pool - buffers of KV tiers = room for KV blocks

The KV cache takes this part of the room:

    cache.memory_gib is set   that size
    CUDA                      all of the room
    CPU                       the size for max_num_seqs sequences of max_model_len, but at most
                              4 GiB. If one such sequence needs more than 4 GiB, its size, but at
                              most half of the room. Other programs need a CPU's memory too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ostinato.conf.schema import DeviceConfig
from ostinato.conf.sections.cache_schema import CacheConfig
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup, longest_sequence, sequence_blocks
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import FreeMemory, free_host_memory
from ostinato.runtime.memory.footprint import (
    GraphFootprint,
    ModelFootprint,
    graph_bytes,
    step_bytes,
)

__all__ = (
    "GIB",
    "MemoryPlan",
    "free_memory",
    "plan_memory",
)

GIB = 1 << 30
CPU_KV_BYTES = 4 * GIB
_SMALLER_STEP = (
    "lower scheduler.max_num_batched_tokens, because layers with a window have blocks for a "
    "whole step"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The shares of the memory in bytes, and what fits in them."""

    free_bytes: int  # free memory before the weights are loaded
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
    tier_bytes: int = 0  # buffers for copies of KV blocks to slower tiers
    groups: tuple[KVGroup, ...] = WHOLE_CACHE

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
        return 1 + (num_usable - most) / self.decoding_blocks(self.max_model_len)

    def limited(self, num_blocks: int, max_model_len: int) -> MemoryPlan:
        """The plan of a rank, limited to what every rank of the engine has room for.

        Args:
            num_blocks: the least number of blocks of all ranks.
            max_model_len: the least `max_model_len` of all ranks.
        """
        return replace(
            self,
            num_blocks=num_blocks,
            kv_bytes=num_blocks * self.bytes_per_block,
            max_model_len=max_model_len,
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
        return self.free_bytes - self.fixed_bytes - self.kv_bytes

    @property
    def fixed_bytes(self) -> int:
        """All planned bytes except those of the KV cache."""
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
        cache: the block size and, if set, the memory for blocks.
        scheduler: the largest step.
        max_model_len: the configured length in tokens; None = the model's own limit, shortened if
            it does not fit.
        graphs: the graphs that will be captured on CUDA.

    Raises:
        StartupError: the weights, one block, cache.memory_gib, or one sequence of the configured
            length do not fit, or the model does not support that length. The text has the numbers
            and the remedies.
    """
    if max_model_len is not None and max_model_len > model.max_model_len:
        raise StartupError(
            f"model.max_model_len={max_model_len}, but the model is made for {model.max_model_len} "
            f"tokens; lower model.max_model_len"
        )
    measured = model.measured
    length = model.max_model_len if max_model_len is None else max_model_len
    draft = model.draft
    draft_bytes = draft.kv_bytes_per_token if draft else 0
    bytes_per_block = model.block_bytes(cache.block_size)
    if draft is not None:
        bytes_per_block += draft.block_bytes(cache.block_size)
    reasons = [f"budget: {device.memory_fraction:g} of {_size(free_bytes)} of free memory"]
    if draft is not None:
        reason = (
            f"draft model: {_size(draft.weights_bytes)} of the weights and "
            f"{draft.kv_bytes_per_token / 1024:,.1f} KiB of the KV cache of each token"
        )
        if draft.copied_bytes:
            reason += f"; {_size(draft.copied_bytes)} are copies of the model's embedding or head"
        reasons.append(reason)
    reasons += _weights_beside_layers(model)
    if model.group_reason is not None:
        reasons.append(model.group_reason)
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
        reasons=tuple(reasons),
        step_tokens=scheduler.max_num_batched_tokens,
        tier_bytes=model.tier_bytes,
        groups=model.groups,
    )
    room = _room(plan, model)
    if not bytes_per_block:
        return _without_cache(plan, scheduler)
    kv_bytes, reason = _kv_bytes(
        room,
        one_sequence=(plan.blocks_of_sequences(1) + 1) * bytes_per_block,
        all_sequences=(plan.blocks_of_sequences(scheduler.max_num_seqs) + 1) * bytes_per_block,
        is_cpu=is_cpu,
        memory_gib=cache.memory_gib,
    )
    num_blocks = kv_bytes // bytes_per_block
    plan = replace(
        plan,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * bytes_per_block,
        reasons=(*plan.reasons, reason),
    )
    return _with_length(plan, model, is_asked=max_model_len is not None, room=room)


def _without_cache(plan: MemoryPlan, scheduler: StepLimits) -> MemoryPlan:
    """The plan of an encoder. Its blocks take no memory, so it has blocks for all sequences."""
    per_sequence = plan.sequence_blocks(plan.max_model_len) + 1  # admission needs a spare block
    return replace(
        plan,
        num_blocks=scheduler.max_num_seqs * per_sequence + 1,
        reasons=(*plan.reasons, "KV cache: none, an encoder keeps no keys and values"),
    )


def _weights_beside_layers(model: ModelFootprint) -> list[str]:
    """Texts about what the weights include besides the model's layers."""
    parts = (
        ("adapters", model.adapter_bytes, "their slots"),
        (
            "images",
            model.image_bytes,
            "the vision tower and the tables of embeddings (images.cache_tokens)",
        ),
        (
            "audio",
            model.audio_bytes,
            "the encoder and the caches of cross attention (audio.cache_windows)",
        ),
        (
            "sounds",
            model.sound_bytes,
            "the audio encoder and the table of embeddings (audio.cache_tokens)",
        ),
    )
    texts = [
        f"{name}: {_size(size)} of the weights are {what}" for name, size, what in parts if size
    ]
    if model.uncounted:
        texts.append(
            f"{model.uncounted}: not counted and not taken, because the files of the processor are "
            "missing; set model.path to a directory that has them"
        )
    return texts


def _room(plan: MemoryPlan, model: ModelFootprint) -> int:
    """Bytes that the budget leaves for KV blocks.

    Raises:
        StartupError: there is no room for the null block and one usable block.
    """
    room = plan.budget_bytes - plan.fixed_bytes
    if room < 2 * plan.bytes_per_block:
        remedies = [*_table_remedies(model, 2 * plan.bytes_per_block - room), "use a smaller model"]
        tiers = f"buffers of KV tiers {_size(plan.tier_bytes)}, " if plan.tier_bytes else ""
        raise StartupError(
            f"not enough memory: {_size(plan.budget_bytes)} planned of {_size(plan.free_bytes)} "
            f"free, weights need {_size(plan.weights_bytes)}, activations "
            f"{_size(plan.activation_bytes)}, graphs {_size(plan.graph_bytes)}, {tiers}"
            f"two KV blocks {_size(2 * plan.bytes_per_block)}; {', or '.join(remedies)}, "
            f"model.dtype=bfloat16, a higher device.memory_fraction or a lower "
            f"scheduler.max_num_batched_tokens"
        )
    return room


def _table_remedies(model: ModelFootprint, missing_bytes: int) -> list[str]:
    """To lower the size of the table, if that frees enough or the table is most of the weights.

    Args:
        model: has the size of the table.
        missing_bytes: what the plan lacks.
    """
    table = model.media_table_bytes
    if not table or table < min(missing_bytes, model.weights_bytes / 2):
        return []
    return [f"lower {model.media_setting}, whose table is {_size(table)} of the weights"]


def _kv_bytes(
    room: int, *, one_sequence: int, all_sequences: int, is_cpu: bool, memory_gib: float | None
) -> tuple[int, str]:
    """Choose the bytes for KV blocks, the null block included. Returns the reason too.

    Raises:
        StartupError: cache.memory_gib is more than `room`.
    """
    if memory_gib is not None:
        wanted = int(memory_gib * GIB)
        if wanted > room:
            raise StartupError(
                f"cache.memory_gib={memory_gib:g}, but {room / GIB:.2f} GiB are left for KV "
                f"blocks; lower cache.memory_gib or raise device.memory_fraction"
            )
        return wanted, f"KV cache: cache.memory_gib={memory_gib:g}"
    if not is_cpu:
        return room, "KV cache: all that is left of the budget"
    wanted = min(room, max(CPU_KV_BYTES, min(one_sequence, room // 2)))
    if all_sequences <= wanted:
        return all_sequences, "KV cache: scheduler.max_num_seqs sequences of full length fit"
    if wanted == room:
        return room, "KV cache: all that is left of the budget"
    return wanted, (
        f"KV cache: {_size(wanted)} of {_size(room)} that are left, as a CPU's memory belongs to "
        f"other programs too; set cache.memory_gib for more"
    )


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
    if longest > 0:
        remedies.append(f"lower model.max_model_len to at most {longest}")
    if plan.is_step_large:
        remedies.append(_SMALLER_STEP)
    if need <= room:
        remedies.append(f"set cache.memory_gib={math.ceil(need / GIB * 1000) / 1000:g}")
    else:
        remedies += _table_remedies(model, need - room)
    remedies.append("use a smaller model or a higher device.memory_fraction")
    raise StartupError(
        f"not enough memory for one sequence of {length} tokens: its KV blocks need {_size(need)}, "
        f"and {_size(plan.kv_bytes)} are planned; {', or '.join(remedies)}"
    )


def _size(num_bytes: float) -> str:
    return (
        f"{num_bytes / GIB:.2f} GiB"
        if num_bytes >= GIB / 10
        else f"{num_bytes / (1 << 20):.1f} MiB"
    )


def free_memory(*, is_cpu: bool) -> FreeMemory:
    """The memory that this process can still allocate, on the current CUDA device or the host."""
    if is_cpu:
        return free_host_memory()
    import torch

    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return FreeMemory(total_bytes=total, free_bytes=free, source=name)
