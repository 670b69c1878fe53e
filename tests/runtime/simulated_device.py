"""A runner without tensors: executes scheduler outputs on a simulated paged KV memory.

The model has two layers. A token's first-layer entry is (token, position, salt). Its second-layer
entry is a digest of all first-layer entries that its row sees, read through the block table, and
its output is a digest of all second-layer entries read the same way. As in the real op, a layer
writes all entries of a step before any row reads. So a table that shares the wrong block, a block
that is reused too early, a position that is computed twice or never, a block that crosses salts:
each changes a digest, and with it a token.

`reference_output` gives the same tokens from a plain list, without blocks, batches or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.runtime.types import (
    FinishReason,
    Request,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)

VOCAB_SIZE = 7
EOS = 0


def mix(digest: int, entry: object) -> int:
    """One step of a rolling digest; stable between processes for what is made of integers."""
    return hash((digest, entry))


def salt_number(request: Request) -> int:
    """The request's salt as an integer, so that digests depend on it."""
    return int.from_bytes(request.cache_salt.encode())


def to_token(digest: int) -> int:
    """The greedy token of an output digest."""
    return (digest >> 7) % VOCAB_SIZE


def reference_output(
    request: Request, max_model_len: int
) -> tuple[list[int], FinishReason, int | None]:
    """Output tokens, finish reason and stop reason of a request that runs alone, uncached."""
    sampling = request.sampling
    tokens = list(request.prompt_token_ids)
    num_prompt_tokens, position, first, second = len(tokens), 0, 0, 0
    salt = salt_number(request)
    while True:
        for token in tokens[position:]:
            first = mix(first, (token, position, salt))
            second = mix(second, first)
            position += 1
        token = to_token(second)
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
    """What the device knows of a row."""

    request_id: str
    salt: int
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int | None = None  # None until the first step after its admission
    last_token: int | None = None


class SimulatedDevice:
    """Executes steps in the order in which they come, like one stream of a real device."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.rows: dict[int, Row] = {}
        self._first: list[tuple[int, int, int] | None] = [None] * (total_blocks * block_size)
        self._second: list[int | None] = [None] * (total_blocks * block_size)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """One step: the tokens of the rows that sample."""
        for admitted in output.admitted:
            request = admitted.request
            self.rows[admitted.row] = Row(request.request_id, salt_number(request))
        for entry in output.scheduled:
            self._accept(entry)
        num_written = len(self.written_slots(output))
        assert num_written == output.num_tokens, "two rows write to one slot"
        for entry in output.scheduled:
            self._write_first(entry)
        digests = {entry.row: self._attend_first(entry) for entry in output.scheduled}
        for entry in output.scheduled:
            for position, digest in enumerate(digests[entry.row], entry.start):
                self._second[self._slot(entry.row, position)] = digest
        token_ids = [self._sample(entry) for entry in output.scheduled if entry.samples]
        return StepResult(token_ids)

    def written_slots(self, output: SchedulerOutput) -> set[int]:
        """Slots of the memory that a step writes."""
        return {
            self._slot(entry.row, position)
            for entry in output.scheduled
            for position in range(entry.start, entry.start + entry.num_new_tokens)
        }

    def _accept(self, entry: ScheduledSequence) -> None:
        row = self.rows[entry.row]
        row.block_table += entry.new_block_ids
        assert len(set(row.block_table)) == len(row.block_table), "a block is in a table twice"
        assert all(0 < block_id < self.total_blocks for block_id in row.block_table)
        if row.num_computed_tokens is None:
            assert entry.start % self.block_size == 0, "a prefix hit ends inside a block"
        else:
            assert entry.start == row.num_computed_tokens, "a position is skipped or repeated"
        assert entry.num_new_tokens >= 1
        row.num_computed_tokens = entry.start + entry.num_new_tokens
        assert row.num_computed_tokens <= len(row.block_table) * self.block_size
        if entry.token_ids:
            assert len(entry.token_ids) == entry.num_new_tokens
        else:
            assert entry.num_new_tokens == 1
            assert row.last_token is not None, "a row reads a token that it never sampled"

    def _slot(self, row: int, position: int) -> int:
        block_id = self.rows[row].block_table[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def _write_first(self, entry: ScheduledSequence) -> None:
        row = self.rows[entry.row]
        token_ids = entry.token_ids or [-1 if row.last_token is None else row.last_token]
        for position, token in enumerate(token_ids, entry.start):
            self._first[self._slot(entry.row, position)] = (token, position, row.salt)

    def _attend_first(self, entry: ScheduledSequence) -> list[int]:
        """Second-layer entries of the row's new positions."""
        digest, digests = 0, []
        for position in range(entry.start + entry.num_new_tokens):
            value = self._first[self._slot(entry.row, position)]
            assert value is not None, (
                f"row {entry.row} reads position {position} before it is written"
            )
            digest = mix(digest, value)
            if position >= entry.start:
                digests.append(digest)
        return digests

    def _sample(self, entry: ScheduledSequence) -> int:
        digest = 0
        for position in range(entry.start + entry.num_new_tokens):
            value = self._second[self._slot(entry.row, position)]
            assert value is not None, (
                f"row {entry.row} reads position {position} before it is written"
            )
            digest = mix(digest, value)
        token = to_token(digest)
        self.rows[entry.row].last_token = token
        return token
