"""Token samplers: captured over static inputs on a GPU, row by row on a CPU.

A step stages the parameters of its rows before the model runs, in one copy to the device, and
samples from the logits afterwards. No method waits for the device's results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs.recorder import Recorder, is_out_of_memory
from ostinato.ops.logprobs.row_logprobs import row_logprobs
from ostinato.ops.parallel.divided_draws import collect_logits, draw_divided
from ostinato.ops.sampling.sample_rows import (
    RowSampling,
    SampleInputs,
    SamplePath,
    sample_each,
    sample_rows,
    sampling_inputs,
)

__all__ = (
    "DividedSampler",
    "EagerSampler",
    "GraphSampler",
    "SamplingKey",
    "TokenSampler",
    "num_sampling_graphs",
)

_FULL, _NARROW, _WIDE = SamplePath.full, SamplePath.narrow, SamplePath.wide
# The sets of paths that have a graph each, cheapest first. A step takes the first set that contains
# all of its paths; every set serves greedy rows too. A narrow or wide path that no row needs costs
# time, and changes no token.
_MIXTURES: tuple[frozenset[SamplePath], ...] = tuple(
    map(frozenset, ((_FULL,), (_FULL, _NARROW), (_FULL, _WIDE), (_FULL, _NARROW, _WIDE)))
)


class TokenSampler(Protocol):
    """Samples one token per row. A step calls `stage`, runs the model, then calls `run`."""

    def stage(self, draws: Sequence[RowSampling]) -> None:
        """Take a step's parameters, in the order of its rows; called before the model runs.

        Before this call the caller has waited for a copy to the device, or for a result, that was
        started after the previous call. So the previous parameters have left the host memory.
        """
        ...

    def run(self, logits: Tensor) -> Tensor:
        """[R, V] float32 logits of the staged rows -> [R] int64 token ids.

        The result is valid until the next run. `DividedSampler` also takes the columns of its rank.
        """
        ...

    def whole(self, logits: Tensor) -> Tensor:
        """The [R, V] logits of all ranks. Only `DividedSampler` gets the columns of its rank."""
        return logits


class EagerSampler(TokenSampler):
    """The sampler of CPUs, where control flow may depend on data: each path gets its rows only.

    The parameters become a tensor in `stage`. After the model, the same Python code takes three
    times as long, because the weights have replaced it in the processor's caches.
    """

    def __init__(self) -> None:
        self._inputs = sampling_inputs(())

    def stage(self, draws: Sequence[RowSampling]) -> None:
        self._inputs = sampling_inputs(draws)

    def run(self, logits: Tensor) -> Tensor:
        return sample_each(logits, self._inputs)


class DividedSampler(EagerSampler):
    """The sampler of rank 0, if each rank has the logits of a part of the vocabulary.

    The other ranks call `answer_rank_0` once a step (ops/parallel/divided_draws.py). So a step
    calls `whole` once, and `run` with its result, or it calls `run` once.
    """

    def __init__(self, group: Tensor, vocab_size: int) -> None:
        """
        Args:
            group: [1] int64, the handle of a `ParallelGroup`.
            vocab_size: V.
        """
        super().__init__()
        self._group = group
        self._vocab_size = vocab_size

    def run(self, logits: Tensor) -> Tensor:
        if logits.shape[1] == self._vocab_size:
            return super().run(logits)
        return draw_divided(logits, self._inputs, self._group)

    def whole(self, logits: Tensor) -> Tensor:
        return collect_logits(logits, self._group, self._vocab_size // logits.shape[1])


class SamplingKey(NamedTuple):
    """What a captured sampling program serves: a number of rows, and a set of paths."""

    num_rows: int
    paths: frozenset[SamplePath]


class GraphSampler(TokenSampler):
    """Samples with fixed shapes over static tensors, padded to buckets of rows.

    With a recorder the programs are captured. Logits outside of the static tensor are copied there
    first.
    """

    def __init__(
        self, logits: Tensor, *, recorder: Recorder | None = None, num_host_copies: int = 1
    ) -> None:
        """
        Args:
            logits: [rows of the largest step, V] float32. Captured models write their logits here.
            recorder: captures the programs; None = they run uncaptured.
            num_host_copies: the `num_host_copies` of the step's `StaticBuffers`.
        """
        max_num_rows, device = len(logits), logits.device
        cuda = device.type == "cuda"
        self._recorder = recorder
        self._logits = logits
        self._host_copies = deque(
            torch.ones(
                len(SampleInputs._fields), max_num_rows, dtype=torch.float64, pin_memory=cuda
            )
            for _ in range(num_host_copies if cuda else 1)
        )
        self._inputs = self._host_copies[0].to(device) if cuda else self._host_copies[0]
        self._sizes = _row_sizes(max_num_rows)
        self._num_rows = 0
        self._paths: frozenset[SamplePath] = frozenset()
        self._replays: dict[SamplingKey, Callable[[], Tensor]] = {}

    @property
    def captured_keys(self) -> list[SamplingKey]:
        return list(self._replays)

    def capture(self) -> list[SamplingKey]:
        """Capture every mixture at every size, largest first.

        Returns:
            The keys whose capture ran out of memory; they run uncaptured.

        Raises:
            RuntimeError: a capture failed for another reason.
        """
        left_out: list[SamplingKey] = []
        if self._recorder is None:
            return left_out
        for size in reversed(self._sizes):
            for paths in reversed(_MIXTURES):
                key = SamplingKey(size, paths)
                try:
                    self._replays[key] = self._recorder.capture(self._bind(key))
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    left_out.append(key)
        return left_out

    def stage(self, draws: Sequence[RowSampling]) -> None:
        self._num_rows = len(draws)
        present = {row.path for row in draws} - {SamplePath.greedy}
        self._paths = next(mixture for mixture in _MIXTURES if present <= mixture)
        # The host memory is free: `BatchBuilder.build` has waited for the upload of the step that
        # used it last, and each round of a verification has waited for the tokens of the round
        # before.
        self._host_copies.rotate(-1)
        memory = self._host_copies[0]
        memory.numpy()[:, : len(draws)] = np.array(draws, dtype=np.float64).T
        if self._inputs is not memory:
            self._inputs.copy_(memory, non_blocking=True)

    def warm_up(self) -> None:
        """Compute log-probabilities once, so that their kernel is compiled. Nothing is captured."""
        row_logprobs(self._logits[:1], self._logits.new_zeros((1, 1), dtype=torch.int64), 1)

    def run_largest(self) -> None:
        """Run every path on the largest number of rows, so that the memory can be measured."""
        self._bind(SamplingKey(len(self._logits), _MIXTURES[-1]))()

    def run(self, logits: Tensor) -> Tensor:
        num_rows = self._num_rows
        assert len(logits) == num_rows, f"{len(logits)} rows of logits, {num_rows} were staged"
        if logits.data_ptr() != self._logits.data_ptr():
            self._logits[:num_rows].copy_(logits)
        size = next(size for size in self._sizes if size >= num_rows)
        replay = self._replays.get(SamplingKey(size, self._paths))
        if replay is None:
            return self._bind(SamplingKey(num_rows, self._paths))()
        return replay()[:num_rows]

    def _bind(self, key: SamplingKey) -> Callable[[], Tensor]:
        logits = self._logits[: key.num_rows]
        inputs = SampleInputs(*self._inputs[:, : key.num_rows].unbind())
        return lambda: sample_rows(logits, inputs, key.paths)


def num_sampling_graphs(max_num_rows: int) -> int:
    """How many programs a `GraphSampler` captures for steps of up to `max_num_rows` rows."""
    return len(_row_sizes(max_num_rows)) * len(_MIXTURES)


def _row_sizes(max_num_rows: int) -> list[int]:
    """Powers of two, and the largest number: padded rows cost little beside a model's step."""
    sizes = [1 << power for power in range(max_num_rows.bit_length()) if 1 << power < max_num_rows]
    return [*sizes, max_num_rows]
