"""The `Executor` protocol, through which the engine runs steps on one or more ranks.

The engine and its scheduler run in one process. The model may be spread over several ranks (worker
processes). All arguments and results are plain data, so an implementation may send them to other
processes. `InlineExecutor` (inline_executor.py) runs one rank in the engine's own process.

Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.grammar.store import GrammarBuilt
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = (
    "DropDecodeBuckets",
    "Executor",
    "ExecutorStats",
    "Pending",
    "RankCall",
    "ResetCounters",
    "StartProfile",
    "StopProfile",
    "TouchBlocks",
)


class Pending(NamedTuple):
    """A launched step whose result has not been read."""

    number: int  # steps of this executor are numbered from 1
    kind: str  # how it runs: captured | compiled | eager
    num_padded_tokens: int  # tokens that the program computes, padding included


class ExecutorStats(msgspec.Struct, array_like=True, gc=False):
    """Counters from zero at the engine's start. With several ranks, they are the leader's."""

    steps_by_kind: dict[str, int]  # captured | compiled | eager
    layers_by_program: dict[str, int]  # how small steps run: captured | fx | inductor | eager
    num_padding_tokens: int  # computed to fill captured buckets
    model_seconds: float  # in the model and the sampler, waiting for the device included
    device_seconds_by_kind: dict[str, float]  # seconds of finished steps on the device's clock
    grammar_seconds: float  # making the masks of grammars, within steps
    grammar_build_seconds: float  # building grammars, beside the steps
    late_compiles: list[LateCompile]  # late compiles of all ranks
    decode_buckets: list[int]  # sequences of each captured decode bucket, ascending
    bucket_tokens: list[int]  # token counts of all captured buckets, ascending


class StartProfile(msgspec.Struct, frozen=True, tag=1):
    """Begin a torch.profiler recording. Raises InvalidRequestError when one is running."""

    directory: str  # where each rank writes its trace


class StopProfile(msgspec.Struct, frozen=True, tag=2):
    """End the recording; each rank answers with the path of its trace."""


class ResetCounters(msgspec.Struct, frozen=True, tag=3):
    """Reset the counters, after steps that served no request."""


class DropDecodeBuckets(msgspec.Struct, frozen=True, tag=4):
    """Free the captured decode buckets of these numbers of sequences."""

    sizes: list[int]


class TouchBlocks(msgspec.Struct, frozen=True, tag=5):
    """Write zeros to KV cache blocks 0 to `num_blocks`, so that their memory is mapped.

    On a CPU all unmapped pages are the same page of zeros, which stays in the processor's cache. A
    measured step would read such a context too fast.
    """

    num_blocks: int


RankCall = StartProfile | StopProfile | ResetCounters | DropDecodeBuckets | TouchBlocks


class Executor(Protocol):
    """Runs scheduled steps on one or more ranks. One thread calls it."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched and not read: 1, 2 to schedule while the device works, or the
        number of stages of a pipeline.
        """
        ...

    @property
    def has_lanes(self) -> bool:
        """Whether no token may be scheduled that follows from a step in flight, because the stages
        of a pipeline work on different steps. Otherwise a step takes such tokens from the device.
        """
        ...

    def launch(self, output: SchedulerOutput) -> Pending:
        """Start a step. The grammars of the requests that it admits must have been built."""
        ...

    def read(self, pending: Pending) -> StepResult:
        """Wait for the oldest launched step, which `pending` must be, and return its result."""
        ...

    def idle(self) -> None:
        """Allow background work to use the processors until the next `launch`."""
        ...

    def prepare_grammar(self, request_id: str, grammar: str) -> None:
        """Begin to build a request's grammar beside the steps; `take_built_grammars` reports it.

        Args:
            request_id: kept until `release_grammar`.
            grammar: `Request.grammar`.
        """
        ...

    def take_built_grammars(self, timeout_s: float) -> list[GrammarBuilt]:
        """Grammars that were finished since the last call, in the order of `prepare_grammar`.

        Args:
            timeout_s: how long to wait for the oldest one; 0 = do not wait.
        """
        ...

    def release_grammar(self, request_id: str) -> None:
        """Free the grammar of a request that has ended or was aborted."""
        ...

    def call(self, call: RankCall) -> list[str]:
        """Execute a call on every rank between two steps; returns the answers in rank order."""
        ...

    def stats(self) -> ExecutorStats:
        """A snapshot of the counters."""
        ...

    def close(self) -> None:
        """Free the ranks' memory and threads. No step may follow."""
        ...
