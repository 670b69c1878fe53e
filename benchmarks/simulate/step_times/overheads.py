"""The overheads of a real server over the step-cost table: step times, pauses, delivery delays.

The table is measured with an engine that runs alone. In a server the same step takes longer,
because the API process, the clients and other programs use the same cores and caches. The overheads
vary, so each is a distribution of measured values (benchmarks/simulate/step_times/fit.py). A
simulation draws from it with a seed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ostinato.benchmarks.simulate.step_times.step_noise import NoiseSampler, StepRatios
from ostinato.runtime.costs.cost_table import Chunk, CostTable
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("ServingOverheads", "SizedValues", "StepClock")


class SizedValues(NamedTuple):
    """Measured values at about the same number of running sequences."""

    size: int  # sequences
    values: tuple[float, ...]  # at least one, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOverheads:
    """Distributions of overheads, each as its measured values."""

    decode: StepRatios  # ratio of seconds to the table, for steps in which all sequences decode
    prompt: StepRatios  # ratio of seconds to the table, for steps with prompts
    pause_s: tuple[float, ...]  # between two steps: messages, scheduling
    idle_request_s: tuple[float, ...]  # from the client's sending to the step of an idle engine
    # Seconds from the client's sending until a step can admit the request, by running sequences.
    busy_request_s: tuple[SizedValues, ...]
    # Seconds from a step's end until its tokens reach their clients: for each measured step, one
    # value per sequence, in the step's order.
    delivery_s: tuple[tuple[float, ...], ...]
    end_s: tuple[float, ...]  # from the last token to the end of the answer at the client

    def typical(self) -> ServingOverheads:
        """The same overheads with little variation.

        Step noise is 1. Other distributions are replaced by their medians. `busy_request_s` has a
        median for each size, and a draw still chooses between the two neighbouring sizes.
        """

        def typical(groups: tuple[SizedValues, ...]) -> tuple[SizedValues, ...]:
            return tuple(SizedValues(size, (median(values),)) for size, values in groups)

        return ServingOverheads(
            decode=self.decode._replace(spread=(1.0,), order=(0,)),
            prompt=self.prompt._replace(spread=(1.0,), order=(0,)),
            pause_s=(median(self.pause_s),),
            idle_request_s=(median(self.idle_request_s),),
            busy_request_s=typical(self.busy_request_s),
            delivery_s=((median(delay for one in self.delivery_s for delay in one),),),
            end_s=(median(self.end_s),),
        )


class StepClock:
    """Simulated seconds of steps, and of messages between the engine and clients.

    Args:
        costs: the step-cost table.
        overheads: the overheads; None = steps take the table's seconds, and nothing else takes
            time.
        seed: seed of the draws.
    """

    def __init__(self, costs: CostTable, overheads: ServingOverheads | None, seed: int = 0) -> None:
        self._costs = costs
        self._overheads = overheads
        self._random = random.Random(seed)
        self.is_exact = overheads is None
        if overheads is not None:
            self._kinds = (overheads.decode, overheads.prompt)
            self._noise = NoiseSampler(self._kinds, self._random)
            self._busy = _Groups(overheads.busy_request_s)
            by_size: dict[int, list[tuple[float, ...]]] = {}
            for delays in overheads.delivery_s:
                by_size.setdefault(_power(len(delays)), []).append(delays)
            self._delivery = by_size

    def step(self, output: SchedulerOutput) -> float:
        """Seconds of a scheduled step."""
        num_decodes = num_drafts = context = num_prompt_tokens = 0
        chunks: list[Chunk] = []
        for entry in output.scheduled:
            if entry.token_ids and not entry.num_drafts:
                chunks.append(Chunk(entry.num_new_tokens, entry.start))
                num_prompt_tokens += entry.num_new_tokens
            else:
                num_decodes += 1
                num_drafts += entry.num_drafts
                context += entry.start
        mean = context / num_decodes if num_decodes else 0.0
        seconds = self._costs.mixed_seconds(num_decodes, mean, chunks)
        if num_drafts:
            seconds += self._costs.verify_surcharge(num_decodes, num_drafts)
        if self._overheads is None:
            return seconds
        kind = int(bool(chunks))
        usual = self._kinds[kind].usual(num_prompt_tokens, num_decodes)
        return seconds * usual * self._noise.next(kind)

    def decodes(self, num_seqs: int, context: float) -> float:
        """The table's seconds of a decode of sequences with a mean context."""
        return self._costs.decode_seconds(num_seqs, context)

    def pause(self) -> float:
        """Seconds between two steps."""
        return 0.0 if self._overheads is None else self._random.choice(self._overheads.pause_s)

    def request(self, num_running: int) -> float:
        """Seconds from a client's sending until an engine with `num_running` sequences has it."""
        overheads = self._overheads
        if overheads is None:
            return 0.0
        if not num_running:
            return self._random.choice(overheads.idle_request_s)
        return self._busy.draw(num_running, self._random)

    def deliveries(self, num_seqs: int) -> Sequence[float]:
        """Seconds from a step's end until each of its tokens reaches its client."""
        if self._overheads is None:
            return [0.0] * num_seqs
        wanted = _power(num_seqs)
        nearest = min(self._delivery, key=lambda size: abs(size - wanted))
        delays = self._random.choice(self._delivery[nearest])
        return [delays[place * len(delays) // num_seqs] for place in range(num_seqs)]

    def end(self) -> float:
        """Seconds from the last token to the end of the answer at the client."""
        return 0.0 if self._overheads is None else self._random.choice(self._overheads.end_s)


def _power(number: int) -> int:
    """The exponent of the largest power of two that is at most `number`."""
    return number.bit_length() - 1


class _Groups:
    """Draws from groups by size. Between two sizes, the nearer group is drawn more often."""

    def __init__(self, groups: tuple[SizedValues, ...]) -> None:
        self._sizes = [math.log(one.size) for one in groups]
        self._values = [one.values for one in groups]

    def draw(self, size: int, numbers: random.Random) -> float:
        sizes, place = self._sizes, math.log(size)
        index = bisect_right(sizes, place)
        if 0 < index < len(sizes):
            share = (place - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
            index -= numbers.random() >= share
        return numbers.choice(self._values[min(index, len(sizes) - 1)])
