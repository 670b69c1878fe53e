"""A conversation as text: through the model's template, or one that came with the request."""

from __future__ import annotations

from ostinato.api.chat import asks_for_answer, template_messages
from ostinato.api.schemas import ChatCompletionRequest, Message, TokenizeRequest
from ostinato.api.service import Service
from ostinato.runtime.template_process import render_apart

__all__ = ("render",)


async def render(
    service: Service, body: ChatCompletionRequest | TokenizeRequest, messages: list[Message]
) -> str:
    """The text that the model continues.

    Raises:
        InvalidRequestError: there is no template, it refuses the messages, or one that came with
            the request takes too much time or memory.
    """
    tokenizer = service.tokenizer("messages")
    conversation = template_messages(messages)
    if body.chat_template is None:
        return tokenizer.apply_chat_template(
            conversation,
            add_generation_prompt=asks_for_answer(body),
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
    # One at a time: whatever such templates cost, the other cores are the engine's.
    async with service.template_turn:
        return await render_apart(
            body.chat_template,
            tokenizer.special_tokens,
            conversation,
            add_generation_prompt=asks_for_answer(body),
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
