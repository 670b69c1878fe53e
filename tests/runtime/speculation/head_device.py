"""A simulated head: its draft is right if its cache and its hidden states are right.

The hidden state of a position represents all tokens up to that position. The head checks that the
states it reads belong together. From them it derives the token that the simulated target draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ostinato.conf.sections.speculation_schema import SpeculationConfig, SpeculationMethod
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.execution.hidden_states import KeptStates, Span
from ostinato.runtime.speculation.head_drafter import HeadDrafter
from ostinato.runtime.speculation.proposer import Draft
from ostinato.runtime.speculation.text_drafter import TextDrafter
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput, StepResult
from tests.runtime.simulated_device import SimulatedDevice, to_token
from tests.runtime.simulated_memory import Digests

_Hidden = tuple[tuple[int, int, int], ...]  # (token, position, salt) of all positions so far


class _Entry(NamedTuple):
    """The content of the head's cache at one position."""

    hidden: _Hidden
    token: int  # the token after the position


class TappedDevice(SimulatedDevice):
    """A target that gives the hidden states of its steps to a head."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        head: SimulatedHead,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
    ) -> None:
        super().__init__(total_blocks, block_size, groups=groups)
        self._head = head

    def execute(self, output: SchedulerOutput) -> StepResult:
        result = super().execute(output)
        states: list[_Hidden] = []
        for entry in output.scheduled:
            end = entry.start + entry.num_new_tokens
            context: list[tuple[int, int, int]] = []
            for position in range(end):
                value = self.memory.read(self.rows[entry.row].tables, 0, position)
                assert isinstance(value, tuple)
                context.append(value)
                if position >= entry.start:
                    states.append(tuple(context))
        self._head.store(output.scheduled, states)
        return result


class SimulatedHead:
    """Implements `DraftHead`. The tensors of `states` hold indices into `_known`."""

    def __init__(self, block_size: int, states: KeptStates, windows: tuple[int, int]) -> None:
        self._block_size = block_size
        self._windows = windows
        self._states = states
        self._known: list[_Hidden] = []
        self._memory: dict[int, _Entry] = {}
        self._tables: dict[int, list[int]] = {}
        self._outputs: list[_Hidden] = []
        self.num_tokens = 0
        self.longest = 0

    def store(self, scheduled: Sequence[ScheduledSequence], states: list[_Hidden]) -> None:
        first = len(self._known)
        self._known += states
        numbers = torch.arange(first, len(self._known) + 2)[:, None]  # with two rows of padding
        self._states.store(scheduled, [numbers])

    def watch(self, row: int) -> None:
        self._states.watch(row)

    def unwatch(self, row: int) -> None:
        self._states.unwatch(row)

    def span(self, row: int) -> tuple[int, int]:
        return self._states.span(row)

    def compute(self, output: SchedulerOutput, begins: Sequence[int]) -> list[int]:
        given: list[list[_Hidden]] = []
        for entry, begin in zip(output.scheduled, begins, strict=True):
            span = Span(entry.row, begin, begin + entry.num_new_tokens)
            numbers = self._states.take([span])
            hidden = [self._known[number] for number in numbers.flatten().tolist()]
            assert [len(one) for one in hidden] == list(
                range(begin + 1, begin + 1 + entry.num_new_tokens)
            )
            given.append(hidden)
        return self._run(output, given)

    def extend(self, output: SchedulerOutput, kept: Sequence[int]) -> list[int]:
        return self._run(output, [[self._outputs[index]] for index in kept])

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _run(self, output: SchedulerOutput, given: list[list[_Hidden]]) -> list[int]:
        for admitted in output.admitted:
            self._tables[admitted.row] = []
        assert sum(entry.num_new_tokens for entry in output.scheduled) == output.num_tokens
        self.num_tokens += output.num_tokens
        for entry, hidden in zip(output.scheduled, given, strict=True):
            self._tables[entry.row] += entry.new_block_ids
            for place, (state, token) in enumerate(zip(hidden, entry.token_ids, strict=True)):
                slot = self._slot(entry.row, entry.start + place)
                self._memory[slot] = _Entry(state, token)
        drawing = [entry for entry in output.scheduled if entry.num_logits]
        self._outputs = [self._output(entry) for entry in drawing]
        return [self._draw(hidden) for hidden in self._outputs]

    def _slot(self, row: int, position: int) -> int:
        block_id = self._tables[row][position // self._block_size]
        return block_id * self._block_size + position % self._block_size

    def _output(self, entry: ScheduledSequence) -> _Hidden:
        """The last position's hidden state, extended by the token after it."""
        end = entry.start + entry.num_new_tokens
        self.longest = max(self.longest, end)
        context = [self._memory[self._slot(entry.row, position)] for position in range(end)]
        last, first = context[-1], len(context[0].hidden)
        for position, one in enumerate(context):
            assert one.hidden == last.hidden[: first + position], "an entry of another text"
            is_shared = (position + 1) % self._block_size == 0  # the token after a block may differ
            following = last.hidden[first + position : first + position + 1]
            assert is_shared or not following or one.token == following[0][0]
        _, position, salt = last.hidden[-1]
        return (*last.hidden, (last.token, position + 1, salt))

    def _draw(self, hidden: _Hidden) -> int:
        first, second = map(Digests, self._windows)
        for entry in hidden:
            second.add(first.add(entry))
        return to_token(second.digest)


class SimulatedHeadDrafter(HeadDrafter):
    """A `HeadDrafter` over a `SimulatedHead`.

    Attributes:
        simulated: the head.
        live: requests that have got drafts and were not forgotten since.
        outputs: set by `SimulatedEngine`, as for every drafter, but not read.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_model_len: int,
        max_num_tokens: int,
        states: KeptStates,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
    ) -> None:
        units = groups[0].units
        windows = groups[0].window, groups[-1].window
        self.simulated = SimulatedHead(block_size * units, states, windows)
        self.live: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        method = SpeculationMethod.eagle3
        super().__init__(
            self.simulated,
            block_size=block_size * units,
            units=units,
            max_drafts=3,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            texts=TextDrafter(SpeculationConfig(method=method, model="simulated")),
        )

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        self.live.add(request.request_id)
        return super().propose(request, token_ids, most)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.live.discard(request_id)
