"""The legacy dialect: `/v1/completions`, for text or token ids, one prompt or many.

Pure functions of plain data; the handler in `routes` joins them.
"""

from __future__ import annotations

import msgspec

from ostinato.api.generation import (
    CollectedCompletion,
    Generation,
    ReplyHead,
    check_stream_options,
    make_generation,
)
from ostinato.api.logprobs import TokenBytes, completion_logprobs, token_text
from ostinato.api.schemas import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    Usage,
)
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types import MAX_N, RequestOutput, ServedModel

__all__ = (
    "TextOffsets",
    "check",
    "prompts",
    "to_chunk",
    "to_requests",
    "to_response",
    "usage_chunk",
)

_MAX_SEQUENCES = 2048  # prompts times n of one request


def check(body: CompletionRequest) -> None:
    """Refuses what no tokenisation is needed to refuse.

    Raises:
        InvalidRequestError: two fields contradict each other.
    """
    check_stream_options(body)


def prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts, each a text or each a list of token ids.

    Raises:
        InvalidRequestError: there are none, too many, or the two kinds are mixed.
    """
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("prompt is empty: send at least one", param="prompt")
    token_ids = [item for item in given if isinstance(item, int)]
    if len(token_ids) == len(given):
        return [token_ids]
    num_sequences = len(given) * min(body.n or 1, MAX_N)
    if num_sequences > _MAX_SEQUENCES:
        raise InvalidRequestError(
            f"prompt has {len(given)} prompts, {num_sequences} sequences with n; one request may"
            f" have {_MAX_SEQUENCES}: send several",
            param="prompt",
        )
    texts = [item for item in given if isinstance(item, str)]
    lists = [item for item in given if isinstance(item, list)]
    if len(texts) == len(given):
        return texts
    if len(lists) == len(given):
        return lists
    raise InvalidRequestError(
        "prompt mixes texts and token ids; send all of one kind", param="prompt"
    )


def to_requests(
    body: CompletionRequest,
    prompts_token_ids: list[list[int]],
    model: ServedModel,
    *,
    request_id: str,
    default_max_tokens: int | None,
) -> list[Generation]:
    """What the engine is asked, one per prompt; see `make_generation`."""
    return [
        make_generation(
            body,
            prompt_token_ids,
            model,
            request_id=request_id if len(prompts_token_ids) == 1 else f"{request_id}-{index}",
            max_tokens=body.max_tokens,
            default_max_tokens=default_max_tokens,
            logprobs=body.logprobs,
            field_names={},
        )
        for index, prompt_token_ids in enumerate(prompts_token_ids)
    ]


class TextOffsets:
    """Where the next token of each completion begins, in characters of its tokens' texts."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offsets: dict[int, int] = {}

    def advance(self, choice: int, token_ids: list[int]) -> int:
        """The offset of `token_ids[0]`; the next call's lies behind these tokens."""
        begin = self._offsets.get(choice, 0)
        length = sum(len(token_text(self._token_bytes(token_id))) for token_id in token_ids)
        self._offsets[choice] = begin + length
        return begin


def to_chunk(
    head: ReplyHead,
    choice: int,
    output: RequestOutput,
    token_bytes: TokenBytes,
    *,
    num_top_logprobs: int | None,
    text_offset: int = 0,
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET,
) -> Completion | None:
    """The chunk for one piece of news, or None while its text is held back.

    Args:
        choice: prompt index * n + completion index.
        num_top_logprobs: alternatives per token; None = no log-probabilities.
        text_offset: see `TextOffsets`.
        usage: what the chunk's `usage` says; unset = it has none.
    """
    logprobs = None
    if num_top_logprobs is not None and output.new_token_ids:
        assert output.logprobs is not None, "the engine reports what the request asked for"
        logprobs = completion_logprobs(
            output.new_token_ids,
            output.logprobs,
            token_bytes,
            num_top=num_top_logprobs,
            text_offset=text_offset,
        )
    if not output.text_delta and logprobs is None and output.finish_reason is None:
        return None
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[
            CompletionChoice(
                index=choice,
                text=output.text_delta,
                logprobs=logprobs,
                finish_reason=output.finish_reason,
                stop_reason=msgspec.UNSET if output.finish_reason is None else output.stop_reason,
            )
        ],
        usage=usage,
    )


def usage_chunk(head: ReplyHead, usage: Usage) -> Completion:
    """The last chunk of a stream with `stream_options.include_usage`."""
    return Completion(id=head.id, created=head.created, model=head.model, choices=[], usage=usage)


def to_response(
    head: ReplyHead,
    completions: dict[tuple[int, int], CollectedCompletion],
    token_bytes: TokenBytes,
    *,
    n: int,
    num_top_logprobs: int | None,
    usage: Usage,
) -> Completion:
    """The whole answer to a request without `stream`; `completions` as `collect` fills it."""
    choices = []
    for (prompt_index, index), one in sorted(completions.items()):
        logprobs = None
        if num_top_logprobs is not None:
            logprobs = completion_logprobs(
                one.token_ids, one.logprobs, token_bytes, num_top=num_top_logprobs, text_offset=0
            )
        choices.append(
            CompletionChoice(
                index=prompt_index * n + index,
                text=one.text,
                logprobs=logprobs,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
        )
    return Completion(
        id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
    )
