"""`/v1/chat/completions`: checks the body, and converts parsed outputs to chunks.

These are pure functions. `preparation` calls those that read the body, `reply` the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from ostinato.api.chat.chat_deltas import ChatDelta, CollectedAnswer
from ostinato.api.openai.logprobs import (
    ShownToken,
    TokenBytes,
    all_chat_logprobs,
    prompt_logprobs,
)
from ostinato.api.parsing.events import CallArguments, CallBegins, Content, Event, Reasoning
from ostinato.api.preparation.generation import Generation, check_fields
from ostinato.api.schemas.chat_completions import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatResponse,
    CustomToolDelta,
    DeltaMessage,
    FunctionDelta,
    ReplyCustomTool,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
    ToolCallDelta,
)
from ostinato.api.schemas.usage import CompletionUsage, PromptLogprobs
from ostinato.api.service.reply_state import ReplyHead, ReplyOptions
from ostinato.runtime.errors import InvalidRequestError

__all__ = (
    "check",
    "echo_text",
    "reply_options",
    "to_chunk",
    "to_chunks",
    "to_delta",
    "to_response",
)


def check(body: ChatCompletionRequest) -> None:
    """Check the fields that need no tokenisation.

    Raises:
        InvalidRequestError: two fields contradict each other.
    """
    check_fields(body)
    if body.echo and body.messages[-1].role != "assistant":
        raise InvalidRequestError(
            "echo=true repeats the last message, which must be the assistant's; its role is"
            f" {body.messages[-1].role!r}; leave echo out",
            param="echo",
            code="invalid_value",
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs=true", param="top_logprobs", code="invalid_value"
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidRequestError(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens}"
            " are two names of one limit; give one",
            param="max_completion_tokens",
            code="invalid_value",
        )


def echo_text(body: ChatCompletionRequest) -> str:
    """The text with which the answer begins: the last message if `echo` is set, else nothing."""
    return (body.messages[-1].text or "") if body.echo else ""


def reply_options(body: ChatCompletionRequest) -> ReplyOptions:
    """The parts of the outputs that the reply shows."""
    return ReplyOptions(
        num_top_logprobs=(
            len(body.logprob_token_ids or ()) or body.top_logprobs or 0 if body.logprobs else None
        ),
        num_prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        as_token_ids=body.return_tokens_as_token_ids,
    )


async def to_chunks(
    head: ReplyHead,
    delta: ChatDelta,
    token_bytes: TokenBytes,
    *,
    options: ReplyOptions,
    echo: str = "",
    first_usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET,
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET,
) -> list[ChatChunk]:
    """The chunks for one delta. Other tasks run while a large one is made.

    The first delta of a choice begins with a chunk that has the role. While text is held back,
    there is a chunk only if it has log-probabilities or token ids to show.

    Args:
        head: the fields that every chunk repeats.
        delta: the delta.
        token_bytes: returns the bytes of a token.
        options: the parts of the outputs that the reply shows.
        echo: text of the first chunk.
        first_usage: `usage` of the chunk with the role; UNSET = the chunk has no such field.
        usage: `usage` of the other chunks; UNSET = they have no such field.
    """
    output = delta.output
    choices: list[tuple[ChatChunkChoice, CompletionUsage | msgspec.UnsetType | None]] = []
    if output.num_output_tokens == len(output.new_token_ids):  # the first output of this completion
        role = ChatChunkChoice(index=output.index, delta=DeltaMessage("assistant", echo))
        choices.append((role, first_usage))
    logprobs = None
    if options.num_top_logprobs is not None and output.new_token_ids:
        assert output.logprobs is not None, "the engine reports what the request asked for"
        logprobs = await all_chat_logprobs(
            output.new_token_ids,
            output.logprobs.__getitem__,
            token_bytes,
            num_top=options.num_top_logprobs,
            as_ids=options.as_token_ids,
        )
    has_tokens = logprobs is not None or (options.return_token_ids and output.new_token_ids)
    message = to_delta(delta.events)
    if message != DeltaMessage() or has_tokens or delta.finish_reason is not None:
        if message == DeltaMessage() and has_tokens:
            message = DeltaMessage(content="")
        choice = ChatChunkChoice(
            index=output.index,
            delta=message,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=msgspec.UNSET if output.finish_reason is None else output.stop_reason,
            token_ids=options.token_ids(output.new_token_ids),
        )
        choices.append((choice, usage))
    return [to_chunk(head, [choice], count) for choice, count in choices]


def to_chunk(
    head: ReplyHead,
    choices: list[ChatChunkChoice],
    usage: CompletionUsage | msgspec.UnsetType | None,
) -> ChatChunk:
    """The chunk with some choices; none for the last chunk, which has the usage of the request."""
    return ChatChunk(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        service_tier=head.service_tier,
        usage=usage,
    )


def to_delta(events: Sequence[Event]) -> DeltaMessage:
    """Join the events of one output to one delta message."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) or None
    calls: dict[int, ToolCallDelta] = {}
    for event in events:
        if isinstance(event, CallBegins):
            calls[event.index] = ToolCallDelta(
                index=event.index,
                id=event.id,
                type="custom" if event.is_custom else "function",
                function=None if event.is_custom else FunctionDelta(event.name, ""),
                custom=CustomToolDelta(event.name, "") if event.is_custom else None,
            )
        elif isinstance(event, CallArguments):
            calls[event.index] = _with_arguments(calls.get(event.index), event)
    return DeltaMessage(
        content=content or None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=list(calls.values()) or None,
    )


def _with_arguments(before: ToolCallDelta | None, event: CallArguments) -> ToolCallDelta:
    """Add arguments to a piece of a call; `before` = None: there is no piece yet."""
    if before is None:
        before = ToolCallDelta(index=event.index)
    if event.is_custom:
        known = before.custom or CustomToolDelta()
        custom = CustomToolDelta(known.name, (known.input or "") + event.text)
        return msgspec.structs.replace(before, custom=custom)
    known = before.function or FunctionDelta()
    function = FunctionDelta(known.name, (known.arguments or "") + event.text)
    return msgspec.structs.replace(before, function=function)


async def to_response(
    head: ReplyHead,
    generation: Generation,
    answers: Mapping[int, CollectedAnswer],
    token_bytes: TokenBytes,
    *,
    options: ReplyOptions,
    echo: str = "",
    only_calls: bool = False,
    usage: CompletionUsage,
) -> ChatResponse:
    """The whole answer to a request without `stream`. Other tasks run while a large one is made.

    Args:
        head: the fields of the reply.
        generation: the prepared prompt.
        answers: the joined answers, by the index of the choice.
        token_bytes: returns the bytes of a token.
        options: the parts of the outputs that the reply shows.
        echo: the text with which each answer begins.
        only_calls: the answer must be calls. Then the message has `tool_calls` even if the list is
            empty.
        usage: the token counts.
    """
    choices = []
    shown: dict[int, ShownToken] = {}
    for index, answer in sorted(answers.items()):
        one = answer.completion
        assert answer.finish_reason is not None, "collected until every completion had ended"
        logprobs = None
        if options.num_top_logprobs is not None:
            logprobs = await all_chat_logprobs(
                one.token_ids,
                one.logprobs,
                token_bytes,
                num_top=options.num_top_logprobs,
                as_ids=options.as_token_ids,
                shown=shown,
            )
        choices.append(
            ChatChoice(
                index=index,
                message=_reply_message(answer, echo, only_calls=only_calls),
                logprobs=logprobs,
                finish_reason=answer.finish_reason,
                stop_reason=one.stop_reason,
                token_ids=options.token_ids(one.token_ids),
            )
        )
        await asyncio.sleep(0)
    scores: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    if options.num_prompt_logprobs is not None:
        scores = await prompt_logprobs(
            generation.prompt_token_ids,
            answers[0].completion.prompt_logprobs,
            token_bytes,
            num_top=options.num_prompt_logprobs,
        )
    return ChatResponse(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
        prompt_logprobs=scores,
        service_tier=head.service_tier,
    )


def _reply_message(answer: CollectedAnswer, echo: str, *, only_calls: bool) -> ReplyMessage:
    message = answer.message
    content = echo + message.content
    reasoning = message.reasoning or msgspec.UNSET
    calls = [
        ReplyToolCall(
            id=call.id or "", type="custom", custom=ReplyCustomTool(call.name, call.arguments)
        )
        if call.is_custom
        else ReplyToolCall(id=call.id or "", function=ReplyFunction(call.name, call.arguments))
        for call in message.calls
    ]
    return ReplyMessage(
        "assistant",
        content if content or not calls else None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls if calls or only_calls else msgspec.UNSET,
    )
