"""An engine process without a model, which speaks runtime/process/ipc.py and has slots of adapters.

Each request gets one token a step. The token follows from what its slot has at that moment, so a
slot that is overwritten while a request uses it changes the request's tokens. `adapter_config.json`
of an adapter can have these keys:

    seconds   how long its load takes
    file      its load ends when the file with this path exists
    error     why it cannot be loaded
    deaths    how many engine processes its load kills; each leaves a file `death-PID`
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import zmq

from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.runtime.process.ipc import (
    AbortRequests,
    AddRequest,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    LoadAdapter,
    Shutdown,
    StepStarted,
    UtilityReply,
    client_decoder,
    encoder,
)
from ostinato.runtime.types.engine_info import EngineStats, ServedModel, ServedTask
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.request import Request

VOCAB_SIZE = 1000
_STEP_S = 0.005


def token_of(digest: str) -> int:
    """The token that the adapter with this digest gives; the empty digest is the model alone."""
    return 10 + int(digest or "0", 16) % 900


def write_adapter(directory: Path, content: str = "", **keys: object) -> Path:
    """Write the files of an adapter; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(keys))
    (directory / "adapter_model.safetensors").write_text(content or directory.name)
    return directory


class _Engine:
    def __init__(self) -> None:
        self.slots: dict[int, str] = {}  # slot -> digest
        self.live: dict[str, Request] = {}
        self.counts: dict[str, int] = {}
        self.loads: list[tuple[float, LoadAdapter]] = []  # (when the load ends, its message)
        self.num_steps = 0

    def load(self, message: LoadAdapter) -> UtilityReply | None:
        config = json.loads((Path(message.path) / "adapter_config.json").read_text())
        if len(list(Path(message.path).glob("death-*"))) < config.get("deaths", 0):
            (Path(message.path) / f"death-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if any(request.adapter_slot == message.slot for request in self.live.values()):
            return UtilityReply(message.call_id, "requests use the slot", is_refused=True)
        self.slots.pop(message.slot, None)
        self.loads.append((time.monotonic() + config.get("seconds", 0), message))
        return None

    def ended_loads(self) -> list[UtilityReply]:
        now, replies = time.monotonic(), []
        for end, message in list(self.loads):
            config = json.loads((Path(message.path) / "adapter_config.json").read_text())
            if now < end or ("file" in config and not Path(config["file"]).exists()):
                continue
            self.loads.remove((end, message))
            if "error" in config:
                replies.append(UtilityReply(message.call_id, config["error"], is_refused=True))
            else:
                self.slots[message.slot] = adapter_digest(Path(message.path))
                replies.append(UtilityReply(message.call_id, ""))
        return replies

    def add(self, request: Request) -> list[SequenceOutput]:
        if request.adapter_slot >= 0:
            digest = self.slots.get(request.adapter_slot)
            if digest is None or request.cache_keys != (digest,):
                text = f"slot {request.adapter_slot} does not have the adapter"
                return [SequenceOutput(request.request_id, [], FinishReason.error, error=text)]
        self.live[request.request_id] = request
        self.counts[request.request_id] = len(request.output_token_ids)
        return []

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.counts.pop(request_id, None)

    def step(self) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = []
        for name, request in list(self.live.items()):
            token = token_of(self.slots.get(request.adapter_slot, ""))
            if request.pooling is not None:
                pooled = str(token).encode()
                outputs.append(SequenceOutput(name, [], FinishReason.stop, pooled=pooled))
                self.abort(name)
                continue
            self.counts[name] += 1
            is_last = self.counts[name] >= (request.sampling.max_tokens or 1)
            outputs.append(SequenceOutput(name, [token], FinishReason.length if is_last else None))
            if is_last:
                self.abort(name)
        self.num_steps += 1
        return outputs


def main(address: str) -> int:
    start = b""
    while not start.endswith(b"\n"):
        start += os.read(0, 65536)

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
        max_model_len=100_000,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        tokenizer="",
        tasks=(ServedTask.generate, ServedTask.embed),
        embedding_size=4,
    )
    send(EngineReady(model, EngineStats()))
    engine = _Engine()
    while True:
        outputs: list[SequenceOutput] = []
        while socket.poll(int(_STEP_S * 1000)):
            message = client_decoder.decode(socket.recv())
            if isinstance(message, AddRequest):
                send(StepStarted([message.request.request_id], 0.0))
                outputs += engine.add(message.request)
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    if request_id in engine.live:
                        outputs.append(SequenceOutput(request_id, [], FinishReason.abort))
                    engine.abort(request_id)
            elif isinstance(message, LoadAdapter):
                if (refusal := engine.load(message)) is not None:
                    send(refusal)
            elif isinstance(message, Shutdown):
                return 0
        for reply in engine.ended_loads():
            send(reply)
        outputs += engine.step()
        stats = EngineStats(num_running=len(engine.live), num_steps=engine.num_steps)
        send(EngineOutputs(outputs, stats))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
