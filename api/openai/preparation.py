"""Prepares requests of the OpenAI endpoints.

The functions keep no state between requests. They run on the event loop or in a fork
(`api/preparation/preparer.py`). A fork sends its result as JSON, so a result has only the fields
that a reply needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ostinato.api.chat.chat_generation import ChatGeneration, prepare_chat
from ostinato.api.chat.chat_prompt import encode_messages
from ostinato.api.openai import chat, completions, tokenization
from ostinato.api.openai.completions import Echo
from ostinato.api.preparation.generation import Generation
from ostinato.api.preparation.preparation import Arrival, Preparation
from ostinato.api.preparation.prompt_report import PromptReport, prompt_report
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.client_fields import Metadata, ServiceTier
from ostinato.api.schemas.generation_fields import StreamOptions
from ostinato.api.schemas.response_format import constraint_field
from ostinato.api.schemas.text_completions import CompletionRequest
from ostinato.api.schemas.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest
from ostinato.api.service.reply_state import ReplyOptions, new_id

__all__ = (
    "FUNCTIONS",
    "PreparedChat",
    "PreparedCompletion",
    "PreparedPrompt",
    "prepare_chat_completion",
    "prepare_completion",
    "prepare_detokenization",
    "prepare_tokenization",
)


class _StreamFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the body that replies of both endpoints need."""

    model: str | None
    stream: bool
    stream_options: StreamOptions | None
    stream_interval: int
    options: ReplyOptions


class PreparedChat(_StreamFields, frozen=True, kw_only=True):
    """A request of `/v1/chat/completions`."""

    ready: ChatGeneration
    echo: str  # text with which the answer begins
    metadata: Metadata | None
    service_tier: ServiceTier | None


def prepare_chat_completion(
    preparation: Preparation, data: bytes, arrival: Arrival
) -> PreparedChat:
    """Prepare a request of `/v1/chat/completions`.

    Raises:
        InvalidRequestError: the body is not valid, or `check` or `prepare_chat` refuses it.
        FetchNeededError: media must be fetched first.
        ForkNeededError: the request has media or a template of its own, and this process lacks the
            grant for them.
    """
    body = preparation.decode(data, arrival, ChatCompletionRequest)
    chat.check(body)
    request_id = new_id("chatcmpl", body.request_id, arrival.request_id)
    return PreparedChat(
        model=body.model,
        stream=bool(body.stream),
        stream_options=body.stream_options,
        stream_interval=body.stream_interval or 1,
        options=chat.reply_options(body),
        ready=prepare_chat(preparation, body, arrival, request_id=request_id),
        echo=chat.echo_text(body),
        metadata=body.metadata,
        service_tier=body.service_tier,
    )


class PreparedPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt of a request of `/v1/completions`."""

    token_ids: list[int]
    max_tokens: int | None
    report: PromptReport = PromptReport()  # the parts of the prompt that the reply shows
    echo: str | None = None  # the prompt's text, if the completion repeats it


class PreparedCompletion(_StreamFields, frozen=True, kw_only=True):
    """A request of `/v1/completions`. Values that are equal for all prompts are stored once."""

    first: Generation  # of the first prompt, without token ids
    prompts: list[PreparedPrompt]
    constraint_field: str  # the field of the request that has the constraint
    request_id: str
    has_output: bool  # false = `max_tokens` is 0

    @property
    def generations(self) -> list[Generation]:
        """One generation per prompt."""
        is_alone = len(self.prompts) == 1
        return [
            msgspec.structs.replace(
                self.first,
                request_id=self.request_id if is_alone else f"{self.request_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=self.first.sampling.with_unchecked(max_tokens=prompt.max_tokens),
            )
            for index, prompt in enumerate(self.prompts)
        ]

    @property
    def echoes(self) -> list[Echo]:
        """The prompts that the completions repeat; empty without `echo`."""
        return [
            Echo(text=prompt.echo, token_ids=prompt.token_ids)
            for prompt in self.prompts
            if prompt.echo is not None
        ]


def prepare_completion(
    preparation: Preparation, data: bytes, arrival: Arrival
) -> PreparedCompletion:
    """Prepare a request of `/v1/completions`.

    Raises:
        InvalidRequestError: the body is not valid, two fields contradict each other, a parameter
            is out of range, or a prompt does not fit.
    """
    body = preparation.decode(data, arrival, CompletionRequest)
    completions.check(body)
    prompts = completions.prompts(body)
    token_ids = _encode_prompts(preparation, body, prompts)
    generations = completions.to_generations(body, token_ids, preparation)
    first = generations[0]
    return PreparedCompletion(
        model=body.model,
        stream=bool(body.stream),
        stream_options=body.stream_options,
        stream_interval=body.stream_interval or 1,
        options=completions.reply_options(body),
        first=msgspec.structs.replace(first, prompt_token_ids=[]),
        prompts=_prepared_prompts(preparation, body, prompts, generations),
        constraint_field=constraint_field(body),
        request_id=new_id("cmpl", body.request_id, arrival.request_id),
        has_output=body.max_tokens != 0,
    )


def prepare_tokenization(preparation: Preparation, data: bytes, arrival: Arrival) -> bytes:
    """The answer of `/tokenize`, as JSON.

    Raises:
        InvalidRequestError: the body is not valid, it does not have exactly one of `prompt` and
            `messages`, or `encode_messages` refuses the messages or the tools.
        FetchNeededError: media must be fetched first.
        ForkNeededError: the request has media or a template of its own, and this process lacks the
            grant for them.
    """
    body = preparation.decode(data, arrival, TokenizeRequest)
    tokenizer = preparation.encoder.tokenizer("prompt")
    tokenization.check(body)
    if body.messages is not None:
        token_ids = encode_messages(preparation, body, body.messages, arrival)
    else:
        preparation.begin_prompt("prompt")
        special = body.add_special_tokens is not False
        token_ids = tokenizer.encode(body.prompt or "", add_special_tokens=special)
    return msgspec.json.encode(
        tokenization.to_token_response(body, token_ids, tokenizer, preparation.model)
    )


def prepare_detokenization(preparation: Preparation, data: bytes, arrival: Arrival) -> bytes:
    """The answer of `/detokenize`, as JSON.

    Raises:
        InvalidRequestError: the body is not valid, or an id is outside the vocabulary.
    """
    body = preparation.decode(data, arrival, DetokenizeRequest)
    tokenizer = preparation.encoder.tokenizer("tokens")
    preparation.begin_prompt("tokens")
    text = tokenization.to_text(body, tokenizer, preparation.model)
    return msgspec.json.encode(DetokenizeResponse(text))


FUNCTIONS = (
    prepare_chat_completion,
    prepare_completion,
    prepare_tokenization,
    prepare_detokenization,
)


def _encode_prompts(
    preparation: Preparation, body: CompletionRequest, prompts: list[str] | list[list[int]]
) -> list[list[int]]:
    encoder = preparation.encoder
    preparation.begin_prompt("prompt")
    return [
        encoder.encode(prompt, body, param="prompt", add_special_tokens=body.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _prepared_prompts(
    preparation: Preparation,
    body: CompletionRequest,
    prompts: Sequence[str | list[int]],
    generations: Sequence[Generation],
) -> list[PreparedPrompt]:
    encoder = preparation.encoder
    prepared = []
    for prompt, one in zip(prompts, generations, strict=True):
        report = prompt_report(
            encoder, body, prompt, one, add_special_tokens=body.add_special_tokens
        )
        echo = None
        if body.echo:
            # A text that was not truncated is repeated unchanged.
            is_whole = isinstance(prompt, str) and body.truncate_prompt_tokens is None
            echo = (
                prompt
                if isinstance(prompt, str) and is_whole
                else encoder.tokenizer("echo").decode(
                    one.prompt_token_ids, skip_special_tokens=body.skip_special_tokens
                )
            )
        prepared.append(
            PreparedPrompt(
                token_ids=one.prompt_token_ids,
                max_tokens=one.sampling.max_tokens,
                report=report,
                echo=echo,
            )
        )
    return prepared
