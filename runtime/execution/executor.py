"""The `Executor` protocol, through which the engine runs steps on one or more ranks.

The engine and its scheduler run in one process. The model can be divided among several ranks
(worker processes). All arguments and results are plain data, so an implementation can send them to
other processes. `InlineExecutor` (inline_executor.py) runs one rank in the engine's own process.

Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.grammar.store import GrammarBuilt
from ostinato.runtime.tiers.tier_calls import TierCall
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = (
    "AdvanceAdapters",
    "AdvanceEncodings",
    "BeginAdapter",
    "BeginEncoding",
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
    kind: str  # the kind of program that runs it: captured | compiled | eager
    num_padded_tokens: int  # tokens that the program computes, padding included


class ExecutorStats(msgspec.Struct, array_like=True, gc=False):
    """Counters since the engine's start. With several ranks, most are the counters of rank 0."""

    steps_by_kind: dict[str, int]  # captured | compiled | eager
    # Number of layers by the way they run in a step of few tokens, such as a decode step: captured,
    # fx, inductor or eager (`LayerProgram`).
    layers_by_program: dict[str, int]
    num_padding_tokens: int  # tokens computed only to fill captured buckets
    model_seconds: float  # time in the model and the sampler, with waiting for the device
    device_seconds_by_kind: dict[str, float]  # seconds of finished steps on the device's clock
    grammar_seconds: float  # time for grammar masks, within steps
    grammar_build_seconds: float  # time of building grammars, in parallel with steps
    late_compiles: list[LateCompile]  # compilations after the start, of all ranks
    decode_buckets: list[int]  # sequences of each captured decode bucket, ascending
    bucket_tokens: list[int]  # token counts of all captured buckets, ascending


class StartProfile(msgspec.Struct, frozen=True, tag=1):
    """Begin a torch.profiler recording.

    Raises InvalidRequestError if a recording is running, or the directory cannot be written.
    """

    directory: str  # where each rank writes its trace


class StopProfile(msgspec.Struct, frozen=True, tag=2):
    """End the recording; each rank answers with the path of its trace.

    Raises InvalidRequestError if no recording is running, or the trace cannot be written.
    """


class ResetCounters(msgspec.Struct, frozen=True, tag=3):
    """Reset the counters, after steps that served no request."""


class DropDecodeBuckets(msgspec.Struct, frozen=True, tag=4):
    """Free the captured decode buckets of these numbers of sequences."""

    sizes: list[int]


class TouchBlocks(msgspec.Struct, frozen=True, tag=5):
    """Write zeros to KV cache blocks 0 to `num_blocks`, and to encodings: their memory is mapped.

    On a CPU, all unmapped pages are the same page of zeros, which stays in the processor's cache.
    So a measured step would read a context in unmapped pages too fast.
    """

    num_blocks: int


class BeginAdapter(msgspec.Struct, frozen=True, tag=6):
    """Begin to load a low-rank adapter, in place of the adapter in its slot."""

    slot: int
    path: str  # the directory of its files
    digest: str  # of its files


class AdvanceAdapters(msgspec.Struct, frozen=True, tag=7):
    """Copy parts of the adapters that have been read, for a few milliseconds.

    Each rank answers with a JSON object, slot -> "" or why the load failed, of the loads that it
    has ended. The text is empty if it has ended none.
    """

    timeout_s: float  # how long a rank waits until the next adapter has been read; 0 = not


class BeginEncoding(msgspec.Struct, frozen=True, tag=20):
    """Take an image or a window of audio. `AdvanceEncodings` computes what stands for it."""

    digest: bytes
    # An image or a window of a sound: rows of the media tables, one for each embedding. Audio that
    # is transcribed: its window of the caches of cross attention.
    rows: list[int]
    # An image: [height, width, 3], uint8 pixels. Audio: [mel bins, frames], float32 features.
    shape: tuple[int, ...]
    data: bytes
    dropped: list[bytes]  # digests of images and audio that are not needed any more


class AdvanceEncodings(msgspec.Struct, frozen=True, tag=21):
    """Compute a part of the encodings of the images or the audio that `BeginEncoding` has named.

    Each rank that needs them computes them, at its own pace. A rank answers with the hexadecimal
    digests of the encodings that it has completed since its last answer, separated by spaces. A
    rank that needs none completes each of them at once.
    """

    seconds: float  # a rank stops after the unit in which this time has passed
    dropped: list[bytes]  # digests of images and audio that are not needed any more
    order: list[bytes] = []  # digests in the order in which a rank computes them; others come last


RankCall = (
    StartProfile
    | StopProfile
    | ResetCounters
    | DropDecodeBuckets
    | TouchBlocks
    | BeginAdapter
    | AdvanceAdapters
    | BeginEncoding
    | AdvanceEncodings
    | TierCall
)


class Executor(Protocol):
    """Runs scheduled steps on one or more ranks. One thread calls it."""

    @property
    def max_in_flight(self) -> int:
        """Number of steps that may be launched and not read.

        1 = no overlap. 2 = the next step is scheduled while the device works. For a pipeline, it is
        the number of stages.
        """
        ...

    @property
    def has_lanes(self) -> bool:
        """Whether the executor is a pipeline, whose stages work on different steps.

        True = a sequence is scheduled again only after its last token was read. False = a step can
        take the last token from the device while the previous step is in flight.
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
        """Begin to build a request's grammar, while steps go on.

        `take_built_grammars` reports when it is built. It is kept until `release_grammar`.

        Args:
            request_id: the request's id.
            grammar: `Request.grammar`.
        """
        ...

    def take_built_grammars(self, timeout_s: float) -> list[GrammarBuilt]:
        """The grammars whose builds ended since the last call, in the order of `prepare_grammar`.

        Args:
            timeout_s: how long to wait for the oldest grammar; 0 = do not wait.
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
