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

from ostinato.conf.compose import load_config
from ostinato.conf.engine_arguments import argument_settings
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import InvalidRequestError
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
                (conf/engine_arguments.py). An argument wins over the same setting in `overrides`.

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
        prompt: str | Sequence[int] | Sequence[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs for a text, token ids or a conversation; see `EngineClient.generate`.

        Raises:
            InvalidRequestError: the engine was not started, a text or conversation came without a
                tokenizer, or the request cannot be served.
            HelperProcessError: no process could check the request's grammar.
            EngineDeadError: the engine ended and is not started again.
        """
        if self.client is None:
            raise InvalidRequestError("the engine was not started; use `async with AsyncEngine()`")
        client = self.client
        if sampling is None:
            sampling = msgspec.convert(client.model.default_sampling, SamplingParams)
        token_ids = await asyncio.to_thread(self._encode, prompt)
        async for output in client.generate(
            request_id or f"async-{next(self._counter)}",
            token_ids,
            sampling,
            priority=priority,
            cache_salt=cache_salt,
        ):
            yield output

    def _encode(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> list[int]:
        assert self.client is not None, "checked by generate"
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return list(prompt)  # type: ignore[arg-type]
        tokenizer = self.client.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "the model was loaded without a tokenizer: send token ids, or set model.tokenizer",
                param="prompt",
            )
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return tokenizer.encode(tokenizer.apply_chat_template(prompt), add_special_tokens=False)  # type: ignore[arg-type]
