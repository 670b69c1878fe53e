"""`/tokenize` and `/detokenize`: see what the model sees."""

from __future__ import annotations

from ostinato.api.chat import asks_for_answer, template_messages
from ostinato.api.schemas import DetokenizeRequest, TokenizeRequest, TokenizeResponse
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.tokenizer import Tokenizer
from ostinato.runtime.types import ServedModel

__all__ = ("text_to_tokenize", "to_text", "to_token_response")


def text_to_tokenize(body: TokenizeRequest, tokenizer: Tokenizer) -> tuple[str, bool]:
    """(text, whether special tokens are added around it).

    Raises:
        InvalidRequestError: not exactly one of `prompt` and `messages`.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return body.prompt, body.add_special_tokens is not False
    text = tokenizer.apply_chat_template(
        template_messages(body.messages or []),
        add_generation_prompt=asks_for_answer(body),
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    return text, body.add_special_tokens is True


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
    """The text of `tokens`, special ones included.

    Raises:
        InvalidRequestError: an id is outside of the vocabulary.
    """
    for token_id in body.tokens:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequestError(
                f"tokens has id {token_id}, the vocabulary of {model.name} is"
                f" [0, {model.vocab_size})",
                param="tokens",
                code="invalid_value",
            )
    return tokenizer.decode(body.tokens, skip_special_tokens=False)
