"""One chat request on its way through the engine, for every dialect that is turned into one."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from ostinato.api.base.errors import renamed
from ostinato.api.base.timeline import RequestContext
from ostinato.api.openai import chat
from ostinato.api.openai.chat_events import ChatDelta, chat_deltas
from ostinato.api.openai.chat_prompt import ChatPrompt
from ostinato.api.schemas.openai import ChatCompletionRequest
from ostinato.api.service.generation import with_thinking
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.types.engine_info import ServedTask

__all__ = ("ChatRun",)


class ChatRun:
    """Call `prepare`, then `news`, once each.

    Attributes:
        generations: what the engine is asked, one.

    Raises:
        InvalidRequestError: a parameter is out of range, or the prompt does not fit.
    """

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        prompt: ChatPrompt,
        *,
        request_id: str,
        context: RequestContext | None = None,
    ) -> None:
        require_task(service.client.model, ServedTask.generate)
        body = msgspec.structs.replace(body, skip_special_tokens=prompt.skip_special_tokens)
        given = "tools"
        if prompt.constraint is not None and prompt.form.calls is None:
            given = "response_format" if body.structured_outputs is None else "structured_outputs"
        if prompt.constraint is not None:
            body = msgspec.structs.replace(
                body, structured_outputs=prompt.constraint, response_format=None
            )
        self._service = service
        self._body = body
        self._form = prompt.form
        self._names = {}
        if prompt.constraint is not None:
            self._names["structured_outputs"] = given
        self._request_id = request_id
        self._context = context or RequestContext()
        generation = chat.to_request(
            body,
            prompt.token_ids,
            service.client.model,
            request_id=request_id,
            default_max_tokens=service.sampling.max_tokens,
        )
        if prompt.thinking is not None:
            generation = with_thinking(generation, prompt.thinking)
        self.generations = [generation]

    async def prepare(self) -> None:
        """Call it first; raises InvalidRequestError for what only another process can tell."""
        with renamed(self._names):
            await self._service.prepare(self._body, self.generations, self._context)

    def news(self) -> AsyncGenerator[ChatDelta, None]:
        """The news of all its answers; closing it aborts what has not ended."""
        running = self._service.run(self._request_id, self.generations, self._context)
        return chat_deltas(running, self._form)
