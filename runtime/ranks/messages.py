"""Messages between the ranks of an engine: msgpack over a Unix socket, one message for each step.

Rank 0 is the engine's process. It sends every other rank the step that it is about to run. The
message has only the parts that the model needs. It has no grammar, no text and, besides
`prompt_logprobs`, no sampling parameters.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import socket

import msgspec

from ostinato.conf.engine_config import EngineConfig
from ostinato.graphs.compile_monitor import LateCompile
from ostinato.models.config.head_spec import HeadInputs
from ostinato.runtime.execution.executor import RankCall
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import AdmittedSequence, SchedulerOutput

__all__ = (
    "Answer",
    "Arrived",
    "Call",
    "Channel",
    "Frames",
    "Idle",
    "LateCompiles",
    "LeaderMessage",
    "Met",
    "RankEnded",
    "RankFailed",
    "RankMessage",
    "RankSeen",
    "RankStack",
    "Serve",
    "StartRank",
    "Step",
    "encode_frame",
    "for_other_ranks",
    "leader_decoder",
    "rank_decoder",
)

_LENGTH_BYTES = 4
_MOST_DESCRIPTORS = 8  # a rank gets at most this many file descriptors


class StartRank(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Build a rank. The file descriptors of the rank's links are sent before this message."""

    config: EngineConfig  # with this rank's part of the threads and the memory
    rank: int
    max_drafts: int  # draft tokens of one sequence in one step, at most
    head_inputs: HeadInputs  # the hidden states that the head of rank 0 reads


class Met(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """All ranks have arrived at a meeting: a point of the start at which they exchange numbers."""

    name: str
    numbers: list[list[int]]  # the numbers of each rank, in rank order


class Step(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Run a step."""

    output: SchedulerOutput  # from `for_other_ranks`
    # The last token of each entry without token ids, in order. Only the sampling rank has it.
    last_tokens: list[int]


class Call(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Execute a call and send an `Answer`."""

    call: RankCall


class Idle(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """No step follows for now, so background work can use the processors."""


class Serve(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The engine has started. From now on, every compilation counts as late."""


LeaderMessage = StartRank | Met | Step | Call | Idle | Serve


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The rank waits at a meeting."""

    name: str
    numbers: list[int]


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The result of a `Call`, or why it was refused."""

    text: str
    is_refusal: bool = False


class LateCompiles(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """All late compilations of the rank so far. Sent after each new one."""

    compiles: list[LateCompile]


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The rank ends because of an error."""

    message: str  # one line
    traceback: str  # empty if the message is enough


class RankSeen(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The `Activity` of a rank on another machine. Its machine sends it while steps run."""

    is_stopped: bool
    has_work: bool
    cpu_s: float


class RankStack(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The stacks of a rank on another machine. Sent when rank 0 has asked for stacks."""

    text: str


class RankEnded(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """A rank on another machine has ended. All its messages were sent before."""

    machine: str
    code: int | None  # its exit code, negative for a signal; None = its machine was lost
    pid: int = 0
    stack: str = ""  # the stacks that it wrote when it crashed


RankMessage = Arrived | Answer | LateCompiles | RankFailed | RankSeen | RankStack | RankEnded

_encoder = msgspec.msgpack.Encoder()
leader_decoder = msgspec.msgpack.Decoder(LeaderMessage)
rank_decoder = msgspec.msgpack.Decoder(RankMessage)


def for_other_ranks(output: SchedulerOutput) -> SchedulerOutput:
    """Remove the parts of a step that only the sampling rank needs.

    This halves the message of a step that admits a prompt of 8,192 tokens.
    """
    if not output.admitted:
        return output
    admitted = [AdmittedSequence(one.row, _bare(one.request), []) for one in output.admitted]
    return msgspec.structs.replace(output, admitted=admitted)


def _bare(request: Request) -> Request:
    """The parts of a request that are needed by a rank that does not sample."""
    scored = request.sampling.prompt_logprobs
    is_read = scored is not None or request.pooling is not None or bool(request.media)
    return Request(
        request_id="",
        prompt_token_ids=request.prompt_token_ids if is_read else [],
        sampling=SamplingParams(prompt_logprobs=scored),
        pooling=request.pooling,
        adapter_slot=request.adapter_slot,
        images=request.images,
        audio=request.audio,
        sounds=request.sounds,
    )


def encode_frame(message: LeaderMessage | RankMessage) -> bytes:
    """Encode a message. Its length comes before it."""
    data = _encoder.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Frames:
    """Cuts a stream of bytes into the messages that `encode_frame` made."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """Add bytes; returns the messages that are now complete, without their lengths."""
        self._bytes += data
        complete: list[bytes] = []
        begin = 0
        while len(self._bytes) - begin >= _LENGTH_BYTES:
            first = begin + _LENGTH_BYTES
            end = first + int.from_bytes(self._bytes[begin:first], "little")
            if end > len(self._bytes):
                break
            complete.append(bytes(self._bytes[first:end]))
            begin = end
        del self._bytes[:begin]
        return complete


class Channel:
    """The socket to rank 0, as another rank uses it."""

    def __init__(self, connection: socket.socket) -> None:
        """
        Args:
            connection: a connected stream socket in blocking mode.
        """
        self._socket = connection
        self._frames = Frames()
        self._received: list[bytes] = []

    def send(self, message: RankMessage) -> None:
        """Send a message.

        Raises:
            OSError: rank 0 has ended.
        """
        self._socket.sendall(encode_frame(message))

    def receive(self) -> LeaderMessage:
        """Wait for the next message. The wait uses no processor time.

        Raises:
            EOFError: rank 0 has closed the socket, or has ended.
        """
        while not self._received:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError("rank 0 has closed the socket")
            self._received = self._frames.add(data)
        return leader_decoder.decode(self._received.pop(0))

    def meet(self, name: str, numbers: list[int]) -> list[list[int]]:
        """Wait until all ranks are at this point, and exchange numbers.

        Args:
            name: the name of the meeting, the same on all ranks.
            numbers: the numbers of this rank.

        Returns:
            The numbers of all ranks, in rank order.

        Raises:
            OSError: rank 0 has ended before this call.
            EOFError: rank 0 ended during the wait.
        """
        self.send(Arrived(name, numbers))
        message = self.receive()
        assert isinstance(message, Met), f"{message} came instead of the meeting {name}"
        assert message.name == name, f"the meeting {message.name} came instead of {name}"
        return message.numbers

    def receive_descriptors(self) -> list[int]:
        """The file descriptors that come before the first message.

        Raises:
            EOFError: rank 0 has ended.
        """
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1, _MOST_DESCRIPTORS)
        if not data:
            raise EOFError("rank 0 has closed the socket")
        return descriptors

    def wait_for_end(self) -> None:
        """Wait until rank 0 ends this process or has ended. Drop all messages meanwhile."""
        with contextlib.suppress(EOFError):
            while True:
                self.receive()
