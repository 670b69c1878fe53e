"""Log-probabilities in the two formats of the OpenAI API: chat, and legacy completions.

Converting those of a large answer takes seconds. So it is done on the event loop in parts of about
a millisecond, and other tasks run between the parts. A thread would compete with the event loop for
the interpreter's lock: the loop would wait for it 5 ms and more, several times for each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from ostinato.api.schemas.chat_completions import ChatLogprobs, ChatTokenLogprob, TopLogprob
from ostinato.api.schemas.text_completions import CompletionLogprobs
from ostinato.api.schemas.usage import PromptLogprob, PromptLogprobs
from ostinato.runtime.types.outputs import TokenLogprobs

__all__ = (
    "ShownToken",
    "TokenBytes",
    "all_chat_logprobs",
    "all_completion_logprobs",
    "chat_logprobs",
    "completion_logprobs",
    "join_logprobs",
    "prompt_logprobs",
    "token_text",
)

TokenBytes = Callable[[int], bytes]
ShownToken = tuple[str, list[int]]  # a token's name and its bytes

_LOWEST = -9999.0  # JSON has no -infinity
_AT_ONCE = 16  # tokens of a part; with 20 alternatives each, they take about a millisecond
_encode = msgspec.json.Encoder().encode


def _encoded(entry: object) -> Any:
    """Encode the entry of one token as JSON immediately, and not with the whole answer.

    An answer can have millions of entries. One call that encodes or frees all of them would hold
    the interpreter's lock for long, and all other requests would wait.
    """
    return msgspec.Raw(_encode(entry))


async def _in_parts(count: int) -> AsyncIterator[slice]:
    """Slices that together cover `count` tokens. Other tasks run between them."""
    for begin in range(0, count, _AT_ONCE):
        if begin:
            await asyncio.sleep(0)
        yield slice(begin, begin + _AT_ONCE)


def token_text(piece: bytes) -> str:
    """A token's bytes as text; `bytes:\\xf0\\x9f` for bytes that are not UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    token_bytes: TokenBytes,
    *,
    num_top: int,
    as_ids: bool = False,
    shown: dict[int, ShownToken] | None = None,
) -> ChatLogprobs:
    """One entry per token, with its `num_top` most likely alternatives.

    Args:
        token_ids: the tokens.
        logprobs: the log-probabilities of each token.
        token_bytes: returns the bytes of a token.
        num_top: number of alternatives.
        as_ids: tokens are named `token_id:N`; their bytes are not changed.
        shown: a cache, token id -> name and bytes. Several calls for one answer share it, because
            the same tokens occur many times.
    """
    if shown is None:
        shown = {}

    def show(token_id: int) -> ShownToken:
        known = shown.get(token_id)
        if known is None:
            piece = token_bytes(token_id)
            known = shown[token_id] = _name(token_id, token_bytes, as_ids), list(piece)
        return known

    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top: list[TopLogprob] = []
        for top_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False):
            name, codes = show(top_id)
            top.append(TopLogprob(name, max(logprob, _LOWEST), codes))
        name, codes = show(token_id)
        itself = ChatTokenLogprob(name, max(entry.logprob, _LOWEST), codes, top)
        content.append(_encoded(itself))
    return ChatLogprobs(content)


async def all_chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Callable[[slice], Sequence[TokenLogprobs]],
    token_bytes: TokenBytes,
    *,
    num_top: int,
    as_ids: bool = False,
    shown: dict[int, ShownToken] | None = None,
) -> ChatLogprobs:
    """`chat_logprobs` of many tokens, in parts. Other tasks run between the parts.

    Args:
        token_ids: the tokens.
        logprobs: returns the log-probabilities of some tokens.
        token_bytes: returns the bytes of a token.
        num_top: see `chat_logprobs`, like the next two.
        as_ids: tokens are named `token_id:N`.
        shown: a cache.
    """
    joined = ChatLogprobs([])
    shown = {} if shown is None else shown
    async for part in _in_parts(len(token_ids)):
        some = chat_logprobs(
            token_ids[part],
            logprobs(part),
            token_bytes,
            num_top=num_top,
            as_ids=as_ids,
            shown=shown,
        )
        joined.content.extend(some.content)
    return joined


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    token_bytes: TokenBytes,
    *,
    num_top: int,
    text_offset: int,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Log-probabilities in the legacy format: four lists with one entry per token.

    Args:
        token_ids: the tokens.
        logprobs: the log-probabilities of each token; None for the first token of a prompt.
        token_bytes: returns the bytes of a token.
        num_top: number of most likely alternatives per token. The sampled token is added if it is
            not among them.
        text_offset: number of characters before the first token.
        as_ids: tokens are named `token_id:N`. Offsets still count the characters of their texts.
    """
    names, offsets = [], []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        name = _name(token_id, token_bytes, as_ids)
        names.append(name)
        offsets.append(text_offset)
        text_offset += len(token_text(token_bytes(token_id)))
        values.append(None if entry is None else max(entry.logprob, _LOWEST))
        tops.append(
            None
            if entry is None
            else _encoded(
                {
                    _name(top_id, token_bytes, as_ids): max(value, _LOWEST)
                    for top_id, value in zip(
                        entry.top_ids[:num_top], entry.top_logprobs, strict=False
                    )
                }
                | {name: max(entry.logprob, _LOWEST)}
            )
        )
    return CompletionLogprobs(names, values, tops, offsets)


async def all_completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Callable[[slice], Sequence[TokenLogprobs | None]],
    token_bytes: TokenBytes,
    *,
    num_top: int,
    text_offset: int = 0,
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """`completion_logprobs` of many tokens, in parts, and the number of characters up to their end.

    Args:
        token_ids: the tokens.
        logprobs: returns the log-probabilities of some tokens; see `completion_logprobs`.
        token_bytes: returns the bytes of a token.
        num_top: see `completion_logprobs`, like the next two.
        text_offset: number of characters before the first token.
        as_ids: tokens are named `token_id:N`.
    """
    joined = CompletionLogprobs([], [], [], [])
    async for part in _in_parts(len(token_ids)):
        some = completion_logprobs(
            token_ids[part],
            logprobs(part),
            token_bytes,
            num_top=num_top,
            text_offset=text_offset,
            as_ids=as_ids,
        )
        joined.tokens.extend(some.tokens)
        joined.token_logprobs.extend(some.token_logprobs)
        joined.top_logprobs.extend(some.top_logprobs)
        joined.text_offset.extend(some.text_offset)
        text_offset = some.text_offset[-1] + len(token_text(token_bytes(token_ids[part][-1])))
    return joined, text_offset


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Append the lists of `second` to those of `first`, whose text comes first."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


async def prompt_logprobs(
    prompt_token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None,
    token_bytes: TokenBytes,
    *,
    num_top: int,
) -> PromptLogprobs:
    """For each prompt token, its `num_top` most likely candidates and the token itself, by id.

    The entry of the first token is None. Other tasks run after each part of the prompt.

    Args:
        prompt_token_ids: the prompt.
        logprobs: log-probabilities of the tokens after the first; None = they were not computed.
        token_bytes: returns the bytes of a token.
        num_top: number of most likely candidates.
    """
    if logprobs is None:
        return [None] * len(prompt_token_ids)
    result: PromptLogprobs = [None]
    for index, (token_id, entry) in enumerate(zip(prompt_token_ids[1:], logprobs, strict=True), 1):
        candidates = {
            str(top_id): PromptLogprob(max(value, _LOWEST), rank, token_text(token_bytes(top_id)))
            for rank, (top_id, value) in enumerate(
                zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False), 1
            )
        }
        itself = PromptLogprob(
            max(entry.logprob, _LOWEST), entry.rank, token_text(token_bytes(token_id))
        )
        result.append(_encoded(candidates | {str(token_id): itself}))
        if index % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return result


def _name(token_id: int, token_bytes: TokenBytes, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else token_text(token_bytes(token_id))
