"""Measures the step-cost table: real steps through the runner, before the first request.

A measured step is a `SchedulerOutput` like any other. Its time includes filling the buffers, the
captured or compiled model, and the sampler. New tokens go to the null block. Contexts are read from
blocks that no sequence holds yet. If some layers are recurrent, each sequence reads and writes a
slot of its own, as in service.

Token ids are random. Equal tokens would all go to the same experts, and their steps would read
fewer weights than steps in service.

If there is a drafter, steps that verify drafts are timed without context, for a few numbers of
sequences and tokens. The table has the difference between such a step and a decode.

The log-probabilities of a prompt are timed for one number of tokens, as the difference between a
step with them and a step without them.

The table is a grid of tokens, sequences and context. Only some of its lines are measured: prompts
of one sequence, and decodes of several sequences, each without and with context. The other points
are derived from these lines. A line is measured from small to large sizes with one run a point. It
ends where its share of the time budget would leave no room for two more runs of each point, also
after a second run of the last point. The other second runs follow, from large to small sizes. A
third run follows only if the first two differ. A point's cost is the median of its runs, so a
disturbance of one run changes it little.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median

import msgspec

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.types.params import MAX_LOGPROBS, SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import AdmittedSequence, ScheduledSequence, SchedulerOutput

__all__ = ("StepSpace", "measure_costs")

_LEAST_BUDGET_S, _MOST_BUDGET_S = 0.5, 4.0
_BUDGET_STEPS = 150  # the budget is the time of 150 decode steps, but at least 0.5 and at most 4 s
_CONTEXTS = (1024, 8192)
# The share of the budget at which the measurement of each line ends. A pair is (prompts, decodes).
# The first pair is without context, then one pair for each context.
_SHARES = ((0.4, 0.65), (0.75, 0.9), (0.95, 1.0))
_MOST_RUNS = 3  # of a point
_SAME = 1.05  # two runs agree if the longer takes less than this times the shorter
_SCORED_TOKENS = 64  # prompt tokens of the step whose log-probabilities are timed
_VERIFY_SHARE = 0.25  # the timing of verification gets this share of the budget in addition
_VERIFY_SEQS = (1, 4, 16, 64)  # verification is measured with these numbers of sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpace:
    """The limits of the steps that are measured, and the blocks that they may read."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens of one sequence
    block_size: int  # tokens
    vocab_size: int  # ids are below it
    decode_sizes: Sequence[int]  # numbers of sequences of the measured decodes, rising
    context_block_ids: Sequence[int]  # blocks that contexts are read from
    sampling: SamplingParams  # the parameters of a usual request
    # Numbers of tokens of a sequence in the measured steps that verify drafts: at least 2, rising.
    verified_tokens: Sequence[int] = ()
    max_num_rows: int = 0  # rows of logits of a step that verifies drafts
    groups: tuple[KVGroup, ...] = WHOLE_CACHE  # each has a block table in every sequence
    num_states: int = 0  # slots for states of recurrent layers, slot 0 included; 0 = none

    def state_slots(self, row: int) -> tuple[int, int, int, int] | None:
        """The slot of a row, read and written; no checkpoint. None = no layer is recurrent."""
        if not self.num_states:
            return None
        slot = 1 + row % (self.num_states - 1)
        return slot, slot, 0, 0

    @property
    def context_unit(self) -> int:
        """Tokens whose multiples are whole blocks of every group."""
        return self.block_size * math.lcm(*(group.units for group in self.groups))


class _Prober:
    """Runs and times steps."""

    def __init__(
        self,
        execute: Callable[[SchedulerOutput], object],
        space: StepSpace,
        clock: Callable[[], float],
    ) -> None:
        self._execute = execute
        self._space = space
        self.clock = clock
        self._random = random.Random(0)

    def decodes(self, num_seqs: int, context: int, num_runs: int) -> list[float]:
        """Seconds of each of `num_runs` steps in which `num_seqs` sequences decode.

        Args:
            num_seqs: number of sequences.
            context: cached tokens of each sequence.
            num_runs: number of steps.
        """
        return self._times([Chunk(1, context)] * num_seqs, num_runs)

    def prompts(self, num_tokens: int, context: int, num_runs: int) -> list[float]:
        """Seconds of each of `num_runs` steps that compute `num_tokens` prompt tokens.

        The tokens follow `context` cached tokens.
        """
        most = self._space.max_model_len - context
        chunks = [Chunk(most, context)] * (num_tokens // most)
        if rest := num_tokens % most:
            chunks.append(Chunk(rest, context))
        return self._times(chunks, num_runs)

    def scores(self, num_tokens: int, num_runs: int) -> list[float]:
        """Seconds of steps that report the log-probabilities of all tokens of one prompt."""
        return self._times([Chunk(num_tokens, 0, num_tokens)], num_runs)

    def verifications(self, num_tokens: int, num_seqs: int, num_runs: int) -> list[float]:
        """Seconds of steps in which sequences verify `num_tokens - 1` drafts each."""
        return self._times([Chunk(num_tokens, 0)] * num_seqs, num_runs, verifies=True)

    def _times(self, chunks: list[Chunk], num_runs: int, *, verifies: bool = False) -> list[float]:
        """Seconds of each run. Only the first run admits the sequences, as in service."""
        seconds: list[float] = []
        output = self._output(chunks, admits=True, verifies=verifies)
        again = self._output(chunks, admits=False, verifies=verifies) if num_runs > 1 else output
        for _ in range(num_runs):
            begin = self.clock()
            self._execute(output)
            seconds.append(self.clock() - begin)
            output = again
        return seconds

    def _output(self, chunks: list[Chunk], *, admits: bool, verifies: bool) -> SchedulerOutput:
        space = self._space
        admitted: list[AdmittedSequence] = []
        scheduled: list[ScheduledSequence] = []
        read = cycle(space.context_block_ids)
        for row, (num_tokens, start, num_scored) in enumerate(chunks):
            block_ids: list[list[int]] = [[] for _ in space.groups]
            chosen = self._random.choices(
                range(space.vocab_size), k=max(num_tokens, num_scored + 1)
            )
            if admits:
                sampling = space.sampling
                if num_scored:
                    sampling = msgspec.structs.replace(sampling, prompt_logprobs=MAX_LOGPROBS)
                request = Request(
                    request_id=f"probe-{row}",
                    prompt_token_ids=chosen[: num_scored + 1],
                    sampling=sampling,
                )
                admitted.append(AdmittedSequence(row, request, []))
                for ids, group in zip(block_ids, space.groups, strict=True):
                    size = group.units * space.block_size
                    num_read = start // size  # a context consists of whole blocks
                    num_blocks = -(-(start + num_tokens) // size)
                    ids += [*islice(read, num_read), *[0] * (num_blocks - num_read)]
            # A decode has no token ids: its token is the row's last sampled token.
            token_ids = [] if num_tokens == 1 else chosen[:num_tokens]
            num_logits = num_tokens if verifies else 1
            scheduled.append(
                ScheduledSequence(
                    row,
                    start,
                    num_tokens,
                    token_ids,
                    block_ids[0],
                    num_logits,
                    num_scored,
                    new_window_block_ids=block_ids[1] if len(block_ids) > 1 else [],
                    state_slots=space.state_slots(row),
                )
            )
        return SchedulerOutput(
            scheduled,
            admitted,
            sum(chunk.num_tokens for chunk in chunks),
            sum(chunk.num_scored for chunk in chunks),
            num_drafts=sum(entry.num_drafts for entry in scheduled),
        )


def measure_costs(
    execute: Callable[[SchedulerOutput], object],
    space: StepSpace,
    *,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Run steps and tabulate their times.

    Args:
        execute: runs a step until its tokens are on the host. It must not compile anything.
        space: the limits of the steps.
        budget_s: about how many seconds the measurement takes. None = the time of 150 decode steps,
            but at least 0.5 and at most 4 seconds. On a slow device fewer points are measured.
        clock: a monotonic clock in seconds.
    """
    prober = _Prober(execute, space, clock)
    begin = clock()
    one = median(prober.decodes(1, 0, 5))
    if budget_s is None:
        budget_s = min(max(_LEAST_BUDGET_S, _BUDGET_STEPS * one), _MOST_BUDGET_S)

    def until(share: float) -> float:
        return begin + share * budget_s

    most = space.max_num_seqs * space.max_model_len
    sizes = _prompt_sizes(min(space.max_num_batched_tokens, most))
    prompt_share, decode_share = _SHARES[0]
    prompts = {0: _line(prober.prompts, sizes, 0, one, until(prompt_share), clock)}
    decodes = {0: _line(prober.decodes, space.decode_sizes, 0, one, until(decode_share), clock)}
    growth = 2.0  # guess: the factor by which a context raises a step's cost
    for context, (prompt_share, decode_share) in zip(_contexts(space), _SHARES[1:], strict=False):
        sizes = [size for size in prompts[0] if size + context <= space.max_model_len]
        sizes = sizes[len(sizes) // 2 :: 2]
        guess = growth * prompts[0][sizes[0]]
        line = _line(prober.prompts, sizes, context, guess, until(prompt_share), clock)
        if not line:
            break
        prompts[context] = line
        sizes = sorted({*list(decodes[0])[::2], max(decodes[0])})
        line = _line(prober.decodes, sizes, context, growth * one, until(decode_share), clock)
        if not line:
            del prompts[context]
            break
        decodes[context] = line
        smallest = min(line)  # 1, unless graphs.capture_sizes lacks it
        factor = max(1.0, line[smallest] / decodes[0][smallest])
        growth = _CONTEXTS[1] / _CONTEXTS[0] * factor
    scored = _scored_seconds(prober, prompts[0], space, until(1.0))
    verify = _verify_surcharges(prober, decodes[0], space, clock() + _VERIFY_SHARE * budget_s)
    return _tabulate(prompts, decodes, scored, verify)


def _scored_seconds(
    prober: _Prober, prompts: dict[int, float], space: StepSpace, until: float
) -> float | None:
    """Seconds that the log-probability of one prompt token adds; None = no time to measure it.

    Args:
        prober: runs the steps.
        prompts: {number of tokens: seconds} of prompts without a context.
        space: the limits of the steps.
        until: the end of the measurement, by the prober's clock.
    """
    most = min(_SCORED_TOKENS, space.max_num_batched_tokens, space.max_model_len)
    num_tokens = max(size for size in prompts if size <= most)
    # Guess: a log-probability takes as long as a token.
    if prober.clock() + 2 * _MOST_RUNS * prompts[num_tokens] > until:
        return None
    with_scores = _settled(partial(prober.scores, num_tokens))
    return max(0.0, with_scores - prompts[num_tokens]) / num_tokens


def _verify_surcharges(
    prober: _Prober, decodes: dict[int, float], space: StepSpace, until: float
) -> dict[tuple[int, int], float]:
    """Seconds that verification adds to a decode, by (tokens of each sequence, sequences).

    The numbers of sequences are measured one after the other, while there is time. The first one is
    always measured.

    Args:
        prober: runs the steps.
        decodes: {number of sequences: seconds} without a context.
        space: the limits of the steps.
        until: the end of the measurement, by the prober's clock.
    """
    found: dict[tuple[int, int], float] = {}
    tokens = space.verified_tokens
    for num_seqs in _VERIFY_SEQS if tokens else ():
        most = tokens[-1] * num_seqs
        if num_seqs > space.max_num_seqs or most > space.max_num_rows:
            break
        plain = _interpolate(decodes, num_seqs)
        # Guess: each token adds a tenth of a step.
        expected = _MOST_RUNS * sum(plain * (1 + 0.1 * count) for count in tokens)
        if found and prober.clock() + expected > until:
            break
        for count in tokens:
            seconds = _settled(partial(prober.verifications, count, num_seqs))
            found[count, num_seqs] = max(0.0, seconds - plain)
    return found


def _prompt_sizes(most: int) -> list[int]:
    """Powers of four up to 64, then powers of two up to `most`, and `most`."""
    sizes = [1, 4, 16, *(1 << power for power in range(6, most.bit_length()))]
    return [*(size for size in sizes if size < most), most]


def _contexts(space: StepSpace) -> list[int]:
    """The context lengths to measure, rising: whole blocks, up to half of the longest sequence."""
    unit = space.context_unit
    most = space.max_model_len // 2 // unit * unit
    lengths = {min(c // unit * unit, most) for c in _CONTEXTS}
    return sorted(length for length in lengths if length > 0)


def _line(
    times: Callable[[int, int, int], list[float]],
    sizes: Iterable[int],
    context: int,
    guess: float,
    until: float,
    clock: Callable[[], float],
) -> dict[int, float]:
    """Median seconds by size, for the sizes that can be measured before `until`.

    Without a context, the first size is measured in any case.

    Args:
        times: (size, context, number of runs) -> seconds of each run.
        sizes: rising.
        context: tokens.
        guess: expected seconds of the first size.
        until: the end of the measurement, by `clock`.
        clock: a monotonic clock in seconds.
    """
    seconds: dict[int, list[float]] = {}

    def fits(size: int) -> bool:
        expected = _expected(seconds, size) if seconds else guess
        total = sum(map(min, seconds.values()))  # seconds of one run of each size
        return clock() + _MOST_RUNS * expected + (_MOST_RUNS - 1) * total <= until

    for size in sizes:
        if seconds and not fits(size):
            # Another program may have disturbed the last run, so that larger steps seem too long.
            last = max(seconds)
            seconds[last] += times(last, context, 1)
        if (seconds or context) and not fits(size):
            break
        seconds[size] = times(size, context, 1)
    for size in reversed(seconds):
        runs = seconds[size]
        while not _suffice(runs) and clock() + min(runs) < until:
            runs += times(size, context, 1)
    return {size: median(runs) for size, runs in seconds.items()}


def _suffice(runs: list[float]) -> bool:
    """Whether a point needs no further run: two runs agree, or it has the most runs."""
    return len(runs) == _MOST_RUNS or (len(runs) > 1 and max(runs) < _SAME * min(runs))


def _settled(times: Callable[[int], list[float]]) -> float:
    """Median seconds of two runs, or of three if the first two differ.

    Args:
        times: number of runs -> seconds of each run.
    """
    runs = times(2)
    return median(runs if _suffice(runs) else [*runs, *times(1)])


def _expected(seconds: dict[int, list[float]], size: int) -> float:
    """Expected seconds of a larger step.

    The slope of the last interval is continued with a margin, at most in proportion to the size.
    The result is at least 1.25 times the seconds of the last size.
    """
    last, *others = reversed(seconds)
    known = min(seconds[last])
    slope = known / last
    if others:
        slope = min(slope, 1.5 * max(0.0, known - min(seconds[others[0]])) / (last - others[0]))
    return max(1.25 * known, known + slope * (size - last))


def _tabulate(
    prompts: dict[int, dict[int, float]],
    decodes: dict[int, dict[int, float]],
    scored_seconds: float | None,
    verify: dict[tuple[int, int], float],
) -> CostTable:
    """Compute the grid from the measured lines.

    The cost of a step of T tokens over S sequences is estimated as the cost of a prompt of T tokens
    plus the difference between S decodes and a prompt of S tokens.

    Args:
        prompts: {context: {number of tokens: seconds}}.
        decodes: {context: {number of sequences: seconds}}.
        scored_seconds: from `_scored_seconds`.
        verify: from `_verify_surcharges`.
    """
    contexts, tokens, seqs = list(decodes), list(prompts[0]), list(decodes[0])
    prompt_lines: list[dict[int, float]] = []
    decode_lines: list[dict[int, float]] = []
    for context in contexts:
        surcharges = _surcharges(decodes, context)
        decode_lines.append({s: decodes[0][s] + _interpolate(surcharges, s) for s in seqs})
        surcharges = _surcharges(prompts, context)
        prompt_lines.append({t: prompts[0][t] + _interpolate(surcharges, t) for t in tokens})
    more = [
        {s: max(0.0, line[s] - _interpolate(prompt_lines[k], s)) for s in seqs}
        for k, line in enumerate(decode_lines)
    ]
    return CostTable.from_medians(
        tokens=tokens,
        seqs=seqs,
        contexts=contexts,
        seconds=[
            prompt_lines[k][t] + more[k][s]
            for t in tokens
            for s in seqs
            for k in range(len(contexts))
        ],
        decode=[line[s] for s in seqs for line in decode_lines],
        scored_seconds=scored_seconds,
        verify=verify,
    )


def _surcharges(lines: dict[int, dict[int, float]], context: int) -> dict[int, float]:
    """Seconds that a context adds to a step, by size."""
    return {
        size: max(0.0, seconds - lines[0][size]) for size, seconds in lines.get(context, {}).items()
    }


def _interpolate(line: dict[int, float], size: float) -> float:
    """Interpolate linearly between points of a line; outside of them, in proportion to the size."""
    sizes = list(line)
    index = bisect_left(sizes, size)
    if index in (0, len(sizes)):
        nearest = sizes[max(0, index - 1)]
        return line[nearest] * size / nearest
    low, high = sizes[index - 1], sizes[index]
    share = (size - low) / (high - low)
    return line[low] + share * (line[high] - line[low])
