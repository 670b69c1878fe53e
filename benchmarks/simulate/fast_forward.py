"""The engine's scheduler with fast-forward: many equal decode steps in one call.

Between two changes (an arrival, an end, a shortage of blocks) every step gives each running
sequence one token. `fast_forward` applies the effect of `count` such steps without planning each.
The state is then the same as after `count` calls of `schedule` and `update`
(tests/benchmarks/simulate/test_fast_forward.py compares them, block by block).
"""

from __future__ import annotations

from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.scheduling.sequences.sequence import Sequence
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("FastForwardScheduler",)


class FastForwardScheduler(Scheduler):
    """A scheduler for simulation; requests have no stop tokens and no beam search."""

    @property
    def contexts(self) -> int:
        """Cached tokens of all running sequences."""
        return sum(sequence.num_computed_tokens for sequence in self.queues.running)

    def running_ids(self) -> list[str]:
        """Ids of the running requests."""
        return [sequence.request.request_id for sequence in self.queues.running]

    def repeats_last_step(self, output: SchedulerOutput) -> bool:
        """Whether the next step equals `output`, the last scheduled step, if no sequence joins it.

        It does if `output` admitted no sequence, every running sequence got one token in it, and
        all of them still decode. `output` may still be in flight. The caller checks whether a
        sequence joins the next step.
        """
        return (
            not output.admitted
            and output.num_tokens == len(output.scheduled) == len(self.queues.running)
            and not self.queues.draining
            and not any(entry.token_ids for entry in output.scheduled)
            and all(sequence.is_decoding for sequence in self.queues.running)
        )

    def num_equal_steps(self, most: int) -> int:
        """A number of further steps, at most `most`, that will certainly equal the last step.

        There can be more such steps. No sequence may join meanwhile. The step in which a sequence
        ends, or in which blocks run short, is left to `schedule`.
        """
        running = self.queues.running
        if not running:
            return 0
        count = min(
            most,
            min(s.max_num_tokens - max(s.num_computed_tokens, s.num_tokens) for s in running) - 1,
        )
        cache = self.queues.cache
        if cache.has_windows and self.queues.waiting:
            # A step that takes a block can free others, and a waiting sequence can then join.
            rooms = (cache.num_tokens(s.block_table) - s.num_computed_tokens for s in running)
            count = min(count, *rooms)
        while count > 0:
            # Blocks behind a window are freed meanwhile. They are not counted.
            needed = sum(
                cache.num_missing(s.block_table, s.num_computed_tokens + count) for s in running
            )
            if needed <= cache.num_free_blocks:
                return count
            count //= 2
        return 0

    def fast_forward(self, count: int, token_id: int) -> None:
        """Take `count` steps at once; each sequence gets `token_id` in each of them.

        Args:
            count: at least 1, at most `num_equal_steps`.
            token_id: the token instead of a sampled one.
        """
        running, cache = self.queues.running, self.queues.cache
        ends = [sequence.num_computed_tokens + count for sequence in running]
        # Blocks are allocated in the order of steps, then of sequences, as by schedule().
        crossings = sorted(
            (position - sequence.num_computed_tokens, index, position)
            for index, sequence in enumerate(running)
            for position in range(
                cache.num_tokens(sequence.block_table), ends[index], cache.block_size
            )
        )
        for _, index, position in crossings:
            sequence = running[index]
            table = sequence.block_table
            if not cache.num_missing(table, position + 1):
                continue  # a block of each group holds several units
            if cache.has_windows:  # a block is registered before it is freed
                self._compute(sequence, position, token_id)
            taken = cache.allocate(table, position + 1, position)
            assert taken is not None, "num_equal_steps counted the blocks"
        for sequence, end in zip(running, ends, strict=True):
            self._compute(sequence, end, token_id)
        self.num_output_tokens += count * len(running)

    def _compute(self, sequence: Sequence, end: int, token_id: int) -> None:
        """Compute the positions of a sequence up to `end`, and register its full units."""
        cache, table = self.queues.cache, sequence.block_table
        sequence.token_ids += [token_id] * (end - sequence.num_computed_tokens)
        sequence.num_computed_tokens = end
        if end // cache.block_size > table.num_registered:
            cache.register(table, sequence.token_ids, end)
