"""Runs steps of a model without an engine, from lists of (sequence, number of tokens).

A `Driver` owns a cache and block tables. `step` computes the listed number of further tokens of
each listed sequence. A list can mix whole prompts, chunks of prompts and decodes. With KV groups,
blocks that lie outside of the window are given to other sequences. Until then they hold NaN.

With recurrent layers, each sequence has a slot for its states. A step that goes past the end of a
block keeps the states at the last such end in a slot of their own, from which another sequence can
continue. Slots that are not written yet hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.models.base import CausalLM
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import KVCache
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.step_tensors import ForwardBatch

Forward = Callable[[ForwardBatch, KVCache], Tensor]


class Sequence:
    """Tokens, how many of them are computed, and the blocks of their keys and values."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = list(token_ids)
        self.adapter_slot = -1  # of the model's low-rank adapters; -1 = none
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.window_block_ids: list[int] = []  # of the second group
        self.num_freed = [0, 0]  # blocks of each group
        self.state_slot = 0  # the slot of its states; 0 = it begins
        self.write_slot = 0  # the slot that its steps write
        self.checkpoints: dict[int, int] = {}  # tokens -> the slot of the states after them


class Driver:
    """A model, its cache and the rows of a batch; every step pads to `max_seqs` rows."""

    block_size = 8  # small, so that short prompts fill several blocks

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        *,
        forward: Forward | None = None,
        num_blocks: int = 128,
        max_seqs: int = 3,
        max_len: int = 256,
        pad_to: int = 2,
        dtype: torch.dtype | None = None,
        shard: Shard = WHOLE,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
    ) -> None:
        self.model = model
        self.forward = forward or model
        self.max_seqs = max_seqs
        self.pad_to = pad_to  # the fewest tokens of a step: no graph is compiled for one token
        self.max_len = max_len
        self.groups = groups
        matrices = (module for module in model.modules() if isinstance(module, LinearBase))
        self.dtype = dtype or next(matrices).spec.dtype
        spec = config.kv_cache_spec(self.block_size, self.dtype, shard=shard, groups=groups)
        num_states = 128 if spec.recurrent is not None else 0
        self.cache = spec.allocate(num_blocks, torch.device("cpu"), num_states)
        self.has_states = spec.recurrent is not None
        self.free_slots = list(range(1, num_states))
        if spec.recurrent is not None:
            for states, is_recurrent in zip(self.cache, spec.recurrent.layers, strict=True):
                for each in states if is_recurrent else ():
                    each.fill_(torch.nan)
        # Blocks are handed out from the end, so that no sequence has the blocks 1, 2, 3, ...
        self.free_blocks = list(range(1, num_blocks))

    def adopt(self, sequence: Sequence, other: Sequence, num_tokens: int) -> None:
        """Start `sequence` with the full blocks of `other`'s first tokens: a prefix-cache hit."""
        assert num_tokens % self.block_size == 0, "only full blocks can be shared"
        assert self.groups == WHOLE_CACHE, "the blocks of a window can be free"
        assert sequence.token_ids[:num_tokens] == other.token_ids[:num_tokens], "prefixes differ"
        sequence.block_ids = other.block_ids[: num_tokens // self.block_size]
        sequence.state_slot = other.checkpoints.get(num_tokens, 0)
        sequence.num_computed = num_tokens

    def batch(self, scheduled: list[tuple[Sequence, int]]) -> ForwardBatch:
        """The tensors of a step; padding tokens go to block 0."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self.groups]
        starts = [0]
        lengths: list[int] = []
        adapters: list[int] = []
        sizes = [group.units * self.block_size for group in self.groups]
        tables = [
            torch.zeros(self.max_seqs, -(-self.max_len // size), dtype=torch.int32)
            for size in sizes
        ]
        for row, (sequence, num_tokens) in enumerate(scheduled):
            end = sequence.num_computed + num_tokens
            for index, (group, size) in enumerate(zip(self.groups, sizes, strict=True)):
                block_ids = (sequence.block_ids, sequence.window_block_ids)[index]
                while len(block_ids) * size < end:
                    block_ids.append(self.free_blocks.pop())
                tables[index][row, : len(block_ids)] = torch.tensor(block_ids) * group.pieces
                slots[index] += [
                    block_ids[position // size] * group.pieces * size + position % size
                    for position in range(sequence.num_computed, end)
                ]
            for position in range(sequence.num_computed, end):
                token_ids.append(sequence.token_ids[position])
                positions.append(position)
                adapters.append(sequence.adapter_slot)
            starts.append(len(token_ids))
            lengths.append(end)
        state_slots = [self.states(sequence, num_tokens) for sequence, num_tokens in scheduled]
        state_slots += [(0, 0, 0, 0)] * (self.max_seqs - len(scheduled))
        padding = max(0, self.pad_to - len(token_ids))
        starts += [starts[-1]] * (self.max_seqs + 1 - len(starts))
        lengths += [0] * (self.max_seqs - len(lengths))
        return ForwardBatch(
            token_ids=torch.tensor(token_ids + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            slot_mapping=torch.tensor(slots[0] + [0] * padding),
            logits_indices=torch.arange(len(token_ids) + padding),
            sampled_rows=torch.arange(len(token_ids) + padding),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=tables[0],
            plan=torch.zeros(1, dtype=torch.int64),
            adapter_slots=torch.tensor([adapters + [-1] * padding], dtype=torch.int32).t()
            if max(adapters) >= 0
            else None,
            window_block_table=tables[1] if len(tables) > 1 else None,
            window_slot_mapping=torch.tensor(slots[1] + [0] * padding) if len(slots) > 1 else None,
            state_slots=torch.tensor(state_slots, dtype=torch.int32) if self.has_states else None,
        )

    def states(self, sequence: Sequence, num_tokens: int) -> tuple[int, int, int, int]:
        """The sequence's row of `state_slots` for a step of this many tokens."""
        if not self.has_states:
            return 0, 0, 0, 0
        if not sequence.write_slot:
            sequence.write_slot = self.free_slots.pop()
        begin, end = sequence.num_computed, sequence.num_computed + num_tokens
        kept = (end - 1) // self.block_size * self.block_size
        if kept <= begin or len(self.free_slots) < 64:  # the others are for sequences
            return sequence.state_slot, sequence.write_slot, 0, 0
        slot = sequence.checkpoints.setdefault(kept, self.free_slots.pop())
        return sequence.state_slot, sequence.write_slot, slot, kept - begin

    @torch.no_grad()
    def step(self, scheduled: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Compute tokens; returns logits [num_tokens, vocab_size] of each scheduled sequence."""
        batch = self.batch(scheduled)
        hidden = self.forward(batch, self.cache)
        logits = self.model.compute_logits(hidden)
        for sequence, num_tokens in scheduled:
            sequence.num_computed += num_tokens
            sequence.state_slot = sequence.write_slot
            self.free_behind_window(sequence)
        sizes = [num_tokens for _, num_tokens in scheduled]
        return list(logits[: sum(sizes)].split(sizes))

    def free_behind_window(self, sequence: Sequence) -> None:
        """Free the blocks that the next token does not see, and fill them with NaN."""
        for index, group in enumerate(self.groups):
            if not group.window:
                continue
            block_ids = (sequence.block_ids, sequence.window_block_ids)[index]
            size = group.units * self.block_size
            end = max(0, sequence.num_computed + 1 - group.window) // size
            freed = block_ids[sequence.num_freed[index] : end]
            sequence.num_freed[index] = max(end, sequence.num_freed[index])
            for page in self.cache.pages:
                page.view(torch.uint8)[freed] = 255  # all bits set are NaN in every dtype
            self.free_blocks += freed

    def prefill(self, sequence: Sequence, chunks: list[int]) -> Tensor:
        """Compute the rest of a prompt in steps of these sizes; returns all their logits."""
        todo = len(sequence.token_ids) - sequence.num_computed
        assert sum(chunks) == todo, f"{chunks} do not add up to {todo} tokens"
        return torch.cat([self.step([(sequence, size)])[0] for size in chunks])

    def greedy(self, sequence: Sequence, last_logits: Tensor, num_tokens: int) -> list[int]:
        """Continue with the likeliest token; `last_logits` belong to the last computed position."""
        generated: list[int] = []
        for _ in range(num_tokens):
            token = int(last_logits.argmax())
            generated.append(token)
            sequence.token_ids.append(token)
            last_logits = self.step([(sequence, 1)])[0][-1]
        return generated
