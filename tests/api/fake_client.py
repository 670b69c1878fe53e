"""A stand-in for the engine's client: the same interface, with outputs from a list, no process."""

from __future__ import annotations

import asyncio
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from ostinato.runtime.client.requests import ALONE, PreparedParts, RequestShare
from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.engine.flight_recorder import StepRecord
from ostinato.runtime.errors import EngineDeadError, InvalidRequestError
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import (
    EngineStats,
    ReplicaState,
    ReplicaStatus,
    ServedModel,
)
from ostinato.runtime.types.outputs import FinishReason, PooledOutput, RequestOutput, TokenLogprobs
from ostinato.runtime.types.params import PoolingParams, SamplingParams
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("FakeAdapters", "FakeClient", "scripted")


def scripted(text: str, token_ids: Sequence[int], **fields: object) -> RequestOutput:
    """One scripted output; `num_output_tokens` is set when the client gives the output."""
    return RequestOutput(
        request_id="", index=0, text_delta=text, new_token_ids=list(token_ids), **fields
    )


class FakeAdapters:
    """Loaded adapters, and how many holds each has (`held`)."""

    def __init__(self) -> None:
        self.served: list[ServedAdapter] = []
        self.held: Counter[ServedAdapter] = Counter()
        self.count = 0  # adapters that have been loaded so far

    def get(self, name: str) -> ServedAdapter | None:
        return next((one for one in self.served if one.name == name), None)

    def hold(self, adapter: ServedAdapter) -> None:
        self.held[adapter] += 1

    def release(self, adapter: ServedAdapter) -> None:
        assert self.held[adapter] > 0, f"{adapter.name} is not held"
        self.held[adapter] -= 1

    def add(self, name: str, path: str = "/adapters/one") -> ServedAdapter:
        """Load an adapter in a slot of its own. It replaces one of the same name."""
        adapter = ServedAdapter(
            name=name,
            path=path,
            digest=f"{self.count:012x}".ljust(64, "0"),
            slot=self.count,
            created=1_700_000_001 + self.count,
        )
        self.count += 1
        self.remove(name)
        self.served.append(adapter)
        return adapter

    def remove(self, name: str) -> None:
        self.served = [one for one in self.served if one.name != name]


class FakeClient:
    """Gives each request the outputs of `script`, each output to all completions in turn.

    An exception in the script is raised. At an entry `None` the request waits until it is aborted
    or `released` is set. `pool` uses only the first entry of the script. If this is `None`, the
    request waits until it is aborted.
    """

    def __init__(
        self,
        script: Sequence[RequestOutput | Exception | None],
        *,
        tokenizer: Tokenizer | None = None,
        **model: object,
    ) -> None:
        fields = {
            "name": "test-model",
            "max_model_len": 64,
            "vocab_size": 1000,
            "eos_token_ids": (0,),
            "tokenizer": "",
            "created": 1_700_000_000,
            "determinism": "bitwise",
            "system_fingerprint": "fp-bitwise-test",
        }
        self.model = ServedModel(**(fields | model))
        self.tokenizer = tokenizer
        self.script = script
        self.stats = EngineStats()
        self.death_reason: str | None = None
        self.restart_reason: str | None = None
        self.restarts: dict[str, int] = {}
        self.seconds_since_step = 0.0
        self.seconds_overdue = 0.0
        self.released = threading.Event()
        self.num_queued = 0
        self.num_queued_tokens = 0
        self.determinism = {"class": "bitwise", "isa": "", "fingerprint": "fp-bitwise-test"}
        self.startup_seconds = {"imports": 1.5, "ready": 3.0}
        self.num_unfinished = 0
        self.compiled: list[StructuredOutputsParams] = []
        self.engine_pid: int | None = None
        self.state: EngineState | Exception = EngineDeadError("the engine does not run: never ran")
        self.records: list[StepRecord] = []
        self.traced: list[bool] = []
        self.deadlines: list[float | None] = []
        self.requests: list[tuple[list[int], SamplingParams, int, str]] = []
        self.prepared: list[PreparedParts | None] = []
        self.aborted: list[str] = []
        self.pooled: list[tuple[list[int], PoolingParams, int, str]] = []
        self.resets = 0
        self.adapters = FakeAdapters()
        self.loading_error: Exception | None = None
        self.used: list[ServedAdapter | None] = []  # of each call of `generate` and `pool`

    @property
    def is_alive(self) -> bool:
        return self.death_reason is None and self.restart_reason is None

    async def compile_grammar(self, constraint: StructuredOutputsParams) -> str:
        self.compiled.append(constraint)
        return "a grammar"

    @property
    def pid(self) -> int | None:
        return self.engine_pid

    @property
    def replicas(self) -> list[FakeClient]:
        """The client itself, as the only replica."""
        return [self]

    @property
    def status(self) -> ReplicaStatus:
        state = ReplicaState.serving if self.is_alive else ReplicaState.dead
        return ReplicaStatus(
            engine=0, state=state, num_unfinished=self.num_unfinished, num_restarts=0, pid=self.pid
        )

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> ServedAdapter:
        if self.loading_error is not None:
            raise self.loading_error
        if self.adapters.get(name) is not None and not in_place:
            raise InvalidRequestError(f"the adapter {name!r} is loaded already", param="lora_name")
        return self.adapters.add(name, path)

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.get(name) is None:
            raise InvalidRequestError(f"there is no adapter {name!r}", status=404)
        self.adapters.remove(name)

    async def drain_engine(self, engine: int, timeout_s: float) -> int:
        raise InvalidRequestError("no other engine takes requests", status=409)

    def resume_engine(self, engine: int) -> None:
        """Does nothing: the fake engine always takes requests."""

    async def reload_weights(self, timeout_s: float) -> None:
        """Does nothing: the fake engine has no weights."""

    async def inspect(self, timeout_s: float = 2.0, engine: int = 0) -> EngineState:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def flight_records(self, engine: int = 0) -> list[StepRecord]:
        return self.records

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        share: RequestShare = ALONE,
        trace: bool = False,
        deadline: float | None = None,
        prepared: PreparedParts | None = None,
        adapter: ServedAdapter | None = None,
    ) -> AsyncIterator[RequestOutput]:
        if self.death_reason is not None:
            raise EngineDeadError(f"the engine does not run: {self.death_reason}")
        self.requests.append((prompt_token_ids, sampling, priority, cache_salt))
        self.prepared.append(prepared)
        self._use(adapter)
        self.traced.append(trace)
        self.deadlines.append(deadline)
        self.num_unfinished += sampling.n
        counts = [0] * sampling.n
        ended = False
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    while not self.released.is_set():  # set by the thread of a test
                        await asyncio.sleep(0.01)
                    continue
                for index in range(sampling.n):
                    await asyncio.sleep(0)
                    is_first = not counts[index] and step.new_token_ids
                    counts[index] += len(step.new_token_ids)
                    output = self._output(step, request_id, index, counts[index], sampling)
                    if is_first and sampling.prompt_logprobs is not None:
                        output.prompt_logprobs = [
                            TokenLogprobs(-0.25, 1, [token][: sampling.prompt_logprobs], [-0.25])
                            for token in prompt_token_ids[1:]
                        ]
                    yield output
            ended = True
        finally:
            self.num_unfinished -= sampling.n
            if not ended:
                self.aborted.append(request_id)

    async def pool(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        place: int = 0,
        trace: bool = False,
        adapter: ServedAdapter | None = None,
    ) -> PooledOutput:
        """A unit vector of two numbers. Its direction depends on the prompt's first token."""
        if self.death_reason is not None:
            raise EngineDeadError(f"the engine does not run: {self.death_reason}")
        self.pooled.append((prompt_token_ids, params, priority, cache_salt))
        self._use(adapter)
        self.traced.append(trace)
        step = self.script[0] if self.script else None
        if isinstance(step, Exception):
            raise step
        if step is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append(request_id)
        angle = prompt_token_ids[0] / self.model.vocab_size
        return PooledOutput(
            request_id=request_id,
            data=struct.pack("<2f", math.cos(angle), math.sin(angle)),
            num_prompt_tokens=len(prompt_token_ids),
            num_cached_tokens=1,
            finish_reason=step.finish_reason or FinishReason.stop,
            error=step.error,
            scheduled_time=step.scheduled_time and time.monotonic(),
            events=step.events,
        )

    def _use(self, adapter: ServedAdapter | None) -> None:
        assert adapter is None or self.adapters.held[adapter], "an adapter that is not held"
        self.used.append(adapter)

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def start_profile(self) -> str:
        raise InvalidRequestError("server.profile_dir is not set", code="call_refused", status=409)

    async def stop_profile(self) -> str:
        return "/traces/engine.json.gz"

    def _output(
        self,
        step: RequestOutput,
        request_id: str,
        index: int,
        num_output_tokens: int,
        sampling: SamplingParams,
    ) -> RequestOutput:
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [
                TokenLogprobs(-0.5, 1, [token, token + 1][: sampling.logprobs], [-0.5, -1.5])
                for token in step.new_token_ids
            ]
        return RequestOutput(
            request_id=request_id,
            index=index,
            text_delta=step.text_delta,
            new_token_ids=step.new_token_ids,
            logprobs=logprobs,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
            num_cached_tokens=step.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            error=step.error,
            # Instead of the time in the script, the output has the present time.
            scheduled_time=step.scheduled_time and time.monotonic(),
            num_preemptions=step.num_preemptions,
            events=step.events,
        )


HELLO = (
    scripted("Hel", [5], num_cached_tokens=2),
    scripted("", [6], num_cached_tokens=2),  # its text is held back
    scripted("lo", [7], num_cached_tokens=2, finish_reason=FinishReason.stop),
)
