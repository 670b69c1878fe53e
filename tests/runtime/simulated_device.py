"""A runner without tensors: executes scheduler outputs on a simulated paged KV memory.

The model has two layers. A token's first-layer entry is (token, position, salt). Its second-layer
entry is a digest of the row's first-layer entries up to its position, read through the block table.
Its output is a digest of the second-layer entries, read the same way. A layer with a window reads
the last entries only. With slots for states there is a third layer, which is recurrent
(simulated_states.py). As in the real op, a layer writes all entries of a step before any row reads.
The tests look for a table that shares the wrong block, a block that is reused too early, a position
that is computed twice or never, and a block that is shared between salts. Each of these mistakes
changes a digest, and with it a token.

`reference_output` gives the same tokens from a plain list, without blocks, batches or steps.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.scheduling.sequences.beam_search import BeamSearch, num_candidates
from ostinato.runtime.types.outputs import BeamOutput, FinishReason, TokenLogprobs
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import (
    BlockTransfer,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)
from tests.runtime.simulated_memory import Digests, Entry, SimulatedMemory, mix
from tests.runtime.simulated_states import SimulatedStates

VOCAB_SIZE = 7
EOS = 0
NO_WINDOWS = (0, 0)


def salt_number(request: Request) -> int:
    """The request's salt and its audio as an integer, so that digests depend on them."""
    audio = b"" if request.audio is None else request.audio.digest
    return int.from_bytes(request.cache_salt.encode() + audio)


def to_token(digest: int) -> int:
    """The greedy token of an output digest."""
    return (digest >> 7) % VOCAB_SIZE


def to_score(digest: int, next_token: int) -> TokenLogprobs:
    """A made-up log-probability of a prompt token, computed from the output digest before it."""
    return TokenLogprobs(float(digest % 1000), next_token, [], [])


def reference_prompt_scores(
    request: Request, windows: tuple[int, int] = NO_WINDOWS
) -> list[TokenLogprobs] | None:
    """The scores of all prompt tokens after the first, from a plain list; None = not requested."""
    if request.sampling.prompt_logprobs is None:
        return None
    first, second = map(Digests, windows)
    scores = []
    prompt = request.prompt_token_ids
    for position, token in enumerate(prompt[:-1]):
        second.add(first.add((token, position, salt_number(request))))
        scores.append(to_score(second.digest, prompt[position + 1]))
    return scores


def to_candidates(digest: int, count: int) -> TokenLogprobs:
    """Made-up likeliest tokens after an output digest; all tokens' probabilities add up to 1."""
    weights = [(mix(digest, token) >> 5) % 97 + 1 for token in range(VOCAB_SIZE)]
    logprobs = [math.log(weight / sum(weights)) for weight in weights]
    ids = sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])[:count]
    values = [logprobs[token] for token in ids]
    return TokenLogprobs(values[0], 1, ids, values)


def reference_beams(
    request: Request, max_model_len: int, windows: tuple[int, int] = NO_WINDOWS
) -> list[BeamOutput]:
    """Results of a beam search that computes every beam from a plain list."""
    num_prompt_tokens = len(request.prompt_token_ids)
    max_tokens = request.sampling.max_tokens or max_model_len
    search = BeamSearch(request, min(max_tokens, max_model_len - num_prompt_tokens))
    while not search.is_done:
        for beam in search.beams:
            first, second = map(Digests, windows)
            for position, token in enumerate([*request.prompt_token_ids, *beam.token_ids]):
                second.add(first.add((token, position, salt_number(request))))
            beam.candidates = to_candidates(second.digest, num_candidates(request))
        search.beams = [move.beam.continued(move) for move in search.advance()]
    return search.results()


def reference_output(
    request: Request, max_model_len: int, windows: tuple[int, int] = NO_WINDOWS
) -> tuple[list[int], FinishReason, int | None]:
    """Output tokens, finish reason and stop reason of a request that runs alone, uncached."""
    sampling = request.sampling
    tokens = list(request.prompt_token_ids)
    num_prompt_tokens, position = len(tokens), 0
    first, second = map(Digests, windows)
    salt = salt_number(request)
    while True:
        for token in tokens[position:]:
            second.add(first.add((token, position, salt)))
            position += 1
        token = to_token(second.digest)
        tokens.append(token)
        output = tokens[num_prompt_tokens:]
        if len(output) >= sampling.min_tokens:
            if token in request.eos_token_ids and not sampling.ignore_eos:
                return output, FinishReason.stop, None
            if token in sampling.stop_token_ids:
                return output, FinishReason.stop, token
        if len(output) == sampling.max_tokens or len(tokens) == max_model_len:
            return output, FinishReason.length, None


@dataclass
class Row:
    """What the device stores for one row."""

    request_id: str
    salt: int
    # The block table of each group of layers.
    tables: list[list[int]] = field(default_factory=lambda: [[], []])
    num_computed_tokens: int | None = None  # None until the first step after its admission
    last_token: int | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    num_candidates: int = 0  # how many of the likeliest tokens a beam search asks for
    held_at: int | None = None  # the position that gave no token and is to be computed again
    num_holds: int = 0  # consecutive steps without a token

    def input_of(self, entry: ScheduledSequence) -> list[int]:
        """The tokens that an entry of this row computes."""
        return entry.token_ids or [-1 if self.last_token is None else self.last_token]


class SimulatedDevice:
    """Executes steps in the order in which they come, like one stream of a real device.

    Loads end when `finish_loads` is called; until then no step may touch their blocks.

    With `hold_seed`, rows get no token at random steps, at most at two consecutive ones. They
    behave like rows that wait for the masks of their grammars.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        hold_seed: int | None = None,
        groups: tuple[KVGroup, ...] = WHOLE_CACHE,
        num_states: int = 0,
    ) -> None:
        self.states = SimulatedStates(num_states) if num_states else None
        self._holds = None if hold_seed is None else random.Random(hold_seed)
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.rows: dict[int, Row] = {}
        self.loads: list[BlockTransfer] = []  # loads that have not ended
        # The hash and the contents of each place in the tiers.
        self._tiers: dict[int, tuple[bytes, tuple[list[Entry], ...]]] = {}
        self._num_stored = 0
        self.lost_places: list[int] = []  # places of stores that failed; every ninth fails
        self.memory = SimulatedMemory(total_blocks, block_size, groups)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run a step; returns the tokens of the rows that sample."""
        self.transfer(output)
        for admitted in output.admitted:
            request = admitted.request
            self.rows[admitted.row] = Row(
                request.request_id,
                salt_number(request),
                prompt_token_ids=request.prompt_token_ids,
                num_candidates=(num_candidates(request) if request.sampling.use_beam_search else 0),
            )
            if self.states is not None:
                tokens = [*request.prompt_token_ids, *admitted.output_token_ids]
                self.states.admit(admitted.row, salt_number(request), tokens)
        self.memory.copy(output.block_copies)
        for entry in output.scheduled:
            self._accept(entry)
        num_written = len(self.written_slots(output))
        assert num_written == output.num_tokens, "two rows write to one slot"
        if self.states is not None:
            rows = [(entry, self.rows[entry.row]) for entry in output.scheduled]
            self.states.run([(e, row.input_of(e), row.held_at is not None) for e, row in rows])
        for entry in output.scheduled:
            self._write_first(entry)
        digests = {entry.row: self._attend_first(entry) for entry in output.scheduled}
        for entry in output.scheduled:
            for position, digest in enumerate(digests[entry.row], entry.start):
                self.memory.write(self.rows[entry.row].tables, 1, position, digest)
        sampling = [entry for entry in output.scheduled if entry.num_logits]
        tokens = [self._sample(entry) for entry in sampling]
        has_counts = output.num_drafts or not all(tokens)
        counts = [len(some) for some in tokens] if has_counts else None
        candidates = [
            self._candidates(entry)
            for entry, some in zip(sampling, tokens, strict=True)
            for _ in some
        ]
        scores = [self._score(entry) for entry in output.scheduled if entry.num_prompt_logits]
        assert sum(map(len, scores)) == output.num_prompt_logits
        return StepResult(
            [token for some in tokens for token in some],
            candidates if any(candidates) else None,
            prompt_logprobs=scores or None,
            counts=counts,
        )

    def finish_loads(self) -> list[tuple[int, int]]:
        """End all loads; returns (transfer id, number of blocks) of each.

        Every third load fails in its middle, like one of a damaged file.
        """
        ended, self.loads = self.loads, []
        counts: list[tuple[int, int]] = []
        for load in ended:
            count = len(load.places) // (2 if load.transfer_id % 3 == 0 else 1)
            missing = [i for i in range(count) if load.places[i] not in self._tiers]
            count = missing[0] if missing else count
            counts.append((load.transfer_id, count))
            for index in range(count):
                stored_hash, contents = self._tiers[load.places[index]]
                assert stored_hash == load.hashes[index], "a place has other contents"
                self.memory.load(load.block_ids[index], contents)
        return counts

    def transfer(self, output: SchedulerOutput) -> None:
        """Make the stores of a step, and begin its loads."""
        for transfer in output.transfers:
            assert len(transfer.block_ids) == len(transfer.places) == len(transfer.hashes) > 0
            if transfer.is_load:
                self.loads.append(transfer)
                continue
            stored = zip(transfer.block_ids, transfer.places, transfer.hashes, strict=True)
            for block_id, place, block_hash in stored:
                assert place not in [p for load in self.loads for p in load.places]
                contents = self.memory.save(block_id)
                assert None not in contents[1], "a block is copied before it is full"
                self._tiers[place] = (block_hash, contents)
                self._num_stored += 1
                if self._num_stored % 9 == 0:
                    del self._tiers[place]
                    self.lost_places.append(place)

    def written_slots(self, output: SchedulerOutput) -> set[tuple[int, int]]:
        """Slots of the memory that a step's first layer writes."""
        return {
            self.memory.place(self.rows[entry.row].tables, 0, position)
            for entry in output.scheduled
            for position in range(entry.start, entry.start + entry.num_new_tokens)
        }

    def _accept(self, entry: ScheduledSequence) -> None:
        row = self.rows[entry.row]
        row.tables[0] += entry.new_block_ids
        row.tables[1] += entry.new_window_block_ids
        loaded = {block_id for load in self.loads for block_id in load.block_ids}
        assert not loaded.intersection(row.tables[0]), "a block is used before it is loaded"
        if self.memory.groups == WHOLE_CACHE:
            table = row.tables[0]
            assert len(set(table)) == len(table), "a block is in a table twice"
            assert all(0 < block_id < self.total_blocks for block_id in table)
        if row.num_computed_tokens is None:
            inside = entry.start % self.block_size
            assert not inside or row.num_candidates, "a prefix hit ends inside a block"
        elif entry.is_repeated:
            assert entry.start == row.held_at, "the repeated position has given a token"
            assert len(entry.token_ids) == entry.num_new_tokens == 1
            row.held_at = None
        elif row.held_at is not None and entry.token_ids and self.states is not None:
            assert entry.start < row.held_at, "states go back to a checkpoint"
            row.held_at = None
        else:
            assert entry.start == row.num_computed_tokens, "a position is skipped or repeated"
        assert entry.num_new_tokens >= 1
        row.num_computed_tokens = entry.start + entry.num_new_tokens
        for size, table in zip(self.memory.sizes, row.tables, strict=False):
            assert row.num_computed_tokens <= len(table) * size
        if entry.token_ids:
            assert len(entry.token_ids) == entry.num_new_tokens
        else:
            assert entry.num_new_tokens == 1
            assert row.last_token is not None, "a row reads a token that it never sampled"

    def _write_first(self, entry: ScheduledSequence) -> None:
        row = self.rows[entry.row]
        for position, token in enumerate(row.input_of(entry), entry.start):
            self.memory.write(row.tables, 0, position, (token, position, row.salt))

    def _attend_first(self, entry: ScheduledSequence) -> list[int]:
        """Second-layer entries of the row's new positions."""
        tables = self.rows[entry.row].tables
        positions = range(entry.start, entry.start + entry.num_new_tokens)
        return self.memory.digests(tables, 0, positions)

    def _candidates(self, entry: ScheduledSequence) -> TokenLogprobs | None:
        count = self.rows[entry.row].num_candidates
        if not count:
            return None
        digest = self._attend_second(entry.row, entry.start + entry.num_new_tokens)
        return to_candidates(digest, count)

    def _score(self, entry: ScheduledSequence) -> list[TokenLogprobs]:
        prompt = self.rows[entry.row].prompt_token_ids
        return [
            to_score(self._attend_second(entry.row, position + 1), prompt[position + 1])
            for position in range(entry.start, entry.start + entry.num_prompt_logits)
        ]

    def _attend_second(self, row: int, num_tokens: int) -> int:
        positions = range(num_tokens - 1, num_tokens)
        return self.memory.digests(self.rows[row].tables, 1, positions)[0]

    def _sample(self, entry: ScheduledSequence) -> list[int]:
        """The entry's tokens up to the first that differs from its draft; [] if the row waits."""
        row, tokens = self.rows[entry.row], []
        if row.held_at is not None:
            return []  # the step was planned as if the step before had given a token
        if self._holds is not None and not row.num_candidates:
            row.num_holds = (row.num_holds + 1) * (self._holds.random() < 0.3) % 3
            if row.num_holds:
                row.held_at = entry.start + entry.num_new_tokens - 1 - entry.num_drafts
                row.last_token = -5  # an id that no sequence has
                return []
        first = entry.num_new_tokens - 1 - entry.num_drafts
        for index in range(first, entry.num_new_tokens):
            token = to_token(self._attend_second(entry.row, entry.start + index + 1))
            tokens.append(token)
            if entry.token_ids[index + 1 : index + 2] != [token]:
                break
        row.last_token = tokens[-1]
        if entry.num_drafts:
            row.num_computed_tokens = entry.start + len(tokens)
            if self.states is not None:
                self.states.verify(entry, len(tokens))
                if len(tokens) <= entry.num_drafts:  # the states go back behind the first draft
                    row.num_computed_tokens = entry.start + 1
        return tokens
