"""Logs the engine's steps (time, seconds, tokens), and compares them with the roofline.

A step takes at least the time to read its bytes (weights once, keys and values of every context) at
the measured bandwidth, and at least the time of its operations at the measured matrix rate. Its
least time is the larger of the two.
"""

from __future__ import annotations

import time

from ostinato.benchmarks.machine.roofline import Machine, ModelSizes
from ostinato.runtime.types.step import SchedulerOutput

__all__ = ("StepLog",)

_MAX_STEPS = 20_000  # steps in the columns; sums include all steps


class StepLog:
    """Columns of steps; `add` is the `on_step` of the engine's observer."""

    def __init__(self, sizes: ModelSizes, machine: Machine) -> None:
        self.sizes = sizes
        self.machine = machine
        self.clear()

    def clear(self) -> None:
        """Forget all steps; times count from now."""
        self._begin = time.perf_counter()
        self._columns: dict[str, list[float]] = {
            name: [] for name in ("begin_s", "seconds", "prompt_tokens", "decode_tokens", "seqs")
        }
        self._seconds = self._least_s = 0.0

    def add(self, output: SchedulerOutput, seconds: float) -> None:
        """Add a step that has just ended, `seconds` after its launch."""
        began = time.perf_counter() - seconds - self._begin
        sizes = self.sizes
        decodes = num_bytes = num_flop = samples = 0
        for entry in output.scheduled:
            end = entry.start + entry.num_new_tokens
            decodes += entry.num_new_tokens == 1 and entry.start > 0
            read, operations = sizes.attention_work(entry.start, end)
            num_bytes += read
            num_flop += operations
            samples += entry.num_logits
        parameters = sizes.body_parameters + (sizes.head_parameters if samples else 0)
        num_bytes += parameters * sizes.weight_bytes
        num_flop += 2 * sizes.body_parameters * output.num_tokens
        num_flop += 2 * sizes.head_parameters * samples
        self._least_s += self.machine.least_seconds(num_bytes, num_flop)
        self._seconds += seconds
        columns = self._columns
        if len(columns["seconds"]) < _MAX_STEPS:
            columns["begin_s"].append(round(began, 6))
            columns["seconds"].append(round(seconds, 6))
            columns["prompt_tokens"].append(output.num_tokens - decodes)
            columns["decode_tokens"].append(decodes)
            columns["seqs"].append(output.num_seqs)

    def roofline_share(self) -> float:
        """Least possible seconds of all steps over their actual seconds; 0 without steps."""
        return self._least_s / self._seconds if self._seconds else 0.0

    def columns(self) -> dict[str, list[float]]:
        """begin_s, seconds, prompt_tokens, decode_tokens, seqs of the first 20,000 steps."""
        return self._columns
