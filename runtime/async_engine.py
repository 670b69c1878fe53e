"""`AsyncEngine`: text generation for asyncio programs, with engines in processes of their own.

async with AsyncEngine("path/or/hub-id") as engine:
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=40)):
        print(output.text_delta, end="")
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import msgspec

from ostinato.conf.arguments.engine_arguments import argument_settings
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.runtime.client.adapter_loading import AdapterLoader
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.client.requested_adapters import RequestedAdapters
from ostinato.runtime.client.requests import resolve
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import MediaLimits
from ostinato.runtime.text.encoded_prompts import EncodedPrompt, PromptInputs
from ostinato.runtime.text.offline_prompts import DictPrompt, Prompt, prompt_list
from ostinato.runtime.types.adapters import LoRARequest, ServedAdapter
from ostinato.runtime.types.outputs import RequestOutput
from ostinato.runtime.types.params import SamplingParams

__all__ = ("AsyncEngine",)


class AsyncEngine:
    """Generates with an engine process, or with `parallel.data` of them.

    Concurrent `generate` calls of an engine are batched continuously.
    """

    def __init__(
        self,
        model: str = "",
        *,
        overrides: Sequence[str] = (),
        config: RunConfig | None = None,
        **arguments: Any,
    ) -> None:
        """Read the configuration. `async with` or `start` starts the engine processes.

        Args:
            model: a local directory, a GGUF file or a hub id. Empty = the model that `overrides`
                names. If `overrides` names none either, the bundled demo model.
            overrides: settings as on the command line, `scheduler.max_num_seqs=8`.
            config: a complete configuration, instead of `model`, `overrides` and `arguments`.
            arguments: vLLM's names of settings, such as `max_model_len=4096`
                (conf/arguments). An argument wins over the same setting in `overrides`.

        Raises:
            ConfigError: a setting is wrong, unknown or not supported, or is given beside `config`.
        """
        settings = argument_settings({"model": model or None, **arguments})
        if config is None:
            config = load_config(overrides, values=settings)
        elif settings or overrides:
            given = ", ".join([*settings, *overrides])
            raise ConfigError(f"AsyncEngine takes config=... or settings ({given}), not both")
        self._config = config
        self._counter = itertools.count()
        self._requested: RequestedAdapters | None = None
        self._loads = asyncio.Lock()  # one `LoRARequest` is loaded at a time
        self.client: EngineClient | None = None

    async def start(self) -> None:
        """Start the engine processes; returns when all are ready.

        Raises:
            StartupError: the engine cannot start.
        """
        self.client = EngineClient(self._config)
        try:
            await self.client.start()
        except BaseException:
            await self.client.close()
            raise
        self._requested = RequestedAdapters(self.client.adapters)
        for adapter in self.client.adapters.served:
            self._requested.note(adapter, self._config.lora.adapters[adapter.name], None)

    async def close(self) -> None:
        """Abort the running requests and end the engine processes."""
        if self.client is not None:
            await self.client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt | DictPrompt | Sequence[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs for a text, token ids or a conversation; see `EngineClient.generate`.

        Args:
            prompt: as for `LLM.stream`. It can have images (docs/images.md), videos
                (docs/video.md) or audio (docs/audio.md).
            lora_request: the adapter, which is loaded when it is first named. If no slot is free,
                the least recently used adapter that no request uses is replaced. None = the model
                alone.

        Raises:
            InvalidRequestError: the engine was not started, a text or conversation came without a
                tokenizer, or the request or its adapter cannot be served.
            HelperProcessError: no process could check the request's grammar.
            EngineDeadError: the engine ended and is not started again.
        """
        client = self._started()
        if sampling is None:
            sampling = msgspec.convert(client.model.default_sampling, SamplingParams)
        encoded = await asyncio.to_thread(self._encode, prompt)
        sampling = encoded.adjusted(sampling)
        adapter = None
        if lora_request is not None:
            adapter = await self._adapter(lora_request)
            # Another call can replace it before `EngineClient.generate` holds it.
            while client.adapters.get(adapter.name) != adapter:
                adapter = await self._adapter(lora_request)
        token_ids, prepared = encoded.token_ids, None
        if encoded.images or encoded.sounds or encoded.audio is not None:
            token_ids, sampling = resolve(token_ids, sampling, client.model)
            parts = await client.make_parts(sampling)
            prepared = msgspec.structs.replace(
                parts, images=encoded.images, audio=encoded.audio, sounds=encoded.sounds
            )
        async for output in client.generate(
            request_id or f"async-{next(self._counter)}",
            token_ids,
            sampling,
            prepared=prepared,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        ):
            yield output

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request names it.

        Returns:
            Whether it was loaded now; False = it was loaded before.

        Raises:
            InvalidRequestError: the engine was not started, or the adapter cannot be loaded.
            EngineDeadError: the engine ended and is not started again.
        """
        before = {adapter.slot: adapter for adapter in self._started().adapters.served}
        adapter = await self._adapter(lora_request)
        return before.get(adapter.slot) != adapter

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter of the `LoRARequest` with this id; returns whether there was one.

        Requests that use it end as if it were still loaded.
        """
        client = self._started()
        async with self._loads:
            assert self._requested is not None, "started"
            name = self._requested.ids.get(lora_id)
            if name is not None:
                await client.unload_adapter(name)
        return name is not None

    async def list_loras(self) -> set[int]:
        """The ids of the `LoRARequest`s whose adapters are loaded."""
        self._started()
        assert self._requested is not None, "started"
        return set(self._requested.ids)

    def _started(self) -> EngineClient:
        if self.client is None:
            raise InvalidRequestError("the engine was not started; use `async with AsyncEngine()`")
        return self.client

    async def _adapter(self, one: LoRARequest) -> ServedAdapter:
        """The adapter of a request, which is loaded unless it is there."""
        loader = self._started().adapter_loader
        assert self._requested is not None, "started"
        adapter = self._requested.find(one)
        if adapter is None or one.load_inplace:
            adapter = await loader.run_to_end(self._load(loader, self._requested, one))
        return adapter

    async def _load(
        self, loader: AdapterLoader, requested: RequestedAdapters, one: LoRARequest
    ) -> ServedAdapter:
        async with self._loads:
            adapter = requested.find(one)  # another call may have loaded it meanwhile
            if adapter is None or one.load_inplace:
                adapter = await loader.load_own(
                    one.lora_name, one.lora_path, in_place=True, make_room=requested.make_room
                )
                requested.note(adapter, one.lora_path, one.lora_int_id)
        return adapter

    def _encode(self, prompt: Prompt | DictPrompt | Sequence[dict[str, Any]]) -> EncodedPrompt:
        client = self._started()
        config = self._config
        media = MediaLimits(config.images, config.video, config.audio)
        inputs = PromptInputs(client.model, client.tokenizer, media)
        is_chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], dict)
        if is_chat:
            return inputs.render(prompt)  # type: ignore[arg-type]
        [one] = prompt_list(prompt)  # type: ignore[arg-type]
        return inputs.encode(one)
