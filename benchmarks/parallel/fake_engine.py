"""An engine process without a model, for benchmarks/parallel/api_ceiling.py.

Of the messages of runtime/process/ipc.py it handles `AddRequest`, `AbortRequests` and `Shutdown`.
Every request gets one token in each step. A step takes 20 ms. The token ids are those of words and
of parts of words in the demo model's vocabulary.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from ostinato.runtime.process.ipc import (
    AbortRequests,
    AddRequest,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    Shutdown,
    StartEngine,
    client_decoder,
    encoder,
)
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request

__all__ = ("main",)

_STEP_S = 0.02
_TOKENIZER = Path(__file__).parents[2] / "models" / "demo"
_FIRST_TOKEN, _NUM_TOKENS = 300, 1500  # ids of words and of parts of words


class _FakeEngine:
    """Gives each request one token a step. It keeps the requests that have not ended."""

    def __init__(self) -> None:
        self._live: dict[str, Request] = {}
        self._counts: dict[str, int] = {}
        self._num_steps = self._num_tokens = 0

    def add(self, request: Request) -> None:
        self._live[request.request_id] = request
        self._counts[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._counts.pop(request_id, None)

    def step(self) -> EngineOutputs:
        outputs: list[SequenceOutput] = []
        for name, request in list(self._live.items()):
            self._counts[name] += 1
            token = _FIRST_TOKEN + (self._num_tokens + self._counts[name]) % _NUM_TOKENS
            is_last = self._counts[name] == request.sampling.max_tokens
            outputs.append(SequenceOutput(name, [token], FinishReason.length if is_last else None))
            if is_last:
                self.abort(name)
        self._num_steps += 1
        self._num_tokens += len(outputs)
        return EngineOutputs(
            outputs,
            EngineStats(
                num_running=len(self._live),
                num_steps=self._num_steps,
                num_output_tokens=self._num_tokens,
            ),
        )


def main(address: str) -> int:
    """Serve until the client sends `Shutdown` or its process ends."""
    start = b""
    while not start.endswith(b"\n"):
        start += os.read(0, 65536)
    msgspec.json.decode(start, type=StartEngine)

    def end_with_client() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=end_with_client, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    encode = encoder().encode

    def send(message: EngineMessage) -> None:
        socket.send(encode(message))

    model = ServedModel(
        name="fake",
        max_model_len=4096,
        vocab_size=_FIRST_TOKEN + _NUM_TOKENS,
        eos_token_ids=(0,),
        tokenizer=str(_TOKENIZER),
    )
    send(EngineReady(model, EngineStats()))
    engine = _FakeEngine()
    due = time.monotonic() + _STEP_S
    while True:
        while (left := due - time.monotonic()) > 0:
            if not socket.poll(int(left * 1000) + 1):
                continue
            message = client_decoder.decode(socket.recv())
            if isinstance(message, AddRequest):
                engine.add(message.request)
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    engine.abort(request_id)
            elif isinstance(message, Shutdown):
                return 0
        due = time.monotonic() + _STEP_S
        send(engine.step())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
