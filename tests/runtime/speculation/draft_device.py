"""A simulated draft model: it draws the target's tokens, each wrong with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from ostinato.conf.sections.speculation_schema import SpeculationConfig, SpeculationMethod
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.memory.group_choice import draft_groups
from ostinato.runtime.speculation.model_drafter import ModelDrafter
from ostinato.runtime.speculation.proposer import Draft, DraftJob
from ostinato.runtime.speculation.text_drafter import TextDrafter
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput
from tests.runtime.simulated_device import VOCAB_SIZE, SimulatedDevice


class DraftDevice(SimulatedDevice):
    """Computes the target's tokens if its KV memory is right, and alters some of them.

    Unlike the target's rows, its rows may go back to an earlier position, and two rows may write
    the same entries to a block that they share.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        accuracy: float,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
    ) -> None:
        super().__init__(total_blocks, block_size, groups=draft_groups(groups))
        # Its layers keep all tokens, and compute what the target's layers compute.
        self.memory.windows = (groups[0].window, groups[-1].window)
        self.accuracy = accuracy
        self.num_tokens = 0
        self.num_drawn = self.num_unaltered = 0

    def written_slots(self, output: SchedulerOutput) -> set[tuple[int, int]]:
        self.num_tokens += output.num_tokens
        return {(0, index) for index in range(output.num_tokens)}  # the caller only counts them

    def _accept(self, entry: ScheduledSequence) -> None:
        row = self.rows[entry.row]
        assert row.num_computed_tokens is None or entry.start <= row.num_computed_tokens
        row.tables[0] += entry.new_block_ids
        row.num_computed_tokens = entry.start + entry.num_new_tokens
        assert row.num_computed_tokens <= len(row.tables[0]) * self.memory.sizes[0]

    def _sample(self, entry: ScheduledSequence) -> list[int]:
        (token,) = super()._sample(entry)
        position = entry.start + entry.num_new_tokens
        name = f"{self.rows[entry.row].request_id}/{position}"
        is_right = crc32(name.encode()) % 1009 / 1009 < self.accuracy
        self.num_drawn += 1
        self.num_unaltered += is_right
        return [token if is_right else (token + 1) % VOCAB_SIZE]


class SimulatedDrafter(ModelDrafter):
    """A `ModelDrafter` over a `DraftDevice`.

    Attributes:
        device: the draft model.
        live: requests that have got drafts and were not forgotten since.
        outputs: set by `SimulatedEngine`, as for every drafter, but not read.
    """

    def __init__(
        self,
        *,
        total_blocks: int,
        block_size: int,
        accuracy: float,
        max_model_len: int,
        max_num_tokens: int = 64,
        costs: CostTable | None = None,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
    ) -> None:
        self.device = DraftDevice(total_blocks, block_size, accuracy, groups)
        self.live: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        super().__init__(
            self.device.execute,
            block_size=block_size * groups[0].units,
            units=groups[0].units,
            max_drafts=3,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            texts=TextDrafter(SpeculationConfig(method=SpeculationMethod.draft, model="simulated")),
            costs=costs,
        )

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        self.live.add(request.request_id)
        return super().propose(request, token_ids, most)

    def draw(self, jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
        drafts = super().draw(jobs, most_tokens)
        assert all(len(draft) <= job.count for job, draft in zip(jobs, drafts, strict=True))
        return drafts

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.live.discard(request_id)
