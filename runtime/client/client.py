"""`EngineClient`: sends requests to one or more engine processes and streams text back.

It runs in the API process. Detokenisation and stop strings happen here, so they delay no step.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from ostinato.conf.root import RunConfig
from ostinato.runtime.client.adapter_loading import AdapterLoader
from ostinato.runtime.client.adapter_registry import AdapterRegistry
from ostinato.runtime.client.completion import PromptCompletions
from ostinato.runtime.client.early_tokenizer import EarlyTokenizer
from ostinato.runtime.client.engine_figures import EngineFigures
from ostinato.runtime.client.pooling import make_pooling_request
from ostinato.runtime.client.requests import (
    ALONE,
    PreparedParts,
    RequestShare,
    bad_words_token_ids,
    make_requests,
    resolve,
)
from ostinato.runtime.directories import ensure_cache, make_socket_directory
from ostinato.runtime.early_start.early_engine import EarlyEngine
from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.engine.flight_recorder import StepRecord
from ostinato.runtime.errors import DeadlineError, EngineDeadError, StartupError
from ostinato.runtime.fair_queue import FairQueue
from ostinato.runtime.grammar.compiler import GrammarCompiler
from ostinato.runtime.nodes.engine_hosts import EngineHosts
from ostinato.runtime.process.ipc import UtilityName
from ostinato.runtime.replicas.replica import Reader, Replica
from ostinato.runtime.replicas.replica_set import ReplicaSet
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.outputs import (
    DEADLINE_REASON,
    FinishReason,
    PooledOutput,
    RequestOutput,
)
from ostinato.runtime.types.params import PoolingParams, SamplingParams
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__all__ = ("EngineClient",)


class EngineClient(EngineFigures):
    """Generates text and vectors with the replicas of one model.

    All methods run on one event loop. `model` and `tokenizer` are set once `start` has returned.

    Args:
        config: the configuration of the server and of every replica's engine.
        early: an engine process that has been started, or None.

    Attributes:
        adapter_loader: loads adapters for this process; `load_adapter` is for clients of a server.
        startup_seconds: seconds of the finished phases of the first start, by name.

    Raises:
        StartupError: no temporary directory can be made, or `EngineHosts` raises it.
    """

    model: ServedModel
    tokenizer: Tokenizer | None

    def __init__(self, config: RunConfig, early: EarlyEngine | None = None) -> None:
        self._config = config
        ensure_cache()
        self._early_tokenizer = EarlyTokenizer(config.model)
        self._directory = make_socket_directory()
        self._hosts = EngineHosts(config.engine, config.server, self._directory.path, early)
        self._set = ReplicaSet(
            self._hosts.launchers, config.server, config.parallel, config.cache.block_size
        )
        self.replicas = self._set.replicas
        self.adapter_loader = AdapterLoader(config.engine.lora, self._set)
        self._counter = itertools.count()
        self._grammars: GrammarCompiler | None = None
        self.startup_seconds: dict[str, float] = {}
        self.determinism: dict[str, str] = {}  # class, isa and fingerprint; empty before the start

    @property
    def adapters(self) -> AdapterRegistry:
        """The adapters that requests can name."""
        return self.adapter_loader.registry

    async def start(
        self, on_phase: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        """Call `spawn`, then `wait_until_ready`."""
        await self.spawn()
        await self.wait_until_ready(on_phase)

    async def spawn(self) -> None:
        """Start the engine processes. The call returns at once; the processes then load the model.

        Raises:
            StartupError: there is no file `model.chat_template`, or `EngineHosts.start` or
                `EngineLauncher.spawn` raises it.
        """
        self._early_tokenizer.check_template()
        await self._hosts.start()
        for replica in self.replicas:
            await replica.spawn()
        self._early_tokenizer.begin()

    async def wait_until_ready(
        self, on_phase: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        """Wait until all spawned engines serve.

        Args:
            on_phase: called with each phase and its seconds. Each further replica is one phase.

        Raises:
            StartupError: an engine cannot start, or the tokenizer or an adapter cannot be loaded.
        """

        def note(name: str, seconds: float) -> None:
            self.startup_seconds[name] = seconds
            on_phase(name, seconds)

        await asyncio.gather(*(self._wait_for(replica, note) for replica in self.replicas))
        # A request that one replica takes must fit into each of them.
        shortest = min(replica.model.max_model_len for replica in self.replicas)
        self.model = msgspec.structs.replace(self.replicas[0].model, max_model_len=shortest)
        self._set_determinism()
        begin = time.perf_counter()
        self.tokenizer = await self._early_tokenizer.get(self.model.tokenizer)
        self._grammars = GrammarCompiler(self.model)
        note("tokenizer", time.perf_counter() - begin)
        self.adapters.base_name = self.model.name
        if self._config.lora.adapters:
            begin = time.perf_counter()
            await self.adapter_loader.load_configured()
            note("adapters", time.perf_counter() - begin)

    async def _wait_for(self, replica: Replica, note: Callable[[str, float], None]) -> None:
        """Wait until a replica serves. For replicas after the first, the start is one phase."""
        begin = time.perf_counter()
        try:
            await replica.wait_until_ready((lambda *phase: None) if replica.number else note)
        except StartupError as error:
            if len(self.replicas) == 1:
                raise
            raise StartupError(f"{replica.name} of {len(self.replicas)}: {error}") from error
        if replica.number:
            note(f"{replica.name} ready", time.perf_counter() - begin)

    async def compile_grammar(self, constraint: StructuredOutputsParams) -> str:
        """The grammar of a constraint. `generate` takes it in `prepared`.

        Raises:
            InvalidRequestError: the constraint is not valid, or takes too much time or memory.
            HelperProcessError: no process could check the constraint.
        """
        assert self._grammars is not None, "called before wait_until_ready"
        return await self._grammars.compile_async(constraint)

    async def generate(  # noqa: PLR0913 - the parts of a request
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
        """Yield outputs of all `sampling.n` completions until each has ended.

        Closing the iterator aborts the request. With beam search, or more candidates than `n`, all
        outputs come at the end. Outputs pause while a request goes to another engine process.

        Args:
            share: which part of an HTTP request the prompt is.
            trace: the outputs carry timeline events.
            deadline: the time.monotonic() at which the completions are ended; None = no deadline.
            prepared: None = made here. If given, prompt and parameters must be from `resolve`.
            adapter: one of `adapters`, which computes the prompt with the model. It keeps its slot
                until the iterator has ended.

        Raises:
            DeadlineError: the deadline passed before the first output.
            InvalidRequestError: the request cannot be served; raised before the first output.
            HelperProcessError: no process could check the request's grammar.
            EngineDeadError: the engine ended and is not started again.
        """
        if adapter is not None:
            self.adapters.hold(adapter)
        reader: Reader = FairQueue()
        completions: PromptCompletions | None = None
        timer = None if deadline is None else _alarm(reader, deadline)
        has_outputs = False
        try:
            if prepared is None:
                prompt_token_ids, sampling = resolve(prompt_token_ids, sampling, self.model)
                prepared = await self.make_parts(sampling)
            requests = make_requests(
                self._unique(request_id),
                prompt_token_ids,
                sampling,
                self.model,
                priority=priority,
                cache_salt=cache_salt,
                share=share,
                parts=prepared,
                adapter=adapter,
            )
            if trace:
                requests = [msgspec.structs.replace(one, trace=True) for one in requests]
            completions = PromptCompletions(requests, sampling, self.tokenizer)
            await self._set.replica_for(requests[0]).submit(requests, reader)
            while unfinished := completions.unfinished_ids:
                _, event = await reader.get()
                if isinstance(event, EngineDeadError):
                    raise event
                if isinstance(event, DeadlineError):
                    if not has_outputs:
                        raise event
                    outputs = completions.cut(DEADLINE_REASON)
                else:
                    outputs = completions.process(event)
                # A stop string or the deadline ends completions here. The engine still runs them.
                await self._set.remove(set(unfinished).difference(completions.unfinished_ids))
                for number, output in enumerate(outputs):
                    if number:  # the text of a long beam takes milliseconds: let other tasks run
                        await asyncio.sleep(0)
                    has_outputs = True
                    output.request_id = request_id
                    yield output
        finally:
            if timer is not None:
                timer.cancel()
            unfinished = () if completions is None else completions.unfinished_ids
            if unfinished or adapter is not None:
                await asyncio.shield(self._forget(unfinished, adapter))

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
        """Compute the vector of one text. Cancelling the call aborts the request.

        Args:
            place: index of the text among the texts of its HTTP request.
            adapter: as for `generate`.

        Raises:
            InvalidRequestError: the request cannot be served.
            EngineDeadError: the engine ended and is not started again.
        """
        request = make_pooling_request(
            self._unique(request_id),
            prompt_token_ids,
            params,
            self.model,
            priority=priority,
            cache_salt=cache_salt,
            place=place,
            trace=trace,
            adapter=adapter,
        )
        reader: Reader = FairQueue()
        if adapter is not None:
            self.adapters.hold(adapter)
        try:
            await self._set.replica_for(request).submit([request], reader)
            _, event = await reader.get()
        finally:
            await asyncio.shield(self._forget([request.request_id], adapter))
        if isinstance(event, EngineDeadError | DeadlineError):
            raise event
        return PooledOutput(
            request_id=request_id,
            data=event.pooled or b"",
            num_prompt_tokens=len(prompt_token_ids),
            num_cached_tokens=event.num_cached_tokens,
            finish_reason=event.finish_reason or FinishReason.error,
            error=event.error,
            refusal=event.refusal,
            scheduled_time=event.scheduled_time,
            num_preemptions=event.num_preemptions,
            events=event.events,
        )

    async def abort(self, request_id: str) -> None:
        """End all completions of a request. Does nothing if the request has ended."""
        for replica in self.replicas:
            ids = [one for one in replica.requests.ids() if one.rsplit("#", 1)[0] == request_id]
            await replica.abort(ids)

    async def _forget(self, request_ids: Iterable[str], adapter: ServedAdapter | None) -> None:
        """Forget requests, and release their adapter when no engine runs them any more.

        If the slot were free earlier, a request could go on with another adapter in it, and its
        blocks would be cached as those of this adapter.
        """
        try:
            await self._set.remove(request_ids)
        finally:
            if adapter is not None:
                self.adapters.release(adapter)

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> ServedAdapter:
        """Load an adapter that a client of the server asks for; see `AdapterLoader.load`.

        Args:
            name: requests name the adapter so.
            path: see `allowed_directory`, which raises InvalidRequestError too.
            in_place: replace an adapter of this name.
        """
        return await self.adapter_loader.load_for_client(name, path, in_place=in_place)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that name it already end as if it were still loaded.

        Raises:
            InvalidRequestError: there is none of this name, or it is being loaded.
        """
        self.adapters.remove(name)

    async def reset_prefix_cache(self) -> None:
        """Forget the cached blocks of all replicas.

        Raises:
            InvalidRequestError: sequences hold blocks.
            EngineDeadError: the engine does not run.
        """
        await self._call(UtilityName.reset_prefix_cache)

    async def start_profile(self) -> str:
        """Let the engines record their steps; returns the directory of the traces.

        Raises:
            InvalidRequestError: server.profile_dir is unset or not writable, or a recording runs.
            EngineDeadError: the engine does not run.
        """
        return (await self._call(UtilityName.start_profile))[0]

    async def stop_profile(self) -> str:
        """End the recording; returns the paths of the traces, one a line.

        Raises:
            InvalidRequestError: nothing is recorded, or a trace cannot be written.
            EngineDeadError: the engine does not run.
        """
        return "\n".join(await self._call(UtilityName.stop_profile))

    async def inspect(self, timeout_s: float = 2.0, engine: int = 0) -> EngineState:
        """The state of one replica's engine. Concurrent callers share one answer.

        Raises:
            TimeoutError: no answer within `timeout_s`: a long step runs, or the engine hangs.
            EngineDeadError: the engine does not run.
        """
        return await self.replicas[engine].calls.inspect(timeout_s)

    def flight_records(self, engine: int = 0) -> list[StepRecord]:
        """The last steps of one replica, from the recorder's file, even if the engine hangs."""
        return self.replicas[engine].flight_records()

    async def drain_engine(self, engine: int, timeout_s: float) -> int:
        """Take one replica out of service; see `ReplicaSet.drain`."""
        return await self._set.drain(engine, timeout_s)

    def resume_engine(self, engine: int) -> None:
        """Put a drained replica into service again.

        Raises:
            InvalidRequestError: there is no such replica.
        """
        self._set.resume(engine)

    async def reload_weights(self, timeout_s: float) -> None:
        """Let the replicas read the weights again, one after the other; see `ReplicaSet.reload`."""
        await self._set.reload(timeout_s)
        self._set_determinism()

    def _set_determinism(self) -> None:
        """Set `determinism` and the fingerprint of `model`. Reloaded weights change both."""
        fingerprint = self.replicas[0].model.system_fingerprint
        self.model = msgspec.structs.replace(self.model, system_fingerprint=fingerprint)
        self.determinism = {
            "class": self.model.determinism,
            "isa": self.model.isa,
            "fingerprint": fingerprint,
        }

    async def close(self) -> None:
        """End the engine processes and free everything; safe to call twice."""
        if self._grammars is not None:
            self._grammars.close()
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        await self._hosts.close()
        self._directory.remove()

    def _unique(self, request_id: str) -> str:
        """The engine's id of a request. It is unique even if a client sends an id twice."""
        return f"{request_id}#{next(self._counter)}"

    async def make_parts(self, sampling: SamplingParams) -> PreparedParts:
        """The parts of a request with these parameters, which are from `resolve`."""
        constraint = sampling.structured_outputs
        grammar = "" if constraint is None else await self.compile_grammar(constraint)
        return PreparedParts(grammar, bad_words_token_ids(sampling.bad_words, self.tokenizer))

    async def _call(self, name: UtilityName) -> list[str]:
        """The answers of all replicas that serve or are being started again."""
        replicas = [one for one in self.replicas if one.death_reason is None]
        return await asyncio.gather(*(one.calls.utility(name) for one in replicas or self.replicas))


def _alarm(reader: Reader, deadline: float) -> asyncio.TimerHandle:
    """Put a DeadlineError into the queue at the deadline."""
    error = DeadlineError("the request's deadline passed before its first token")
    delay = max(0.0, deadline - time.monotonic())
    return asyncio.get_running_loop().call_later(delay, reader.put_nowait, ("", error))
