"""Log-probabilities in the two shapes of the OpenAI API: chat, and the legacy completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.api.schemas import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from ostinato.runtime.types import TokenLogprobs

__all__ = ("TokenBytes", "chat_logprobs", "completion_logprobs", "token_text")

TokenBytes = Callable[[int], bytes]

_LOWEST = -9999.0  # JSON has no -infinity


def token_text(piece: bytes) -> str:
    """A token's bytes as text; a part of a character is written `bytes:\\xf0\\x9f`."""
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
) -> ChatLogprobs:
    """One entry per token, each with its `num_top` likeliest alternatives."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        piece = token_bytes(token_id)
        top = [
            TopLogprob(token_text(alternative), max(logprob, _LOWEST), list(alternative))
            for alternative, logprob in zip(
                map(token_bytes, entry.top_ids[:num_top]), entry.top_logprobs, strict=False
            )
        ]
        logprob = max(entry.logprob, _LOWEST)
        content.append(ChatTokenLogprob(token_text(piece), logprob, list(piece), top))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    token_bytes: TokenBytes,
    *,
    num_top: int,
    text_offset: int,
) -> CompletionLogprobs:
    """Four lists of one entry per token.

    Args:
        num_top: likeliest alternatives per token; the sampled one is added when it is not among
        them. text_offset: characters of tokens before the first of these.
    """
    texts, offsets, tops = [], [], []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = token_text(token_bytes(token_id))
        texts.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        likeliest = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        top = {token_text(token_bytes(top_id)): max(value, _LOWEST) for top_id, value in likeliest}
        tops.append(top | {text: max(entry.logprob, _LOWEST)})
    return CompletionLogprobs(
        texts, [max(entry.logprob, _LOWEST) for entry in logprobs], tops, offsets
    )
