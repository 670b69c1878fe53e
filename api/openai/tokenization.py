"""`/tokenize` and `/detokenize`: checks the body, and makes the answer."""

from __future__ import annotations

from ostinato.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest, TokenizeResponse
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import ServedModel

__all__ = ("check", "to_text", "to_token_response")


def check(body: TokenizeRequest) -> None:
    """Raises InvalidRequestError if not exactly one of `prompt` and `messages` is given."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")


def to_token_response(
    body: TokenizeRequest, token_ids: list[int], tokenizer: Tokenizer, model: ServedModel
) -> TokenizeResponse:
    """The answer of `/tokenize`."""
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=model.max_model_len,
        tokens=token_ids,
        token_strs=list(map(tokenizer.token, token_ids)) if body.return_token_strs else None,
    )


def to_text(body: DetokenizeRequest, tokenizer: Tokenizer, model: ServedModel) -> str:
    """The text of `tokens`, special tokens included.

    Raises:
        InvalidRequestError: an id is outside the vocabulary.
    """
    for token_id in body.tokens:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequestError(
                f"tokens has id {token_id}, but the vocabulary of {model.name} is"
                f" [0, {model.vocab_size})",
                param="tokens",
                code="invalid_value",
            )
    return tokenizer.decode(body.tokens, skip_special_tokens=False)
