"""`Service`: the state of one API server, which every handler gets: client, admission, metrics."""

from __future__ import annotations

from typing import Protocol

from ostinato.api.base.request_context import RequestContext
from ostinato.api.observability.adapter_metrics import AdapterUse, LoadedAdapters
from ostinato.api.observability.metrics_registry import EngineView, Metrics
from ostinato.api.observability.tracing import Tracer
from ostinato.api.preparation.preparation import PreparationSettings
from ostinato.api.preparation.preparer import Preparer
from ostinato.api.preparation.prompt_encoder import PromptEncoder, TextSource
from ostinato.api.service.admission import Admission, EngineQueue
from ostinato.api.service.background import BackgroundReplies
from ostinato.api.service.request_runner import Generator, RequestRunner
from ostinato.api.service.request_stats import StatsSinks
from ostinato.api.service.response_store import ResponseStore
from ostinato.conf.schema import SamplingSection
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.engine.flight_recorder import StepRecord
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import ServedModel

__all__ = ("Client", "Service")


class Client(EngineView, EngineQueue, TextSource, Generator, Protocol):
    """The part of `EngineClient` (runtime/client/client.py) that the API needs."""

    model: ServedModel

    @property
    def adapters(self) -> LoadedAdapters: ...

    async def load_adapter(
        self, name: str, path: str, *, in_place: bool = False
    ) -> ServedAdapter: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def inspect(self, timeout_s: float = ..., engine: int = ...) -> EngineState: ...

    def flight_records(self, engine: int = ...) -> list[StepRecord]: ...

    async def drain_engine(self, engine: int, timeout_s: float) -> int: ...

    def resume_engine(self, engine: int) -> None: ...

    async def reload_weights(self, timeout_s: float) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def start_profile(self) -> str: ...

    async def stop_profile(self) -> str: ...


class Service:
    """The state of one server.

    Args:
        client: the engine's client. It need not have started yet.
        server: limits and time-outs.
        sampling: defaults for parameters that a request leaves out.
        lora: how many adapters can be loaded, and from where; None = there are no adapters.
        images: the limits of images, and from where they are fetched; None = the defaults.
        audio: the limits of audio; None = the defaults.
        video: the limits of videos; None = the defaults.

    Attributes:
        admission: accepts or refuses requests, and has the phase of the server's start or end.
        preparer: decodes bodies, and makes prompts and parameters from them.
        encoder: has the tokenizer.
        runner: runs requests in the engine.
        metrics: the metrics of `/metrics`.
        stored_responses: replies of `/v1/responses` that later requests can continue.
        background: replies of `/v1/responses` that are generated without an open connection.
    """

    def __init__(
        self,
        client: Client,
        server: ServerConfig,
        sampling: SamplingSection,
        lora: LoraConfig | None = None,
        images: ImagesConfig | None = None,
        audio: AudioConfig | None = None,
        video: VideoConfig | None = None,
    ) -> None:
        self.client = client
        self.server = server
        self.sampling = sampling
        self.lora = lora or LoraConfig()
        self.audio = audio or AudioConfig()
        self.admission = Admission(client, server)
        self.encoder = PromptEncoder(client)
        self.preparer = Preparer(
            client,
            PreparationSettings(
                tool_parser=server.tool_parser,
                reasoning_parser=server.reasoning_parser,
                default_max_tokens=sampling.max_tokens,
                images=images or ImagesConfig(),
                video=video or VideoConfig(),
                audio=self.audio,
            ),
        )
        use = AdapterUse(lambda: client.adapters, self.lora.num_slots)
        self.metrics = Metrics(client, use, self._served_model, vllm_names=server.vllm_metrics)
        self._tracer = Tracer(server.otlp_endpoint) if server.otlp_endpoint else None
        sinks = StatsSinks(self.metrics, self._tracer, server.log_prompts)
        self.runner = RequestRunner(client, self.admission, sinks)
        self.stored_responses = ResponseStore(server.response_store_mib)
        self.background = BackgroundReplies()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the loaded adapters, in the order of loading."""
        return tuple(adapter.name for adapter in self.client.adapters.served)

    def model_name(self, context: RequestContext) -> str:
        """The `model` of the answer: the name of the request's adapter, or of the served model."""
        adapter = context.adapter
        return self.client.model.name if adapter is None else adapter.name

    def system_fingerprint(self, context: RequestContext) -> str:
        """The `system_fingerprint` of the answer. An adapter's answers have another one."""
        fingerprint, adapter = self.client.model.system_fingerprint, context.adapter
        return fingerprint if adapter is None else f"{fingerprint}-{adapter.digest[:12]}"

    def close(self) -> None:
        """End helper processes and export the remaining trace spans. No request may follow."""
        self.preparer.close()
        if self._tracer is not None:
            self._tracer.close()

    def _served_model(self) -> ServedModel | None:
        return self.client.model if self.admission.phase is None else None
